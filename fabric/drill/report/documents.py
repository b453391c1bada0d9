"""The verdict as a JSON document, as JUnit XML and as a page, which needs no network and no other file."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from string import Template
from typing import Any
from xml.etree import ElementTree

from fabric.audit.journal import lines_of
from fabric.audit.summary import RunSummary
from fabric.drill.judge.drill_record import InjectedFault
from fabric.drill.judge.drill_verdict import DrillVerdict
from fabric.drill.report.charts import ChartPoint, ChartSpan, strokes
from fabric.model import printable

# A verdict as tables of text, for the terminal and for the pages of the drill and of the demo.


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table with its title; every cell is text."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


def expectation_table(verdict: DrillVerdict) -> TextTable:
    rows = tuple(
        (
            outcome.expectation,
            outcome.shown,
            "-" if outcome.value is None and outcome.holds else "yes" if outcome.holds else "NO",
            outcome.why,
        )
        for outcome in verdict.outcomes
    )
    return TextTable("Expectations", ("expected", "measured", "held", "why not"), rows)


def fault_table(verdict: DrillVerdict) -> TextTable:
    """Return one row per fault, in order of time; seconds count from the first fault."""
    zero = min((fault.began for fault in verdict.faults), default=0.0)
    rows = tuple(
        (
            f"{fault.began - zero:.1f} s",
            fault.title,
            f"{fault.ended - fault.began:.1f} s",
            _seconds(fault.stall_s),
            _rejoined(fault),
            fault.observed or "NO EFFECT SEEN",
        )
        for fault in verdict.faults
    )
    return TextTable("Faults", ("at", "fault", "lasted", "stall", "back after", "seen"), rows)


def kind_table(verdict: DrillVerdict) -> TextTable:
    """Return one row per kind of fault: the count, and the distribution of the stalls."""
    stalls: dict[str, list[float]] = {}
    for fault in verdict.faults:
        stalls.setdefault(fault.name, []).extend([] if fault.stall_s is None else [fault.stall_s])
    counts = {name: sum(fault.name == name for fault in verdict.faults) for name in stalls}
    rows = tuple(
        (
            name,
            str(counts[name]),
            _seconds(statistics.median(values) if values else None),
            _seconds(max(values, default=None)),
        )
        for name, values in sorted(stalls.items())
    )
    return TextTable("Faults by kind", ("fault", "count", "median stall", "longest stall"), rows)


def overview_table(summary: RunSummary) -> TextTable:
    """Return the facts on the whole run, one fact per row."""
    rows = (
        ("steps", str(summary.steps)),
        ("failures", str(len(summary.failure_list))),
        ("joins", str(len(summary.join_list))),
        ("steps lost", str(summary.steps_lost)),
        ("samples skipped, repeated", f"{summary.samples_skipped}, {summary.samples_repeated}"),
        ("digests of all replicas", "equal" if summary.digests_equal else "DIFFERENT"),
        ("median step", f"{summary.median_step_s:.3f} s"),
        ("longest stall of a survivor", f"{summary.max_survivor_stall_s:.3f} s"),
        ("final loss", f"{summary.final_loss:.4f}"),
    )
    return TextTable("", ("the run", ""), rows)


def failure_table(summary: RunSummary) -> TextTable:
    """Return one row per process that died; times count from its death."""
    rows = tuple(
        (
            f.replica,
            str(f.step),
            *(_seconds(s, "not recorded") for s in (f.detected_s, f.epoch_s, f.first_commit_s)),
        )
        for f in summary.failure_list
    )
    head = ("replica", "at step", "detected", "epoch committed", "first step committed")
    return TextTable("Failures, seconds after the process died", head, rows)


def join_table(summary: RunSummary) -> TextTable:
    """Return one row per process that entered the running job; ``replayed`` counts steps."""
    rows = tuple(
        (
            j.replica,
            str(j.step),
            f"{j.bytes / 1e6:.1f} MB",
            f"{j.seconds:.3f} s",
            f"{j.bytes / max(j.seconds, 1e-9) / 1e9:.2f} GB/s",
            str(j.replayed),
            f"{j.catch_up_s:.3f} s",
        )
        for j in summary.join_list
    )
    head = ("replica", "at step", "fetched", "in", "rate", "replayed", "caught up")
    return TextTable("Joins", head, rows)


def html_table(table: TextTable, empty: str = "None.") -> str:
    """Return the table for a page, without its title; a table without rows is the sentence ``empty``."""
    if not table.rows:
        return f"<p>{empty}</p>"

    def row(tag: str, cells: Iterable[str]) -> str:
        return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>"

    return f"<table>{row('th', table.head)}{''.join(row('td', cells) for cells in table.rows)}</table>"


def html_list(sentences: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(sentence)}</li>" for sentence in sentences)
    return f"<ul>{items}</ul>" if items else ""


def html_facts(*facts: tuple[str, str]) -> str:
    """Return values with their names, for the top of a page."""
    return "".join(f'<div class="fact"><b>{value}</b><span>{name}</span></div>' for value, name in facts)


def _rejoined(fault: InjectedFault) -> str:
    if not fault.rejoined_s:
        return "-"
    worst = max(fault.rejoined_s.values())
    return "never" if math.isinf(worst) else f"{worst:.3f} s"


def _seconds(value: float | None, missing: str = "-") -> str:
    return missing if value is None else f"{value:.3f} s"


def as_json(verdict: DrillVerdict) -> dict[str, Any]:
    """Return the JSON object; a replica that never returned has null seconds."""
    return {
        "holds": verdict.holds,
        "expectations": [
            {
                "expectation": outcome.expectation,
                "holds": outcome.holds,
                "value": _finite(outcome.value),
                "shown": outcome.shown,
                "why": outcome.why,
            }
            for outcome in verdict.outcomes
        ],
        "mistakes": list(verdict.mistakes),
        "broken": list(verdict.broken),
        "disagreements": list(verdict.disagreements),
        "unseen": list(verdict.unseen),
        "faults": [_fault(fault) for fault in verdict.faults],
        "median_step_s": verdict.median_step_s,
        "summary": verdict.summary.as_json(),
    }


def as_junit(verdict: DrillVerdict) -> bytes:
    """Return JUnit XML: a test case for each expectation, and one for the drill's own faults."""
    cases = [(o.expectation, o.holds, o.value is None, o.why) for o in verdict.outcomes]
    cases.append(("faults-happened-and-ended", not verdict.mistakes, False, "; ".join(verdict.mistakes)))
    failed = sum(not holds for _, holds, _, _ in cases)
    # XML allows no control characters.
    suite = ElementTree.Element("testsuite", name="fabric drill", tests=str(len(cases)), failures=str(failed))
    for name, holds, is_skipped, why in cases:
        case = ElementTree.SubElement(suite, "testcase", classname="fabric.drill", name=printable(name, " "))
        if not holds:
            ElementTree.SubElement(case, "failure", message=printable(why, " "))
        elif is_skipped:
            ElementTree.SubElement(case, "skipped", message=printable(why, " "))
    return bytes(ElementTree.tostring(suite, encoding="utf-8", xml_declaration=True))


def _fault(fault: InjectedFault) -> dict[str, Any]:
    return {
        "fault": fault.name,
        "targets": list(fault.targets),
        "about": fault.about,
        "began": fault.began,
        "ended": fault.ended,
        "observed": fault.observed,
        "undone": fault.undone,
        "stall_s": fault.stall_s,
        "rejoined_s": {name: _finite(seconds) for name, seconds in fault.rejoined_s.items()},
        "timeline": list(fault.timeline),
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


_MOST_STEPS = 4000


def page_of(verdict: DrillVerdict, command: str) -> str:
    """Return the page as text; ``command`` is the line that repeats the drill."""
    template = Template((files("fabric.drill.report") / "drill_page.html").read_text(encoding="utf-8"))
    summary, stall = verdict.summary, max((fault.stall_s or 0.0 for fault in verdict.faults), default=0.0)
    return template.substitute(
        verdict="The job held." if verdict.holds else "The job did not hold.",
        verdict_class="good" if verdict.holds else "bad",
        command=escape(command),
        facts=html_facts(
            (str(len(verdict.faults)), "faults"),
            (str(summary.steps), "committed steps"),
            (str(summary.steps_lost), "steps lost"),
            (f"{summary.samples_skipped}, {summary.samples_repeated}", "samples skipped, repeated"),
            (f"{verdict.median_step_s:.3f} s", "median step"),
            (f"{stall:.3f} s", "longest stall at a fault"),
        ),
        picture=_picture(verdict),
        expectations=html_table(expectation_table(verdict)),
        sentences=html_list(
            [*verdict.mistakes, *verdict.broken[:50], *verdict.disagreements[:50], *verdict.unseen]
        ),
        faults=html_table(fault_table(verdict)),
        kinds=html_table(kind_table(verdict)),
        timelines="".join(
            f"<details><summary>{escape(fault.title)}</summary>{html_list(fault.timeline)}</details>"
            for fault in verdict.faults
        ),
    )


def _picture(verdict: DrillVerdict) -> str:
    """Draw the commits of every replica over time, with the faults as bands."""
    journals = verdict.evidence.run.journals
    commits = {name: lines_of(journal.lines, "commit") for name, journal in sorted(journals.items())}
    times = [line.t for lines in commits.values() for line in lines]
    if not times:
        return "<p>No replica committed a step.</p>"
    zero, seconds = min(times), max(times) - min(times)

    def after(t: float) -> float:
        return min(max(t - zero, 0.0), seconds)

    points = {
        name: [
            ChartPoint(after(x.t), 0.0, "", x.flag("replay")) for x in lines[:: 1 + len(lines) // _MOST_STEPS]
        ]
        for name, lines in commits.items()
    }
    bands = [ChartSpan(after(x.began), after(x.ended), f"{x.title}: {x.observed}") for x in verdict.faults]
    return strokes(points, bands, seconds)
