"""The verdict as a JSON document, as JUnit XML and as a page, which needs no network and no other file."""

import json
import math
import statistics
from collections.abc import Iterable
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any
from xml.etree import ElementTree

from msgspec.structs import asdict

from fabric.audit.journal import JournalLine, ReplicaJournal, lines_of
from fabric.audit.summary import RunSummary, mean_loss, step_gaps
from fabric.drill.judge.drill_record import InjectedFault
from fabric.drill.judge.drill_verdict import DrillVerdict
from fabric.drill.report.charts import (
    ChartMark,
    ChartPoint,
    ChartSpan,
    ChartTime,
    bars,
    colour,
    curves,
    rosters,
)
from fabric.model import Value, printable

# A verdict as tables of text, for the terminal and for the pages of the drill and of the demo.


class TextTable(Value):
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
            _seconds(max(fault.rejoined_s.values(), default=None)),
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


def _seconds(value: float | None, missing: str = "-") -> str:
    return missing if value is None else "never" if math.isinf(value) else f"{value:.3f} s"


def as_json(verdict: DrillVerdict) -> dict[str, Any]:
    """Return the JSON object; a replica that never returned has null seconds."""
    return {
        "holds": verdict.holds,
        "expectations": [{**asdict(x), "value": _finite(x.value)} for x in verdict.outcomes],
        **{name: list(getattr(verdict, name)) for name in ("mistakes", "broken", "disagreements", "unseen")},
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
    plain = ("about", "began", "ended", "observed", "undone", "stall_s")
    return {
        "fault": fault.name,
        "targets": list(fault.targets),
        **{name: getattr(fault, name) for name in plain},
        "rejoined_s": {name: _finite(seconds) for name, seconds in fault.rejoined_s.items()},
        "timeline": list(fault.timeline),
    }


def _finite(value: float | None) -> float | None:
    return None if value is None or math.isinf(value) else value


def write_reports(verdict: DrillVerdict, folder: Path, command: str, title: str) -> None:
    """Write the page, the JSON and the JUnit XML; ``command`` is the line that repeats the drill."""
    page = page_of(verdict, command, title).encode(
        errors="backslashreplace"
    )  # JSON can have half a character
    (folder / "report.html").write_bytes(page)
    document = {"command": command, **as_json(verdict)}
    (folder / "report.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    (folder / "junit.xml").write_bytes(as_junit(verdict))


# A picture has at most so many commits of each replica, and so many labels.
_MOST_STEPS = 4000
_MOST_MARKS = 20


def page_of(verdict: DrillVerdict, command: str, title: str) -> str:
    """Return the page as text; ``command`` is the line that repeats the drill."""
    template = Template((files("fabric.drill.report") / "page.html").read_text(encoding="utf-8"))
    summary, names = verdict.summary, sorted(verdict.evidence.run.journals)
    stall = max((fault.stall_s or 0.0 for fault in verdict.faults), default=0.0)
    return template.substitute(
        title=escape(title),
        command=escape(command),
        verdict=_promises(verdict),
        verdict_class="good" if verdict.holds and not verdict.broken else "bad",
        sentences=html_list(
            [*verdict.mistakes, *verdict.broken[:50], *verdict.disagreements[:50], *verdict.unseen]
        ),
        facts=html_facts(
            (str(len(verdict.faults)), "faults"),
            (str(summary.steps), "committed steps"),
            (str(summary.steps_lost), "steps lost"),
            (f"{summary.samples_skipped}, {summary.samples_repeated}", "samples skipped, repeated"),
            (f"{verdict.median_step_s:.3f} s", "median step"),
            (f"{stall:.3f} s", "longest stall at a fault"),
            (f"{summary.final_loss:.4f}", "final loss"),
        ),
        legend="".join(
            f'<button data-replica="{escape(name)}" aria-pressed="true">'
            f'<i style="background:{colour(index)}"></i>{escape(name)}</button>'
            for index, name in enumerate(names)
        ),
        **_pictures(verdict),
        expectations=html_table(expectation_table(verdict)),
        faults=html_table(fault_table(verdict)),
        kinds=html_table(kind_table(verdict)),
        failures=html_table(failure_table(summary), "No process failed."),
        joins=html_table(join_table(summary), "No process joined the running job."),
        timelines="".join(
            f"<details><summary>{escape(fault.title)}</summary>{html_list(fault.timeline)}</details>"
            for fault in verdict.faults
        ),
    )


def _promises(verdict: DrillVerdict) -> str:
    """Return what the journals say about the promises of the protocol, in one sentence."""
    summary = verdict.summary
    if verdict.broken:
        return f"{len(verdict.broken)} promises of the protocol were broken."
    if not verdict.evidence.commits:
        return "No journal tells whether the promises of the protocol were kept."
    if summary.steps_lost or summary.samples_skipped:
        return (
            f"Every promise of the protocol was kept; {summary.steps_lost} steps were lost and "
            f"{summary.samples_skipped} samples skipped."
        )
    return (
        "Every step was committed once, with every sample counted once, and all replicas hold the same bits."
    )


_NO_LOSS = "<p>The script reports no loss: session.metrics(loss=...) gives one, per micro-batch.</p>"


def _pictures(verdict: DrillVerdict) -> dict[str, str]:
    """Draw the losses, the rosters and the step times over wall time, with the faults as bands."""
    evidence, summary = verdict.evidence, verdict.summary
    journals = dict(sorted(evidence.run.journals.items()))
    times = [line.t for journal in journals.values() for line in journal.lines]
    if not evidence.commits:
        return dict.fromkeys(("loss", "roster", "steps"), "<p>No replica committed a step.</p>")
    zero, seconds = min(times), max(times) - min(times)
    marks = [ChartMark(x.t - zero, "kill", f"{x.replica} dies") for x in summary.failure_list]
    marks += [ChartMark(x.t - zero, "join", f"{x.replica} joins") for x in summary.join_list]

    def after(t: float) -> float:
        return min(max(t - zero, 0.0), seconds)

    bands = [ChartSpan(after(x.began), after(x.ended), f"{x.title}: {x.observed}") for x in verdict.faults]
    run = ChartTime(seconds, marks if len(marks) <= _MOST_MARKS else (), bands)

    def loss_at(line: JournalLine) -> ChartPoint:
        replay, loss = line.flag("replay"), mean_loss(line.fields)
        tip = f"{line.replica}, step {line.integer('step')}: {loss:.4f}{' (replayed)' if replay else ''}"
        return ChartPoint(line.t - zero, loss, tip, hollow=replay)

    every = 1 + max(len(lines_of(x.lines, "commit")) for x in journals.values()) // _MOST_STEPS
    losses = {
        name: [list(map(loss_at, lines_of(life, "commit")[::every])) for life in journal.incarnations()]
        for name, journal in journals.items()
    }
    gaps: dict[str, list[ChartPoint]] = {name: [] for name in journals}
    for line, gap in step_gaps(evidence):
        tip = f"{line.replica}, step {line.integer('step')}: {gap:.3f} s"
        gaps[line.replica].append(ChartPoint(line.t - zero, gap, tip))
    # A stall must not be left out: of neighbouring steps the longest is drawn.
    longest = {
        name: [max(points[i : i + every], key=lambda x: x.value) for i in range(0, len(points), every)]
        for name, points in gaps.items()
    }
    spans = {name: _spans(journal, zero) for name, journal in journals.items()}
    has_losses = any(
        "loss" in line.fields["metrics"] for x in journals.values() for line in lines_of(x.lines, "commit")
    )
    return {
        "loss": curves(losses, run) if has_losses else _NO_LOSS,
        "roster": rosters(spans, run),
        "steps": bars(longest, run, summary.median_step_s),
    }


def _spans(journal: ReplicaJournal, zero: float) -> list[ChartSpan]:
    """Return the replica's epoch over time, from each epoch line of its journal to the next."""
    spans: list[ChartSpan] = []
    for lines in journal.incarnations():
        start, epoch = lines[0].t - zero, None
        for line in (*lines_of(lines, "epoch"), lines[-1]):
            end = line.t - zero
            what = "starts or catches up" if epoch is None else f"in epoch {epoch}"
            tip = f"{journal.replica} {what}, {start:.2f} s to {end:.2f} s"
            spans.append(ChartSpan(start, end, tip, epoch))
            is_member = journal.replica in line.fields.get("roster", ())
            start, epoch = end, line.integer("epoch") if is_member else None
    return spans
