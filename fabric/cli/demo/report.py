"""``report.html`` and ``events.jsonl``: a run for people to look at.

The page needs no network and no other file. It is written from the same evidence as the verdict, also for a
run that broke a promise.
"""

import json
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template

from fabric.audit.audit import Evidence
from fabric.audit.journal import JournalLine, ReplicaJournal, lines_of
from fabric.audit.summary import mean_loss, step_gaps
from fabric.audit.verify import Verdict
from fabric.drill.report.charts import ChartMark, ChartPoint, ChartSpan, bars, colour, curves, rosters
from fabric.drill.report.tables import failure_table, html_facts, html_list, html_table, join_table


def write_report(directory: Path, verdict: Verdict) -> None:
    (directory / "report.html").write_bytes(render(verdict).encode(errors="backslashreplace"))
    events = [json.dumps(entry) + "\n" for entry in merged_events(verdict.evidence)]
    (directory / "events.jsonl").write_text("".join(events), encoding="utf-8")


def merged_events(evidence: Evidence) -> list[Mapping[str, object]]:
    """Return all journal lines and supervisor events, ordered by wall time."""
    entries: list[Mapping[str, object]] = [
        dict(line.fields) for journal in evidence.run.journals.values() for line in journal.lines
    ]
    entries.extend({**event, "source": "supervisor"} for event in evidence.run.supervisor)
    return sorted(entries, key=lambda entry: float(str(entry["t"])))


def render(verdict: Verdict) -> str:
    evidence, summary = verdict.evidence, verdict.summary
    times = [line.t for journal in evidence.run.journals.values() for line in journal.lines]
    zero = min(times, default=0.0)
    seconds = max(times, default=0.0) - zero
    marks = [ChartMark(f.t - zero, "kill", f"{f.replica} dies") for f in summary.failure_list]
    marks += [ChartMark(j.t - zero, "join", f"{j.replica} joins") for j in summary.join_list]
    replicas = sorted(evidence.run.journals)
    spans = {name: _spans(evidence.run.journals[name], zero) for name in replicas}
    template = Template((files("fabric.cli.demo") / "report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=f"{len(replicas)} replicas, {summary.steps} steps, failures: {len(summary.failure_list)}",
        subtitle=f"A training run of {seconds:.1f} s, as the journals of its replicas tell it.",
        verdict=_verdict(verdict),
        verdict_class="bad" if verdict.broken else "good",
        broken=html_list(verdict.broken[:50]),
        facts=_facts(verdict),
        legend="".join(
            f'<button data-replica="{escape(name)}" aria-pressed="true">'
            f'<i style="background:{colour(index)}"></i>{escape(name)}</button>'
            for index, name in enumerate(replicas)
        ),
        loss=curves(_losses(evidence, zero), marks, seconds),
        roster=rosters(spans, marks, seconds),
        steps=bars(_step_times(evidence, zero), marks, seconds, summary.median_step_s),
        failures=html_table(failure_table(summary), "No process failed."),
        joins=html_table(join_table(summary), "No process joined the running job."),
    )


def _verdict(verdict: Verdict) -> str:
    if verdict.broken:
        return f"{len(verdict.broken)} promises of the protocol were broken."
    return (
        "Every step was committed once, with every sample counted once, and all replicas hold the same bits."
    )


def _facts(verdict: Verdict) -> str:
    summary = verdict.summary
    return html_facts(
        (str(summary.steps_lost), "steps lost"),
        (str(summary.samples_skipped), "samples skipped"),
        (str(summary.samples_repeated), "samples repeated"),
        (f"{summary.median_step_s:.3f} s", "median step"),
        (f"{summary.max_survivor_stall_s:.3f} s", "longest stall"),
        (f"{summary.final_loss:.4f}", "final loss"),
    )


def _losses(evidence: Evidence, zero: float) -> dict[str, list[list[ChartPoint]]]:
    return {
        replica: [
            [_loss(line, zero) for line in lines_of(lines, "commit")] for lines in journal.incarnations()
        ]
        for replica, journal in sorted(evidence.run.journals.items())
    }


def _loss(line: JournalLine, zero: float) -> ChartPoint:
    replay, loss = line.flag("replay"), mean_loss(line)
    tip = f"{line.replica}, step {line.integer('step')}: {loss:.4f}{' (replayed)' if replay else ''}"
    return ChartPoint(line.t - zero, loss, tip, hollow=replay)


def _step_times(evidence: Evidence, zero: float) -> dict[str, list[ChartPoint]]:
    series: dict[str, list[ChartPoint]] = {name: [] for name in sorted(evidence.run.journals)}
    for line, gap in step_gaps(evidence):
        tip = f"{line.replica}, step {line.integer('step')}: {gap:.3f} s"
        series[line.replica].append(ChartPoint(line.t - zero, gap, tip))
    return series


def _spans(journal: ReplicaJournal, zero: float) -> list[ChartSpan]:
    """Return the replica's epoch over time, from each epoch line of its journal to the next."""
    spans: list[ChartSpan] = []
    for lines in journal.incarnations():
        start, epoch = lines[0].t, None
        for line in lines_of(lines, "epoch"):
            member = journal.replica in line.fields["roster"]
            spans.append(_one_span(journal.replica, start - zero, line.t - zero, epoch))
            start, epoch = line.t, line.integer("epoch") if member else None
        spans.append(_one_span(journal.replica, start - zero, lines[-1].t - zero, epoch))
    return spans


def _one_span(replica: str, start: float, end: float, epoch: int | None) -> ChartSpan:
    what = "starts or catches up" if epoch is None else f"in epoch {epoch}"
    return ChartSpan(start, end, f"{replica} {what}, {start:.2f} s to {end:.2f} s", epoch)
