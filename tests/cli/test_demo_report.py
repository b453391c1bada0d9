"""The demo's report and tables show exactly the content of the journals."""

import copy
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from cli.journals import STEPS, VICTIM, SyntheticRun
from msgspec.structs import replace
from rich.console import Console

from fabric.audit.journal import read_run
from fabric.cli.demo.command import EXPECT, write_events
from fabric.cli.terminal_text import print_table
from fabric.drill.judge.drill_record import DrillRecord
from fabric.drill.judge.drill_verdict import DrillVerdict, judge_drill
from fabric.drill.report.charts import nice_ticks
from fabric.drill.report.documents import failure_table, join_table, overview_table, page_of


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return SyntheticRun().write(tmp_path / "run")


def judged(directory: Path) -> DrillVerdict:
    return judge_drill(DrillRecord(read_run(directory), ended=float("inf")), EXPECT)


def render(verdict: DrillVerdict) -> str:
    return page_of(verdict, "fabric demo", "three replicas")


@pytest.fixture
def verdict(directory: Path) -> DrillVerdict:
    return judged(directory)


class _Collector(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    collector = _Collector()
    collector.feed(page)
    return collector.tags


def test_the_page_needs_nothing_from_elsewhere(verdict: DrillVerdict) -> None:
    page = render(verdict)
    for tag, attributes in tags(page):
        assert tag not in {"link", "iframe", "img"}
        assert "src" not in attributes and "href" not in attributes
    assert "//" not in re.sub(r"<!--.*?-->", "", page).replace("</", "")
    assert "$" not in page


def test_the_page_draws_every_commit_and_every_epoch(verdict: DrillVerdict) -> None:
    page = render(verdict)
    found = tags(page)
    tips = [attributes["data-tip"] or "" for _, attributes in found if "data-tip" in attributes]
    circles = [tag for tag, _ in found if tag == "circle"]
    commits = sum(len(lines) for lines in verdict.evidence.commits.values())
    assert len(circles) == commits
    assert len([tip for tip in tips if "(replayed)" in tip]) == 2
    assert any(f"{VICTIM} in epoch 3" in tip for tip in tips)
    assert f"{VICTIM} dies" in page and f"{VICTIM} joins" in page
    assert "verdict good" in page


def test_the_page_of_a_run_with_a_broken_invariant_says_so_and_escapes_names(directory: Path) -> None:
    path = directory / "journal" / "r0.jsonl"
    lines = path.read_text().splitlines()
    name = "<script>alert(1)</script>"
    path.write_text("\n".join(lines[:-6] + lines[-5:]) + "\n")
    other = [line.replace('"r2"', json.dumps(name)) for line in lines if '"state"' in line]
    path.with_name("r2.jsonl").write_text("\n".join(other) + "\n")
    page = render(judged(directory))
    assert "verdict bad" in page and "<li>" in page and name not in page


def test_the_page_of_a_run_with_skipped_samples_does_not_say_that_each_counts_once(
    verdict: DrillVerdict,
) -> None:
    page = render(replace(verdict, summary=replace(verdict.summary, samples_skipped=2)))
    assert "2 samples skipped." in page and "every sample counted once" not in page
    assert "every sample counted once" in render(verdict)


def test_an_empty_run_can_be_drawn(tmp_path: Path) -> None:
    run = SyntheticRun()
    run.entries = {name: copy.deepcopy(entries[:1]) for name, entries in run.entries.items()}
    assert "did not finish" in render(judged(run.write(tmp_path / "empty")))


def test_events_are_merged_by_time(directory: Path, verdict: DrillVerdict) -> None:
    write_events(directory, verdict.evidence.run)
    events = [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
    times = [event["t"] for event in events]
    assert times == sorted(times)
    journals = sum(len(journal.lines) for journal in verdict.evidence.run.journals.values())
    assert len(events) == journals + len(verdict.evidence.run.supervisor)
    kill = next(event for event in events if event["event"] == "kill")
    assert kill["source"] == "supervisor" and kill["replica"] == VICTIM


def test_the_tables_show_failures_and_joins(verdict: DrillVerdict) -> None:
    output = io.StringIO()
    for table in (overview_table, failure_table, join_table):
        shown = table(verdict.summary)
        print_table(Console(file=output, width=160), shown.title, shown.head, shown.rows)
    text = output.getvalue()
    assert f" {STEPS} " in text and "equal" in text
    assert "4.0 MB" in text and "0.20 GB/s" in text and VICTIM in text


def test_axis_ticks_are_round_numbers_inside_the_range() -> None:
    assert nice_ticks(0, 10, 5) == [0, 2, 4, 6, 8, 10]
    for low, high in [(0.13, 5.7), (0, 0.003), (-3, 3), (5, 5)]:
        ticks = nice_ticks(low, high)
        assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
        assert ticks == sorted(set(ticks))
