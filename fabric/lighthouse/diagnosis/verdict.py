"""Judges a failure from the leader's symptoms and the probes of ranks. Pure.

Each verdict asks a person to act in its own way: continue or replace a stopped process, look at the code of a
rank that did not enter the exchange, mend a program whose ranks call different operations, or look at a
network. Any other failure is unknown, and the diagnosis shows all probes.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fabric.protocol.messages.network import Aborted
from fabric.protocol.rules.wait_graph import root_waiters

STOPPED = "stopped process"
ABSENT = "absent rank"
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
# Operations whose sizes may differ between ranks.
_UNEVEN = ("all_to_all", "alltoall", "gather", "scatter", "send", "recv")


@dataclass(frozen=True, slots=True)
class Symptoms:
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


@dataclass(frozen=True, slots=True)
class RankProbe:
    """The state of one rank, from its checkpoint server."""

    replica: str
    rank: int = 0
    process: str = "unknown"  # the state of the process, as the kernel reports it
    pid: int = 0
    says: Mapping[str, Any] | None = None  # the process's own answer; None: the process gave no answer
    how: str = ""  # how the probe read the stack
    main: Sequence[str] = ()  # the main thread's stack, innermost first
    kernel: str = ""  # the kernel function that the main thread sleeps in
    flight: Sequence[Mapping[str, Any]] = ()  # torch's recorded collectives
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

    def to_json(self) -> dict[str, Any]:
        """Return the bounded form for the recovery record."""
        says = self.says or {}
        last = self.flight[-1] if self.flight else None
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
            "collective": _collective(last)[:_FRAME_CHARACTERS] if last is not None else "",
            "problem": self.problem[:_SENTENCE],
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
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
    """Return the first verdict that symptoms and probes support; the most certain rule is tried first."""
    for rule in (
        _stopped,
        _mismatched,
        _gone,
        _cut_link,
        _behind_in_collectives,
        _slow_link,
        _did_not_come,
        _silent,
    ):
        finding = rule(case, seen)
        if finding is not None:
            verdict, about, why = finding
            return Diagnosis(verdict, about, why, seen=tuple(seen))
    about = case.concerned()
    reasons = "; ".join(f"{name}: {why}" for name, why in sorted(case.condemned.items()))
    return Diagnosis(UNKNOWN, about, reasons or "nothing that was seen explains it", seen=tuple(seen))


Finding = tuple[str, tuple[str, ...], str]


def _stopped(case: Symptoms, seen: Sequence[RankProbe]) -> Finding | None:
    for probe in seen:
        if probe.process == "stopped":
            why = f"process {probe.pid} of {probe.name} is stopped (SIGSTOP, or a debugger)"
            return STOPPED, (probe.replica,), why
    for name in case.concerned():
        if case.processes.get(name) == "stopped":
            return STOPPED, (name,), f"the kernel says that the process of {name} is stopped"
    return None


def _mismatched(case: Symptoms, seen: Sequence[RankProbe]) -> Finding | None:
    for name, aborted in sorted(case.aborted.items()):
        if aborted.mismatch:
            return MISMATCH, tuple(dict.fromkeys(n for n in (name, aborted.about) if n)), aborted.why
    for first, second in _pairs(seen):
        theirs = {_key(entry): entry for entry in second.flight}
        for entry in first.flight:
            other = theirs.get(_key(entry))
            if other is not None and not (_is_done(entry) and _is_done(other)) and _differ(entry, other):
                why = (
                    f"{first.name} is in {_collective(entry)} where {second.name} is in {_collective(other)}"
                    f"{_at(first)}"
                )
                return MISMATCH, (first.replica,), why
    return None


def _gone(case: Symptoms, seen: Sequence[RankProbe]) -> Finding | None:
    gone = [name for name in case.concerned() if case.processes.get(name) == "gone"]
    gone += [probe.replica for probe in seen if probe.process == "gone" and probe.replica not in gone]
    if gone:
        return ABSENT, tuple(gone), f"the process of {', '.join(gone)} has ended"
    return None


def _cut_link(case: Symptoms, seen: Sequence[RankProbe]) -> Finding | None:
    """Judge: members cannot reach others whose processes run."""
    pairs = {
        (min(name, other), max(name, other))
        for name, a in case.aborted.items()
        for other in a.unreachable
        if case.processes.get(other, "running") == "running"
    }
    if not pairs:
        return None
    links = ", ".join(f"{a} and {b}" for a, b in sorted(pairs)[:_FRAMES])
    ends = tuple(sorted({name for pair in pairs for name in pair}))
    return CUT_LINK, ends, f"every process runs, and nothing gets through between {links}"


def _behind_in_collectives(case: Symptoms, seen: Sequence[RankProbe]) -> Finding | None:
    """Judge: a rank has not entered a collective in which another rank of its replica waits."""
    for first, second in [*_pairs(seen), *((b, a) for a, b in _pairs(seen))]:
        there = {_key(entry) for entry in second.flight}
        missing = [e for e in first.flight if not _is_done(e) and _key(e) not in there]
        if missing and second.flight:
            why = f"{second.name} has not come to {_collective(missing[0])}, in which {first.name} waits"
            return ABSENT, (second.replica,), why + _at(second)
    return None


def _slow_link(case: Symptoms, seen: Sequence[RankProbe]) -> Finding | None:
    """Judge: every probed process runs and is in the exchange, but bytes do not arrive."""
    if case.condemned:
        return None
    complaints = {name: a for name, a in case.aborted.items() if a.about and a.about in case.names}
    come = {probe.replica for probe in seen if probe.has_come}
    if not complaints or set(case.stuck()) - come:
        return None
    ends = {*complaints, *(a.about for a in complaints.values())}
    if any(case.processes.get(name) != "running" for name in ends):
        return None
    links = ", ".join(f"{a.about} to {name}" for name, a in sorted(complaints.items()))
    if all(a.stalled for a in complaints.values()):
        why = f"every process runs and is in the exchange, and bytes are late on the way from {links}"
    else:
        why = f"every process runs, and the link from {links} broke"
    return SLOW_LINK, tuple(sorted(ends)), why


def _did_not_come(case: Symptoms, seen: Sequence[RankProbe]) -> Finding | None:
    """Judge: a process runs but has not entered the exchange; its main thread shows why."""
    absent = [
        probe
        for probe in seen
        if probe.replica in (*case.stuck(), *case.condemned) and probe.process == "running"
    ]
    # Judge a rank whose collectives have all ended first: no other rank holds this rank up.
    for probe in [*(x for x in absent if not x.flight or all(map(_is_done, x.flight))), *absent]:
        if not probe.main and not probe.kernel:
            continue
        stuck = (
            "" if probe.how == "interpreter" else ", and holds the interpreter's lock" if probe.main else ""
        )
        return ABSENT, (probe.replica,), f"{probe.name} runs, and has not come{stuck}{_at(probe)}"
    return None


def _silent(case: Symptoms, seen: Sequence[RankProbe]) -> Finding | None:
    silent = [name for name in case.concerned() if case.processes.get(name) == "silent"]
    if silent:
        return ABSENT, tuple(silent), f"nothing is heard of {', '.join(silent)}, nor of its checkpoint server"
    return None


def _at(probe: RankProbe) -> str:
    if probe.main:
        return f": its main thread is at {probe.main[0][-_FRAME_CHARACTERS:]}"
    return f": its main thread sleeps in {probe.kernel}" if probe.kernel else ""


def _pairs(seen: Sequence[RankProbe]) -> Iterable[tuple[RankProbe, RankProbe]]:
    """Pair each rank that has recorded collectives with the next such rank of its replica."""
    by_replica: dict[str, list[RankProbe]] = {}
    for probe in seen:
        by_replica.setdefault(probe.replica, []).append(probe)
    for ranks in by_replica.values():
        ranks.sort(key=lambda probe: probe.rank)
        yield from ((ranks[0], other) for other in ranks[1:])


def _key(entry: Mapping[str, Any]) -> tuple[str, str]:
    return str(entry.get("process_group")), str(entry.get("collective_seq_id"))


def _is_done(entry: Mapping[str, Any]) -> bool:
    return bool(entry.get("retired"))


def _differ(entry: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    if entry.get("is_p2p") or other.get("is_p2p"):
        return False
    name = str(entry.get("profiling_name"))
    if name != str(other.get("profiling_name")):
        return True
    sizes = entry.get("input_sizes") != other.get("input_sizes")
    types = entry.get("input_dtypes") != other.get("input_dtypes")
    return types or (sizes and not any(word in name for word in _UNEVEN))


def _collective(entry: Mapping[str, Any]) -> str:
    name = str(entry.get("profiling_name", "a collective")).rpartition(":")[2]
    return f"{name} of {entry.get('input_sizes')} (number {entry.get('collective_seq_id')})"
