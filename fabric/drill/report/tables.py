"""A verdict as tables of text, for the terminal and for the pages of the drill and of the demo."""

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape

from fabric.audit.summary import RunSummary
from fabric.drill.judge.drill_record import InjectedFault
from fabric.drill.judge.drill_verdict import DrillVerdict


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
