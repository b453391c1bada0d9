"""Judges a failure from the leader's symptoms and the probes of ranks. Pure.

Each verdict asks a person to act in its own way: continue or replace a stopped process, look at the code of a
rank that did not enter the exchange, mend a program whose ranks call different operations, or look at a
network. Any other failure is unknown, and the diagnosis shows all probes.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import field

from fabric.collectives.hangs import ABSENT, DTYPE, OPERATION, SIZES
from fabric.collectives.recording import Process, Recording
from fabric.collectives.report import explain
from fabric.model import Value
from fabric.protocol.messages.network import Aborted
from fabric.protocol.rules.wait_graph import root_waiters

STOPPED = "stopped process"
MISMATCH = "mismatched operation or sizes"
SLOW_LINK = "slow link"
CUT_LINK = "cut link"
UNKNOWN = "unknown"
VERDICTS = (STOPPED, ABSENT, MISMATCH, SLOW_LINK, CUT_LINK, UNKNOWN)

# Bounds for each rank keep a recovery record small.
_FRAMES = 10
_FRAME_CHARACTERS = 120
_SENTENCE = 300
_NAMED = 100


class Symptoms(Value):
    """The leader's side of a failure."""

    condemned: Mapping[str, str]  # replica -> why it is evicted
    aborted: Mapping[str, Aborted]
    names: Sequence[str]  # names of the roster's members
    processes: Mapping[str, str]  # replica -> running, stopped, gone, silent or unknown

    def concerned(self) -> tuple[str, ...]:
        """Replicas to probe: those with a pending eviction, else those that others waited for or blamed."""
        if self.condemned:
            return tuple(sorted(self.condemned))
        names = [*self.stuck(), *(a.about for a in self.aborted.values())]
        names += [name for a in self.aborted.values() for name in a.waiting_for]
        return tuple(dict.fromkeys(name for name in names if name in self.names))

    def stuck(self) -> tuple[str, ...]:
        """Replicas that other members wait for in a stalled round, and that wait for no other replica.

        A replica that aborted was in the exchange: a round stalls only when every member is in it.
        """
        if not any(a.stalled for a in self.aborted.values()):
            return ()
        waiting = {name: a.waiting_for for name, a in self.aborted.items()}
        return tuple(name for name in root_waiters(waiting, self.names) if name not in self.aborted)


class RankProbe(Value):
    """The state of one rank, from its checkpoint server."""

    replica: str
    rank: int = 0
    process: str = "unknown"  # the state of the process, as the kernel reports it
    pid: int = 0
    says: Mapping[str, Any] | None = None  # the process's own answer; None: the process gave no answer
    how: str = ""  # how the probe read the stack
    main: Sequence[str] = ()  # the main thread's stack, innermost first
    kernel: str = ""  # the kernel function that the main thread sleeps in
    recording: Recording | None = None  # torch's recorded collectives; None: none, or unread
    problem: str = ""  # why a part of the probe is missing

    @property
    def name(self) -> str:
        return f"{self.replica} rank {self.rank}" if self.rank else self.replica

    @property
    def has_come(self) -> bool:
        """Whether the process says that it has contributed to the round, or that it is in no round."""
        if self.says is None:
            return False
        round_ = self.says.get("round")
        return not isinstance(round_, Mapping) or round_.get("contributed") is True

    @property
    def is_in_collective(self) -> bool:
        """Whether the rank is in a recorded collective that has not ended."""
        return self.recording is not None and any(x.is_pending for x in self.recording.collectives)

    def to_json(self) -> dict[str, Any]:
        """Return the bounded form for the recovery record."""
        says = self.says or {}
        last = self.recording.collectives[-1] if self.recording is not None else None
        return {
            "replica": self.replica,
            "rank": self.rank,
            "process": self.process,
            "pid": self.pid,
            "phase": str(says.get("phase", ""))[:40],
            "step": says.get("step") if isinstance(says.get("step"), int) else None,
            "waits_for": str(says.get("ring_waits_for", ""))[:64],
            "how": self.how,
            "main": [frame[-_FRAME_CHARACTERS:] for frame in self.main[:_FRAMES]],
            "kernel": self.kernel[:80],
            "collective": f"{last.words} of {last.shape_words}"[:_FRAME_CHARACTERS] if last else "",
            "problem": self.problem[:_SENTENCE],
        }


class Diagnosis(Value):
    """``verdict`` is one of VERDICTS, ``about`` names the replicas, ``why`` is a sentence. ``t``: when the
    diagnosis was made, Unix seconds; ``seconds``: how long the probes took."""

    verdict: str
    about: tuple[str, ...]
    why: str
    t: float = 0.0
    seconds: float = 0.0
    seen: tuple[RankProbe, ...] = field(default=())

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "about": list(self.about[:_NAMED]),
            "why": self.why[: 2 * _SENTENCE],
            "t": self.t,
            "seconds": round(self.seconds, 3),
            "seen": [probe.to_json() for probe in self.seen],
        }


def diagnose(case: Symptoms, seen: Sequence[RankProbe]) -> Diagnosis:
    """Return the first verdict that symptoms and probes support."""
    for verdict, about, why in _findings(case, seen):
        return Diagnosis(verdict, about, why, seen=tuple(seen))
    reasons = "; ".join(f"{name}: {why}" for name, why in sorted(case.condemned.items()))
    why = reasons or "nothing that was seen explains it"
    return Diagnosis(UNKNOWN, case.concerned(), why, seen=tuple(seen))


Finding = tuple[str, tuple[str, ...], str]


def _findings(case: Symptoms, seen: Sequence[RankProbe]) -> Iterator[Finding]:
    """Judge by one rule after the other, the most certain first."""
    named, processes = case.concerned(), case.processes
    for probe in seen:
        if probe.process == "stopped":
            why = f"process {probe.pid} of {probe.name} is stopped (SIGSTOP, or a debugger)"
            yield STOPPED, (probe.replica,), why
    for name in named:
        if processes.get(name) == "stopped":
            yield STOPPED, (name,), f"the kernel says that the process of {name} is stopped"
    for name, aborted in sorted(case.aborted.items()):
        if aborted.mismatch:
            yield MISMATCH, tuple(dict.fromkeys(n for n in (name, aborted.about) if n)), aborted.why
    if finding := _in_collectives(seen, OPERATION, SIZES, DTYPE):
        yield MISMATCH, *finding
    gone = [name for name in named if processes.get(name) == "gone"]
    gone += [probe.replica for probe in seen if probe.process == "gone" and probe.replica not in gone]
    if gone:
        yield ABSENT, tuple(gone), f"the process of {', '.join(gone)} has ended"
    yield from _cut_link(case)
    # A rank has not entered a collective in which another rank of its replica waits.
    if finding := _in_collectives(seen, ABSENT):
        yield ABSENT, *finding
    yield from _slow_link(case, seen)
    yield from _did_not_come(case, seen)
    if silent := [name for name in named if processes.get(name) == "silent"]:
        why = f"nothing is heard of {', '.join(silent)}, nor of its checkpoint server"
        yield ABSENT, tuple(silent), why


def _cut_link(case: Symptoms) -> Iterator[Finding]:
    """Judge: members cannot reach others whose processes run."""
    pairs = {
        (min(name, other), max(name, other))
        for name, a in case.aborted.items()
        for other in a.unreachable
        if case.processes.get(other, "running") == "running"
    }
    if pairs:
        links = ", ".join(f"{a} and {b}" for a, b in sorted(pairs)[:_FRAMES])
        ends = tuple(sorted({name for pair in pairs for name in pair}))
        yield CUT_LINK, ends, f"every process runs, and nothing gets through between {links}"


def _slow_link(case: Symptoms, seen: Sequence[RankProbe]) -> Iterator[Finding]:
    """Judge: every probed process runs and is in the exchange, but bytes do not arrive."""
    complaints = {name: a for name, a in case.aborted.items() if a.about and a.about in case.names}
    come = {probe.replica for probe in seen if probe.has_come}
    ends = {*complaints, *(a.about for a in complaints.values())}
    if case.condemned or not complaints or set(case.stuck()) - come:
        return
    if all(case.processes.get(name) == "running" for name in ends):
        links = ", ".join(f"{a.about} to {name}" for name, a in sorted(complaints.items()))
        why = f"every process runs, and the link from {links} broke"
        if all(a.stalled for a in complaints.values()):
            why = f"every process runs and is in the exchange, and bytes are late on the way from {links}"
        yield SLOW_LINK, tuple(sorted(ends)), why


def _did_not_come(case: Symptoms, seen: Sequence[RankProbe]) -> Iterator[Finding]:
    """Judge: a process runs but has not entered the exchange; its main thread shows why."""
    late = (*case.stuck(), *case.condemned)
    absent = [probe for probe in seen if probe.replica in late and probe.process == "running"]
    # Judge a rank whose collectives have all ended first: no other rank holds this rank up.
    for probe in [*(x for x in absent if not x.is_in_collective), *absent]:
        if probe.main or probe.kernel:
            holds = probe.main and probe.how != "interpreter"
            stuck = ", and holds the interpreter's lock" if holds else ""
            yield ABSENT, (probe.replica,), f"{probe.name} runs, and has not come{stuck}{_at(probe)}"


def _at(probe: RankProbe) -> str:
    if probe.main:
        return f": its main thread is at {probe.main[0][-_FRAME_CHARACTERS:]}"
    return f": its main thread sleeps in {probe.kernel}" if probe.kernel else ""


def _in_collectives(seen: Sequence[RankProbe], *verdicts: str) -> tuple[tuple[str, ...], str] | None:
    """Compare the recorded collectives; return replicas and a sentence for the first of these verdicts.

    A mismatch of calls that have all ended holds nobody up. A rank without a recording is not blamed.
    """
    recordings = [probe.recording for probe in seen if probe.recording is not None]
    report = explain(recordings)
    probes = {report.calls.name(Process(x.replica, x.rank)): x for x in seen if x.recording is not None}
    for conclusion in report.conclusions:
        blamed = [probes[name] for name in conclusion.about if name in probes]
        if conclusion.verdict in verdicts and not conclusion.has_ended and blamed:
            return tuple(dict.fromkeys(x.replica for x in blamed)), conclusion.why + _at(blamed[0])
    return None
