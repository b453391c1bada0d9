"""All conclusions about the recordings of a job, in the order in which a person should act on them."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from msgspec import Struct, field

from fabric.collectives.calls import AllCalls, GroupCalls, side_by_side
from fabric.collectives.hangs import (
    DTYPE,
    NOTHING,
    OPERATION,
    SIZES,
    STRAGGLER,
    STUCK,
    VERDICTS,
    Conclusion,
    Wait,
    bounded,
    hangs,
    still,
    waits,
)
from fabric.collectives.recording import Process, RecordedCollective, Recording
from fabric.model import Value

# Others wait for a straggler for at least this share of all waiting, and at least that share of the time.
_SHARE_OF_WAITING = 2 / 3
_SHARE_OF_TIME = 0.05
_LEAST_TIMES = 3
_LEAST_MS = 1.0
# A process that is late only once or twice, at a checkpoint or a first call, is not a straggler.
_HICCUPS = 2


class Arrivals(Struct):
    """How late one process entered the collectives of its groups. ``late_ms``: for every collective that this
    process entered last, the usual wait of the others."""

    process: Process
    collectives: int = 0
    late_ms: list[float] = field(default_factory=list)
    first_ns: int = 0
    last_ns: int = 0

    @property
    def waited_ms(self) -> float:
        """The waiting that this process caused, without its longest two waits."""
        return sum(sorted(self.late_ms)[:-_HICCUPS])

    def to_json(self, name: str) -> dict[str, Any]:
        return {
            "process": name,
            "collectives": self.collectives,
            "times_last": len(self.late_ms),
            "median_late_ms": round(median(self.late_ms), 3) if self.late_ms else 0.0,
            "longest_late_ms": round(max(self.late_ms, default=0.0), 3),
            "total_late_ms": round(sum(self.late_ms), 3),
        }


def arrivals(everything: AllCalls) -> dict[Process, Arrivals]:
    """The arrivals of every process, over all groups of at least two processes.

    A collective lasts shortest at the process that came last. Where durations are recorded they are compared,
    so the clocks of hosts need not agree. Otherwise the times of the calls are compared.
    """
    result: dict[Process, Arrivals] = {}
    for _, calls in sorted(everything.groups.items()):
        for number in sorted(calls.by_number)[1:]:  # the first call only shows when a process started
            _note(result, calls, calls.by_number[number])
    return result


def stragglers(everything: AllCalls, came: Mapping[Process, Arrivals]) -> Iterator[Conclusion]:
    """The process that causes most of the waiting, if waiting takes much of the time."""
    total_ms = sum(x.waited_ms for x in came.values())
    for process, own in sorted(came.items()):
        span_ms = (own.last_ns - own.first_ns) / 1e6
        times = len(own.late_ms)
        if (
            times < _LEAST_TIMES + _HICCUPS
            or own.waited_ms < _SHARE_OF_WAITING * total_ms
            or own.waited_ms < _SHARE_OF_TIME * span_ms
            or median(own.late_ms) < _LEAST_MS
        ):
            continue
        name = everything.name(process)
        why = (
            f"{name} came last to {times} of {own.collectives} collectives, by {median(own.late_ms):.1f} ms"
            f" in the median and {max(own.late_ms):.1f} ms at most: the others waited"
            f" {sum(own.late_ms) / 1e3:.2f} s of {span_ms / 1e3:.2f} s for it"
        )
        others = [
            f"{everything.name(p)} came last to {len(x.late_ms)} of {x.collectives},"
            f" by {median(x.late_ms or [0.0]):.1f} ms in the median"
            for p, x in sorted(came.items())
            if p != process
        ]
        yield Conclusion(STRAGGLER, (name,), why, tuple(others[:8]))


def _note(
    result: dict[Process, Arrivals], calls: GroupCalls, present: Mapping[Process, RecordedCollective]
) -> None:
    expected = calls.members if calls.are_members_known else set(calls.last)
    if len(present) < 2 or not expected <= set(present):
        return
    if any(call.is_pending or call.has_failed for call in present.values()):
        return
    durations = {p: call.duration_ms for p, call in present.items() if call.duration_ms is not None}
    if len(durations) == len(present):
        came_ms = {p: -duration for p, duration in durations.items()}
    elif all(call.created_ns > 0 for call in present.values()):
        came_ms = {p: call.created_ns / 1e6 for p, call in present.items()}
    else:
        return
    last = max(sorted(came_ms), key=lambda p: came_ms[p])
    late_ms = came_ms[last] - median(ms for p, ms in came_ms.items() if p != last)
    for process, call in present.items():
        entry = result.setdefault(process, Arrivals(process))
        entry.collectives += 1
        entry.first_ns = min(entry.first_ns or call.created_ns, call.created_ns)
        entry.last_ns = max(entry.last_ns, call.created_ns)
    result[last].late_ms.append(late_ms)


# Operations whose sizes may differ between ranks, or for which only some ranks have tensors.
_UNEVEN = ("all_to_all", "alltoall", "gather_v", "scatter_v", "gather", "scatter", "coalesced", "split")
_EVEN = ("all_gather", "reduce_scatter")

Present = Mapping[Process, RecordedCollective]


def mismatches(everything: AllCalls) -> Iterator[Conclusion]:
    """The first mismatch of every group; later mismatches in the same sequence follow from it."""
    for _, calls in sorted(everything.groups.items()):
        for number in sorted(calls.by_number):
            conclusion = _compare(everything, calls.by_number[number])
            if conclusion is not None:
                yield conclusion
                break
        yield from _transfers(everything, calls)


def _compare(everything: AllCalls, present: Present) -> Conclusion | None:
    if len(present) < 2:
        return None
    if _parted(present, lambda call: call.operation):
        # Calls that have all ended did match: some libraries have two names for one operation.
        if _have_ended(present):
            return None
        return _conclusion(everything, present, OPERATION, lambda call: call.operation)
    for verdict, key in ((DTYPE, _dtypes), (SIZES, _elements)):
        if _parted(present, key):
            return _conclusion(everything, present, verdict, key)
    return None


def _parted(present: Present, key: Callable[[RecordedCollective], Hashable]) -> bool:
    """Whether processes have different keys; the key None fits every key."""
    return len({k for call in present.values() if (k := key(call)) is not None}) > 1


def _have_ended(present: Present) -> bool:
    return all(not call.is_pending and not call.has_failed for call in present.values())


def _dtypes(call: RecordedCollective) -> Hashable:
    return tuple(sorted(set(call.input_dtypes + call.output_dtypes))) or None


def _elements(call: RecordedCollective) -> Hashable:
    """The number of elements, which must be equal in all processes; shapes may differ."""
    is_even = any(word in call.operation for word in _EVEN)
    if not is_even and any(word in call.operation for word in _UNEVEN):
        return None
    if call.operation.endswith("_v"):
        return None
    return sum(map(math.prod, call.input_sizes)) if call.input_sizes else None


def _conclusion(
    everything: AllCalls, present: Present, verdict: str, key: Callable[[RecordedCollective], Hashable]
) -> Conclusion:
    """Blame the processes in the minority; where both sides are equally many, blame both."""
    sides: dict[Hashable, list[Process]] = {}
    for process, call in sorted(present.items(), key=lambda item: item[0]):
        sides.setdefault(key(call), []).append(process)
    counts = Counter({side: len(processes) for side, processes in sides.items()})
    (usual, most), (_, second) = counts.most_common(2)
    is_clear = most > second
    odd = [p for side, processes in sides.items() if side != usual or not is_clear for p in processes]
    parts = []
    for side in sorted(sides, key=lambda s: counts[s]):
        call = present[sides[side][0]]
        verb = "is" if len(sides[side]) == 1 else "are"
        tense = verb if call.is_pending else ("was" if verb == "is" else "were")
        what = call.operation if verdict == OPERATION else f"{call.operation} of {call.shape_words}"
        parts.append(f"{everything.listed(sides[side])} {tense} in {what}")
    place = present[sides[usual][0]].place_words
    why = f"{' where '.join(parts[:3])}, at one place of the sequence ({place})"
    has_ended = _have_ended(present)
    if has_ended:
        why += "; it ended all the same, so its result may be wrong"
    evidence = [_evidence(everything, process, present[process]) for process in odd]
    evidence += [_evidence(everything, p, present[p]) for p in present if p not in odd]
    return Conclusion(verdict, tuple(everything.name(p) for p in odd), why, bounded(evidence), has_ended)


def _evidence(everything: AllCalls, process: Process, call: RecordedCollective) -> str:
    where = everything.where(process, call)
    return f"{everything.name(process)}: {call.operation} of {call.shape_words}{where}"


def _transfers(everything: AllCalls, calls: GroupCalls) -> Iterator[Conclusion]:
    """Sends and receives of unequal sizes. Each process numbers its own, so only whole sequences compare."""
    complete = {x.process for x in everything.recordings if not x.is_own and not x.is_partial}
    for process, sent in sorted(calls.sends.items()):
        own_rank = sorted(calls.members).index(process) if process in calls.members else -1
        for peer in sorted(
            {call.peer for call in sent if call.operation == "send" and call.peer is not None}
        ):
            other = calls.by_rank(peer)
            if other is None or not {process, other} <= complete:
                continue
            sends = [c for c in sent if c.operation == "send" and c.peer == peer]
            receives = [c for c in calls.sends.get(other, ()) if c.operation == "recv" and c.peer == own_rank]
            for send, receive in zip(sends, receives, strict=False):
                if _elements_sent(send) != _elements_sent(receive):
                    why = (
                        f"{everything.name(process)} sends {send.shape_words} to {everything.name(other)},"
                        f" which receives {receive.shape_words}"
                    )
                    lines = [_evidence(everything, process, send), _evidence(everything, other, receive)]
                    yield Conclusion(
                        SIZES, (everything.name(process), everything.name(other)), why, tuple(lines)
                    )
                    break


def _elements_sent(call: RecordedCollective) -> int:
    sizes = call.input_sizes if call.operation == "send" else call.output_sizes
    return sum(map(math.prod, sizes or call.input_sizes or call.output_sizes))


class CollectiveReport(Value):
    """``conclusions``: at least one, the most urgent first."""

    calls: AllCalls
    conclusions: tuple[Conclusion, ...]
    arrivals: Mapping[Process, Arrivals]

    def to_json(self) -> dict[str, Any]:
        calls = self.calls
        return {
            "verdict": self.conclusions[0].verdict,
            "conclusions": [conclusion.to_json() for conclusion in self.conclusions],
            "arrivals": [x.to_json(calls.name(p)) for p, x in sorted(self.arrivals.items())],
            "processes": [
                {
                    "process": calls.name(x.process),
                    "recorder": "fabric" if x.is_own else "torch",
                    "source": x.source,
                    "collectives": len(x.collectives),
                    "overwritten": x.is_partial,
                }
                for x in calls.recordings
            ],
            "unread": {calls.name(p): why for p, why in sorted(calls.unread.items())},
        }


def explain(
    recordings: Iterable[Recording],
    unread: Mapping[Process, str] | None = None,
    *,
    earlier: Sequence[Wait] | None = None,
    now_ns: int = 0,
) -> CollectiveReport:
    """Compare the recordings of all processes.

    ``unread``: processes without a recording, and why. ``earlier``: the waits of an earlier look at a living
    job; with it, only waits in both looks count. ``now_ns``: Unix time of the look at a living job.
    """
    calls = side_by_side(recordings, unread)
    pending = waits(calls)
    # One look cannot distinguish a call that is about to end from a call that is stuck at some members.
    pending = still(pending, earlier) if earlier is not None else [w for w in pending if not w.is_ending]
    came = arrivals(calls)
    apart = list(mismatches(calls))
    # Processes in mismatched calls wait for each other, which the mismatch's conclusion says already.
    named = {line.partition(":")[0] for conclusion in apart for line in conclusion.evidence}
    fitting = [
        conclusion
        for conclusion in hangs(calls, pending, now_ns)
        if conclusion.verdict != STUCK or not apart or not set(conclusion.about) <= named
    ]
    conclusions = [*apart, *fitting, *stragglers(calls, came)]
    conclusions.sort(key=lambda conclusion: VERDICTS.index(conclusion.verdict))
    return CollectiveReport(calls, tuple(conclusions) or (_nothing(calls, pending, earlier),), came)


def _nothing(calls: AllCalls, pending: Sequence[Wait], earlier: Sequence[Wait] | None) -> Conclusion:
    count = sum(len(x.collectives) for x in calls.recordings)
    processes = len({x.process for x in calls.recordings})
    if not count:
        why = (
            f"no collective is recorded by the {processes} processes that were read: set"
            " TORCH_FR_BUFFER_SIZE=2000 before they start"
        )
    else:
        waited = "" if earlier is None else ", and none that lasts from one look to the next"
        why = (
            f"{count} calls of {processes} processes fit together: no rank is absent, none differs, and no"
            f" straggler stands out{waited}"
        )
    return Conclusion(NOTHING, (), why)
