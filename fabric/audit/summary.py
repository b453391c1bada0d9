"""A run in numbers, all computed from the journals, and its verdict.

A *failure* is a process of a replica that did not finish. A *join* is a process that entered the running job
with a fetched state. The *stall* of a survivor is the time between two of its live commits, by the monotonic
clock of its own process. The time of a failure is the kill where the supervisor recorded it, else the last
line of the dead process in its journal.

``fabric demo verify`` recomputes the numbers. The demo's own claims do not count: ``summary.json`` is only
compared with the summary of the journals, and the promises of the protocol are checked on the journals
(``audit``).
"""

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from fabric.audit.audit import Evidence, audit, count_samples, digests_equal, finished, gather
from fabric.audit.journal import JournalLine, RecordedRun, lines_of, read_run
from fabric.errors import ConfigError
from fabric.model import Value

SUMMARY_FILE = "summary.json"
MAX_SUMMARY_BYTES = 1 << 24


class ReplicaDeath(Value):
    """One process that died. Times are seconds after its death, None where no journal has them.

    ``detected_s`` is the first abort of a survivor, ``epoch_s`` the first epoch without the dead
    replica, ``first_commit_s`` the first step that a survivor committed in that epoch or later.
    """

    replica: str
    t: float
    step: int
    detected_s: float | None
    epoch_s: float | None
    first_commit_s: float | None


class ReplicaJoin(Value):
    """One process that entered the running job, its fetch and its catch-up.

    ``catch_up_s`` runs from the start of its fetch to the first step that it committed with the others.
    """

    replica: str
    t: float
    step: int
    bytes: int
    seconds: float
    replayed: int
    catch_up_s: float


class RunSummary(Value):
    """The contents of ``summary.json``; ``failure_list`` and ``join_list`` have one entry for each."""

    steps: int
    steps_lost: int
    samples_skipped: int
    samples_repeated: int
    digests_equal: bool
    median_step_s: float
    max_survivor_stall_s: float
    final_loss: float
    failure_list: tuple[ReplicaDeath, ...]
    join_list: tuple[ReplicaJoin, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the JSON object, with the lists of failures and joins and their counts."""
        document: dict[str, Any] = msgspec.to_builtins(self)
        lists = {name: document.pop(name) for name in ("failure_list", "join_list")}
        document["failures"] = len(self.failure_list)
        document["joins"] = len(self.join_list)
        document["catch_up_s"] = max((join.catch_up_s for join in self.join_list), default=0.0)
        return document | lists


def summarise(evidence: Evidence) -> RunSummary:
    lineage = evidence.lineage()
    skipped, repeated = count_samples(evidence)
    gaps = [gap for _, gap in step_gaps(evidence)]
    return RunSummary(
        steps=len(lineage),
        steps_lost=_steps_lost(evidence),
        samples_skipped=skipped,
        samples_repeated=repeated,
        digests_equal=digests_equal(evidence),
        median_step_s=statistics.median(gaps) if gaps else 0.0,
        max_survivor_stall_s=max(gaps, default=0.0),
        final_loss=mean_loss(lineage[max(lineage)].fields) if lineage else 0.0,
        failure_list=tuple(failures(evidence)),
        join_list=tuple(joins(evidence)),
    )


def mean_loss(commit: Mapping[str, Any]) -> float:
    """Return a commit line's mean loss: per token where tokens were counted, else per micro-batch."""
    metrics: Mapping[str, float] = commit["metrics"]
    parts = sum(len(ids) for ids in commit["contributions"].values())
    return metrics.get("loss", 0.0) / (metrics.get("tokens") or parts or 1)


def step_gaps(evidence: Evidence) -> Iterator[tuple[JournalLine, float]]:
    """Yield every live commit that follows a live commit of the same process, with the seconds between."""
    for lines in evidence.lives():
        for before, after in pairwise(lines_of(lines, "commit", "join")):
            if before.is_live_commit and after.is_live_commit:
                yield after, after.mono - before.mono


def failures(evidence: Evidence) -> list[ReplicaDeath]:
    """Return the processes that ended without having finished, in order of time."""
    deaths: list[ReplicaDeath] = []
    for lines in evidence.lives():
        if finished(lines):
            continue
        t = _death(evidence, lines)
        last = max((line.integer("step") + 1 for line in lines_of(lines, "commit")), default=0)
        deaths.append(_describe(evidence, lines[0].replica, t, last))
    return sorted(deaths, key=lambda failure: failure.t)


def joins(evidence: Evidence) -> list[ReplicaJoin]:
    """Return the processes that entered the running job, in order of time.

    A process has joined with the first step that it commits as a member of the round, not by replay.
    """
    commits = [line.t for lines in evidence.commits.values() for line in lines]
    begun = min(commits, default=float("inf"))
    entries: list[ReplicaJoin] = []
    for lines in evidence.lives():
        fetched: JournalLine | None = None
        replayed = 0
        for line in lines_of(lines, "join", "commit"):
            if line.event == "join":
                fetched, replayed = line, 0
            elif line.flag("replay"):
                replayed += 1
            elif fetched is not None:
                # Before the first commit of the run, replicas fetch only to start from one state.
                if fetched.t > begun:
                    seconds = fetched.number_of("seconds")
                    catch_up_s = line.mono - fetched.mono + seconds
                    nbytes, step = fetched.integer("bytes"), line.integer("step")
                    join = ReplicaJoin(line.replica, line.t, step, nbytes, seconds, replayed, catch_up_s)
                    entries.append(join)
                fetched = None
    return sorted(entries, key=lambda join: join.t)


def _death(evidence: Evidence, lines: Sequence[JournalLine]) -> float:
    for event in evidence.run.supervisor:
        ours = event.get("replica") == lines[0].replica and event["t"] >= lines[0].t
        if event["event"] == "kill" and ours and event.get("pid") == lines[0].fields.get("pid"):
            return float(event["t"])
    return lines[-1].t


def _describe(evidence: Evidence, replica: str, t: float, step: int) -> ReplicaDeath:
    others = [
        line
        for name, journal in evidence.run.journals.items()
        if name != replica
        for line in journal.lines
        if line.t >= t
    ]
    epochs = [e for e in lines_of(others, "epoch") if replica not in e.fields["roster"]]
    first_epoch = min((line.integer("epoch") for line in epochs), default=None)
    commits = [
        line
        for line in lines_of(others, "commit")
        if first_epoch is not None and line.integer("epoch") >= first_epoch
    ]

    def after(lines: Sequence[JournalLine]) -> float | None:
        return min((line.t - t for line in lines), default=None)

    return ReplicaDeath(replica, t, step, after(lines_of(others, "abort")), after(epochs), after(commits))


def _steps_lost(evidence: Evidence) -> int:
    """Return the committed steps that a younger generation has undone, and the missing steps."""
    lost = 0
    generations = sorted({generation for generation, _ in evidence.commits})
    for older, younger in pairwise(generations):
        end = max(step for generation, step in evidence.commits if generation == older) + 1
        base = min(step for generation, step in evidence.commits if generation == younger)
        lost += max(0, end - base)
    lineage = evidence.lineage()
    return lost + max(lineage, default=-1) + 1 - len(lineage)


class Verdict(Value):
    """The result: the numbers, and a sentence for every broken promise."""

    evidence: Evidence
    summary: RunSummary
    broken: tuple[str, ...]


def judge(run: RecordedRun, *, is_over: bool = True) -> Verdict:
    """Judge the run that ``read_run`` has read; ``is_over``: every replica must have finished."""
    evidence = gather(run)
    return Verdict(evidence, summarise(evidence), tuple(audit(evidence, is_over=is_over)))


def verify(directory: Path) -> Verdict:
    """Judge the run in ``directory`` and compare it with its ``summary.json``, where there is one.

    Raises ConfigError where ``directory`` holds no run.
    """
    verdict = judge(read_run(directory))
    path = directory / SUMMARY_FILE
    if not path.exists():
        return Verdict(verdict.evidence, verdict.summary, (*verdict.broken, f"{path} is missing."))
    differences = _differences(_read_summary(path), verdict.summary.as_json())
    return Verdict(verdict.evidence, verdict.summary, (*verdict.broken, *differences))


def write_summary(directory: Path, summary: RunSummary) -> None:
    document = json.dumps(summary.as_json(), indent=2) + "\n"
    (directory / SUMMARY_FILE).write_text(document, encoding="utf-8")


def _read_summary(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_SUMMARY_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_SUMMARY_BYTES} bytes, which no demo writes.")
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} is not a JSON object.")
    return document


def _differences(written: dict[str, Any], computed: dict[str, Any]) -> list[str]:
    """Return a sentence for each value that is another in the file. JSON keeps every digit of a float."""
    values = {
        name: [json.dumps(body.get(name), sort_keys=True) for body in (written, computed)]
        for name in sorted(written.keys() | computed.keys())
    }
    return [
        f"summary.json says {name} = {own[:120]}, the journals say {theirs[:120]}."
        for name, (own, theirs) in values.items()
        if own != theirs
    ]
