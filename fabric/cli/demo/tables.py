"""The summary as tables: this module prints them in the terminal, ``report`` puts them into the page."""

from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

from fabric.audit.summary import RunSummary


@dataclass(frozen=True, slots=True)
class TextTable:
    """A table of the report, every cell as text."""

    head: tuple[str, ...]
    rows: list[tuple[str, ...]]


def overview_rows(summary: RunSummary) -> TextTable:
    """Return the facts on the whole run, one fact per row."""
    rows: list[tuple[str, ...]] = [
        ("steps", str(summary.steps)),
        ("failures", str(len(summary.failure_list))),
        ("joins", str(len(summary.join_list))),
        ("steps lost", str(summary.steps_lost)),
        ("samples skipped, repeated", f"{summary.samples_skipped}, {summary.samples_repeated}"),
        ("digests of all replicas", "equal" if summary.digests_equal else "DIFFERENT"),
        ("median step", f"{summary.median_step_s:.3f} s"),
        ("longest stall of a survivor", f"{summary.max_survivor_stall_s:.3f} s"),
        ("final loss", f"{summary.final_loss:.4f}"),
    ]
    return TextTable(("the run", ""), rows)


def failure_rows(summary: RunSummary) -> TextTable:
    """Return one row per process that died; times count from its death."""
    head = ("replica", "at step", "detected", "epoch committed", "first step committed")
    rows: list[tuple[str, ...]] = [
        (f.replica, str(f.step), _s(f.detected_s), _s(f.epoch_s), _s(f.first_commit_s))
        for f in summary.failure_list
    ]
    return TextTable(head, rows)


def join_rows(summary: RunSummary) -> TextTable:
    """Return one row per process that entered the running job; ``replayed`` counts steps."""
    head = ("replica", "at step", "fetched", "in", "rate", "replayed", "caught up")
    rows: list[tuple[str, ...]] = [
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
    ]
    return TextTable(head, rows)


def print_tables(console: Console, summary: RunSummary) -> None:
    """Print the overview, the failures and the joins."""
    sections = (
        ("", overview_rows(summary)),
        ("Failures, seconds after the process died", failure_rows(summary)),
        ("Joins", join_rows(summary)),
    )
    for title, text in sections:
        if not text.rows:
            continue
        table = Table(title=title or None, title_justify="left")
        for name in text.head:
            table.add_column(name)
        for row in text.rows:
            table.add_row(*row)
        console.print(table)


def _s(seconds: float | None) -> str:
    return "not recorded" if seconds is None else f"{seconds:.3f} s"
