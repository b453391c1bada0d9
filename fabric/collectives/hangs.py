"""Finds what processes wait for: builds one wait-for graph of all groups, and finds its cycles and ends."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from fabric.collectives.calls import AllCalls, GroupCalls, GroupId, is_over
from fabric.collectives.recording import Process, RecordedCollective
from fabric.model import Value

DEADLOCK = "deadlock"
ABSENT = "absent rank"
OPERATION = "mismatched operation"
SIZES = "mismatched sizes"
DTYPE = "mismatched dtype"
STUCK = "stuck transfer"
STRAGGLER = "straggler"
NOTHING = "nothing found"
# The kinds of conclusion, the most urgent first.
VERDICTS = (OPERATION, SIZES, DTYPE, DEADLOCK, ABSENT, STUCK, STRAGGLER, NOTHING)

_MOST_EVIDENCE = 12


class Conclusion(Value):
    """``verdict`` is one of VERDICTS. ``about``: names of processes. ``why`` is one sentence."""

    verdict: str
    about: tuple[str, ...]
    why: str
    evidence: tuple[str, ...] = ()
    has_ended: bool = False  # all calls in this mismatch have ended, so they hold no process up

    def to_json(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "about": list(self.about),
            "why": self.why,
            "evidence": list(self.evidence),
        }


def bounded(evidence: list[str]) -> tuple[str, ...]:
    """The first lines of the evidence, and a line that counts the omitted ones."""
    more = len(evidence) - _MOST_EVIDENCE
    return tuple(evidence[:_MOST_EVIDENCE]) + ((f"and {more} more",) if more > 0 else ())


class Wait(Value):
    """One process in a call that has not ended. ``absent``: the members that have not entered it, or whose
    recording is missing; empty where all have. ``is_ending``: the call has ended at another member."""

    process: Process
    group_id: GroupId
    call: RecordedCollective
    absent: tuple[Process, ...]
    is_ending: bool = False

    @property
    def key(self) -> tuple[Process, GroupId, bool, int]:
        """Identifies the same wait in a later look at the same job."""
        return self.process, self.group_id, self.call.is_p2p, self.call.number


def waits(everything: AllCalls) -> list[Wait]:
    """For every process and group, the oldest call that has not ended."""
    pending: list[Wait] = []
    newest = {(x.process, x.is_own): x.collectives[-1] for x in everything.recordings if x.collectives}
    for group_id, calls in sorted(everything.groups.items()):
        seen: set[Process] = set()
        for number in sorted(calls.by_number):
            present = calls.by_number[number]
            if all(process in seen for process in present):
                continue
            read, unread = _absent(everything, calls, number)
            for process, call in sorted(present.items(), key=lambda item: item[0]):
                if process in seen or is_over(call, read):
                    continue
                # A call that timed out or was aborted does not count if its process made later calls.
                is_last = call is newest[process, True] if calls.is_own else number == calls.last[process]
                if call.is_pending or is_last:
                    seen.add(process)
                    is_ending = not read and not unread and any(is_over(c, ()) for c in present.values())
                    pending.append(Wait(process, group_id, call, read or unread, is_ending))
        pending += _transfers(everything, group_id, calls)
    return pending


def hangs(everything: AllCalls, pending: Sequence[Wait], now_ns: int = 0) -> Iterator[Conclusion]:
    """Deadlocks, then absent ranks, then calls that all members have entered but that do not end. ``now_ns``:
    when the recordings were taken, 0 where unknown."""
    graph: dict[Process, set[Process]] = {}
    for wait in pending:
        graph.setdefault(wait.process, set()).update(wait.absent)
        for other in wait.absent:
            graph.setdefault(other, set())
    ends = sorted(_ends(graph), key=min)
    for part in ends:
        if len(part) > 1:
            yield _deadlock(everything, pending, graph, part)
    waiting = {wait.process for wait in pending}
    for part in ends:
        if len(part) == 1 and not part <= waiting:
            yield _absence(everything, pending, next(iter(part)), now_ns)
    yield from _stuck(everything, pending, now_ns)


# --- whom a call waits for ----------------------------------------------------------------------------


def _absent(
    everything: AllCalls, calls: GroupCalls, number: int
) -> tuple[tuple[Process, ...], tuple[Process, ...]]:
    """The members that have not entered the call: those with a recording, and those without."""
    away = [p for p in sorted(calls.members) if p not in calls.by_number[number]]
    read = tuple(
        p for p in away if (p, calls.is_own) in everything.has_recorded and calls.last.get(p, -1) < number
    )
    return read, tuple(p for p in away if (p, calls.is_own) not in everything.has_recorded)


def _transfers(everything: AllCalls, group_id: GroupId, calls: GroupCalls) -> Iterator[Wait]:
    """For every process and peer, the oldest send or receive that has not ended."""
    partial = {x.process for x in everything.recordings if x.is_partial}
    for process, transfers in sorted(calls.sends.items()):
        rank = sorted(calls.members).index(process) if process in calls.members else -1
        seen: set[tuple[str, int]] = set()
        for place, call in enumerate(transfers):
            if not (call.is_pending or call.has_failed) or call.peer is None:
                continue
            if (call.operation, call.peer) in seen:
                continue
            seen.add((call.operation, call.peer))
            other = calls.by_rank(call.peer)
            if other is None:
                continue
            if (other, False) not in everything.has_recorded:
                yield Wait(process, group_id, call, (other,))
                continue
            opposite = "recv" if call.operation == "send" else "send"
            answers = [c for c in calls.sends.get(other, ()) if (c.operation, c.peer) == (opposite, rank)]
            earlier = [c for c in transfers[:place] if (c.operation, c.peer) == (call.operation, call.peer)]
            if {process, other} & partial:
                answers, earlier = [c for c in answers if c.is_pending], []
            yield Wait(process, group_id, call, () if len(answers) > len(earlier) else (other,))


# --- the graph ----------------------------------------------------------------------------------------


def _reached(graph: Mapping[Process, set[Process]], start: Process) -> list[Process]:
    """The processes on the ways from ``start``, itself first and the nearest ones next."""
    order, seen = [start], {start}
    for node in order:
        new = sorted(graph[node] - seen)
        seen.update(new)
        order += new
    return order


def _ends(graph: Mapping[Process, set[Process]]) -> list[frozenset[Process]]:
    """The strongly connected parts that no way leaves."""
    backward: dict[Process, set[Process]] = {node: set() for node in graph}
    for node, awaited in graph.items():
        for other in awaited:
            backward[other].add(node)
    parts: list[frozenset[Process]] = []
    left = dict.fromkeys(sorted(graph))
    while left:
        start = next(iter(left))
        while True:
            ahead, behind = _reached(graph, start), set(_reached(backward, start))
            beyond = [node for node in ahead if node not in behind]
            if not beyond:
                break
            start = beyond[-1]
        parts.append(frozenset(ahead))
        for node in behind:
            left.pop(node, None)
    return parts


def _circle(graph: Mapping[Process, set[Process]], part: frozenset[Process]) -> list[Process]:
    """A shortest cycle through the first process of ``part``."""
    start = min(part)
    came_from: dict[Process, Process] = {}
    queue = [start]
    for node in queue:
        for other in sorted(graph[node] & part):
            if other == start:
                path = [node]
                while path[-1] != start:
                    path.append(came_from[path[-1]])
                return path[::-1]
            if other not in came_from:
                came_from[other] = node
                queue.append(other)
    return [start]


# --- sentences ----------------------------------------------------------------------------------------


def _deadlock(
    everything: AllCalls,
    pending: Sequence[Wait],
    graph: Mapping[Process, set[Process]],
    part: frozenset[Process],
) -> Conclusion:
    circle = _circle(graph, part)
    parts = []
    for process, other in zip(circle, [*circle[1:], circle[0]], strict=True):
        wait = next(w for w in pending if w.process == process and other in w.absent)
        parts.append(f"{everything.name(process)} waits in {wait.call.words} for {everything.name(other)}")
    why = "; ".join(parts) + ": each waits for the next, so none of them goes on"
    evidence = [_evidence(everything, w) for w in pending if w.process in part]
    names = tuple(everything.name(p) for p in sorted(part))
    return Conclusion(DEADLOCK, names, why, bounded(evidence))


def _absence(everything: AllCalls, pending: Sequence[Wait], process: Process, now_ns: int) -> Conclusion:
    waiting = [w for w in pending if process in w.absent]
    # A rank comes to its replica's collective before it can go on to the exchange between replicas.
    first = min(waiting, key=lambda w: (w.call.backend == "fabric", w.call.created_ns, w.call.number))
    same = {w.process for w in waiting if w.group_id == first.group_id and w.call.number == first.call.number}
    waits_words = "waits" if len(same) == 1 else "wait"
    name, others = everything.name(process), everything.listed(same)
    verb = waits_words if any(w.call.is_pending for w in waiting) else "waited until they gave up"
    since = _since(first.call, now_ns)
    is_read = (process, first.call.backend == "fabric") in everything.has_recorded
    if is_read:
        why = f"{name} has not come to {first.call.words}, in which {others} {verb}{since}"
    else:
        reason = everything.unread.get(process, "no recording of it was given")
        why = (
            f"{others} {verb}{since} in {first.call.words}, to which every rank that was read has come;"
            f" {name} was not read: {reason}"
        )
    evidence = _whereabouts(everything, process) + [_evidence(everything, w) for w in waiting]
    indirect = {w.process for w in pending} - {w.process for w in waiting}
    if indirect:
        evidence.append(f"{everything.listed(indirect)}: held up by the ranks that wait for {name}")
    return Conclusion(ABSENT, (name,), why, bounded(evidence))


def _stuck(everything: AllCalls, pending: Sequence[Wait], now_ns: int) -> Iterator[Conclusion]:
    """Calls that all members have entered but that do not end: one conclusion for each group and number."""
    by_call: dict[tuple[GroupId, bool, int], list[Wait]] = {}
    for wait in pending:
        if not wait.absent:
            by_call.setdefault((wait.group_id, wait.call.is_p2p, wait.call.number), []).append(wait)
    for (group_id, _, number), in_call in sorted(by_call.items(), key=lambda item: item[0]):
        calls, call = everything.groups[group_id], in_call[0].call
        is_certain = (calls.are_members_known and not calls.are_members_guessed) or call.is_p2p
        evidence = bounded([_evidence(everything, w) for w in in_call])
        if not calls.are_members_known and not call.is_p2p and len(calls.by_number.get(number, ())) < 2:
            why = (
                f"{everything.name(in_call[0].process)} waits in {call.words}, to which no other rank that"
                " was read has come; the members of that group are not recorded"
            )
            yield Conclusion(ABSENT, (), why, evidence)
            continue
        read = "" if is_certain else " that was read"
        hint = "" if is_certain else "a rank that was not read may be absent; else "
        why = (
            f"every rank{read} has come to {call.words}, and it has not ended{_since(call, now_ns)}:"
            f" {hint}look at the network or the devices of the ranks in it"
        )
        yield Conclusion(STUCK, tuple(everything.name(w.process) for w in in_call), why, evidence)


def _since(call: RecordedCollective, now_ns: int) -> str:
    """How long a process has been in the call; empty where unknown."""
    return f" for {(now_ns - call.created_ns) / 1e9:.1f} s" if 0 < call.created_ns < now_ns else ""


def _whereabouts(everything: AllCalls, process: Process) -> list[str]:
    """Say where a process is that has not entered the awaited call."""
    name, lines = everything.name(process), []
    recording = everything.recording(process)
    state = recording.process_state if recording is not None else ""
    if state and state != "running":
        lines.append(f"{name}: the kernel says that its process is {state}")
    if recording is not None and recording.main:
        lines.append(f"{name}: its main thread is at {recording.main[0]}")
    last = everything.last_call(process)
    if last is not None:
        left = ", and it has not left it" if last.is_pending else ""
        at = f", called at {last.at}" if last.at else ""
        lines.append(f"{name}: the last that it came to is {last.words}{at}{left}")
    elif recording is not None and process not in everything.unread:
        lines.append(f"{name}: its recording is empty: it has come to no collective, or records none")
    return lines


def _evidence(everything: AllCalls, wait: Wait) -> str:
    call = wait.call
    how = "was given up in" if call.has_failed else "waits in" if call.is_pending else "has left"
    where = everything.where(wait.process, call)
    note = f" ({call.note})" if call.note else ""
    return f"{everything.name(wait.process)}: {how} {call.words} of {call.shape_words}{where}{note}"


def still(pending: Iterable[Wait], earlier: Iterable[Wait]) -> list[Wait]:
    """The waits that an earlier look had seen, too: a healthy job has moved on to other calls."""
    before = {wait.key: set(wait.absent) for wait in earlier}
    return [
        wait
        for wait in pending
        if wait.key in before and (not wait.absent or before[wait.key] & set(wait.absent))
    ]
