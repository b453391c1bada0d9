"""Say which link between replicas got slow, from the times that the two ends of each ring link report.

Where a link is slow, its sender has bytes under way for long, and its receiver waits for them. Only both
together accuse the link: the bytes also stay under way while the receiver is late, and the receiver also
waits while the sender is late. A link that was slow in the warm-up is not seen.
"""

from collections.abc import Collection, Sequence
from heapq import nlargest
from itertools import islice
from statistics import median

from msgspec import Struct, field

from fabric.health.detector import UnitDetector
from fabric.health.localise import MANY, Scope, Slowdown, Unit
from fabric.health.work import WorkAmount
from fabric.model import ReplicaProcess, StepTimes

SLOW_LINK = 1.5  # the factor for a link is larger than a unit's: transfers vary more than computation
MAX_SUSPECTS = 4  # the most links that are called slow at a time
FLOOR_S = 0.02  # added to every time, so that differences well below it do not count
_ONE = WorkAmount(1.0)  # each step brings the same bytes


class _Link(Struct):
    """A link of the ring."""

    detector: UnitDetector
    usual_s: float = 0.0  # predicted for the newest step; 0 in the warm-up
    newest_s: float = 0.0
    steps: int = 0  # steps that were observed


class LinkDetector(Struct):
    """Watches the link from each member of a ring to the next member."""

    _next: dict[str, tuple[ReplicaProcess, ReplicaProcess]] = field(default_factory=dict)  # by sender
    _links: dict[tuple[ReplicaProcess, ReplicaProcess], _Link] = field(default_factory=dict)
    _newest: dict[str, StepTimes] = field(default_factory=dict)

    def keep(self, ring: Sequence[ReplicaProcess]) -> None:
        """Watch the links of this ring; forget those of other processes."""
        ends = zip(ring, [*ring[1:], *ring[:1]], strict=True)
        self._next = {a.replica: (a, b) for a, b in ends if a != b}
        self._links = {
            ends: link for ends, link in self._links.items() if self._next.get(ends[0].replica) == ends
        }
        self._newest = {name: times for name, times in self._newest.items() if name in self._next}

    def observe(self, replica: str, times: StepTimes) -> None:
        """Take one member's report of a step; the other end of its link reports about the same step."""
        self._newest[replica] = times
        ends = self._next.get(replica)
        if ends is None or (received := self._newest.get(ends[1].replica)) is None:
            return
        peer = ends[1].replica
        if peer not in times.sending_s and ends not in self._links:
            return  # the link shares memory, or the replica runs an older version
        link = self._links.setdefault(ends, _Link(UnitDetector()))
        sending_s, waiting_s = times.sending_s.get(peer, 0.0), received.waiting_s.get(replica, 0.0)
        link.steps += 1
        link.newest_s = max(0.0, min(sending_s, waiting_s))
        predicted_s = link.detector.predictor.predict(_ONE)
        link.usual_s = max(0.0, predicted_s - FLOOR_S) if predicted_s is not None else 0.0
        link.detector.observe([(_ONE, FLOOR_S + link.newest_s)])

    def states(self, most: int) -> list[dict[str, str | float]]:
        """The first ``most`` links, for people: how long bytes were late in the newest step, and usually."""
        return [
            {
                "from": a.replica,
                "to": b.replica,
                "late_s": round(link.newest_s, 6),
                "usual_s": round(link.usual_s, 6),
                "steps": link.steps,
            }
            for (a, b), link in islice(self._links.items(), most)
        ]

    def slowdowns(self, failed: Collection[str] = ()) -> list[Slowdown]:
        """The slow links, the slowest first. Links of ``failed`` replicas are left out."""
        living = [ends for ends in self._links if not {ends[0].replica, ends[1].replica} & set(failed)]
        slow = {ends: x.ratio or 1.0 for ends in living if (x := self._links[ends].detector).is_slow}
        suspects = nlargest(MAX_SUSPECTS, slow, key=lambda ends: slow[ends])
        usual = [1.0] * min(len(living) - len(slow), MANY)
        slowdowns = []
        for ends in suspects:
            others = [*(slow[x] for x in suspects if x != ends), *usual]
            factor = slow[ends] / median(others) if others else slow[ends]
            if min(factor, slow[ends]) > SLOW_LINK:
                a, b, link = ends[0].replica, ends[1].replica, self._links[ends]
                evidence = (
                    f"the link from {a} to {b} takes {factor:.2f} times as long as the others, and no unit "
                    f"computes slowly; bytes are late on it for {link.newest_s:.3f} s in a step, usually "
                    f"{link.usual_s:.3f} s"
                )
                slowdowns.append(Slowdown(Scope.LINK, (Unit(a), Unit(b)), factor, evidence))
        return sorted(slowdowns, key=lambda slowdown: -slowdown.factor)
