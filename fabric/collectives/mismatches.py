"""Finds mismatches: different operations, sizes or data types at the same place of a sequence of calls."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping

from fabric.collectives.calls import AllCalls, GroupCalls
from fabric.collectives.conclusion import DTYPE, OPERATION, SIZES, Conclusion, bounded
from fabric.collectives.recording import Process, RecordedCollective

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
    if _parted(present, _dtypes):
        return _conclusion(everything, present, DTYPE, _dtypes)
    if _parted(present, _elements):
        return _conclusion(everything, present, SIZES, _elements)
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
