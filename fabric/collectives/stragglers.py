"""Finds the process that comes last to collectives: how often, and how long the others waited for it.

A collective lasts shortest at the process that came last. Where durations are recorded they are compared, so
the clocks of hosts need not agree. Otherwise the times of the calls are compared.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fabric.collectives.calls import AllCalls, GroupCalls
from fabric.collectives.conclusion import STRAGGLER, Conclusion
from fabric.collectives.recording import Process, RecordedCollective

# Others wait for a straggler for at least this share of all waiting, and at least that share of the time.
_SHARE_OF_WAITING = 2 / 3
_SHARE_OF_TIME = 0.05
_LEAST_TIMES = 3
_LEAST_MS = 1.0
# A process that is late only once or twice, at a checkpoint or a first call, is not a straggler.
_HICCUPS = 2


@dataclass(slots=True)
class Arrivals:
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
    """The arrivals of every process, over all groups of at least two processes."""
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
