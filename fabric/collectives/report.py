"""All conclusions about the recordings of a job, in the order in which a person should act on them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fabric.collectives.calls import AllCalls, side_by_side
from fabric.collectives.conclusion import NOTHING, VERDICTS, Conclusion
from fabric.collectives.hangs import Wait, hangs, still, waits
from fabric.collectives.mismatches import mismatches
from fabric.collectives.recording import Process, Recording
from fabric.collectives.stragglers import Arrivals, arrivals, stragglers


@dataclass(frozen=True, slots=True)
class CollectiveReport:
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
    fitting = [c for c in hangs(calls, pending, now_ns) if not _is_explained(c, apart)]
    conclusions = [*apart, *fitting, *stragglers(calls, came)]
    conclusions.sort(key=lambda conclusion: VERDICTS.index(conclusion.verdict))
    return CollectiveReport(calls, tuple(conclusions) or (_nothing(calls, pending, earlier),), came)


def _is_explained(conclusion: Conclusion, apart: Sequence[Conclusion]) -> bool:
    """Whether a mismatch already explains this stuck call."""
    names = {name for other in apart for line in other.evidence for name in [line.partition(":")[0]]}
    return conclusion.verdict == "stuck transfer" and bool(apart) and set(conclusion.about) <= names


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
