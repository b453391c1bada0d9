"""A slow link between replicas is named by its two ends, and by neither of them alone."""

import random
from dataclasses import dataclass, field

import pytest

from fabric.health.link_detector import LinkDetector
from fabric.health.localise import Scope, Unit
from fabric.model import ReplicaProcess, StepTimes

BEFORE = 80  # steps: the warm-up and some more


@dataclass
class RingTimes:
    """The reports of a ring, in which each exchange takes some milliseconds of varying length."""

    names: tuple[str, ...] = ("r0", "r1", "r2")
    rng: random.Random = field(default_factory=lambda: random.Random(1))

    def __post_init__(self) -> None:
        self.detector = LinkDetector()
        self.keep()

    def keep(self, **incarnations: int) -> None:
        self.detector.keep([ReplicaProcess(name, incarnations.get(name, 1)) for name in self.names])

    def run(self, steps: int, sending: dict[str, float], waiting: dict[str, float]) -> None:
        """``sending``: extra seconds for which a member's bytes are under way; ``waiting``: extra seconds for
        which a member waits for the previous one."""
        for _ in range(steps):
            for i, name in enumerate(self.names):
                following, previous = self.names[(i + 1) % len(self.names)], self.names[i - 1]
                own = StepTimes(
                    sending_s={following: self.rng.uniform(0.001, 0.003) + sending.get(name, 0.0)},
                    waiting_s={previous: self.rng.uniform(0.001, 0.003) + waiting.get(name, 0.0)},
                )
                self.detector.observe(name, own)

    def named(self, **more) -> list[tuple[str, str]]:
        found = self.detector.slowdowns(**more)
        assert all(x.scope is Scope.LINK and x.is_between_replicas for x in found)
        return [(x.units[0].replica, x.units[1].replica) for x in found]


def test_a_slow_link_is_named_with_its_times_until_it_is_well():
    ring = RingTimes()
    ring.run(BEFORE, {}, {})
    assert ring.named() == []
    # All members wait while the bytes of r1 are under way to r2: the partial sums travel around the ring.
    ring.run(10, {"r1": 0.4}, {"r0": 0.4, "r1": 0.4, "r2": 0.4})
    assert ring.named() == [("r1", "r2")]
    (slowdown,) = ring.detector.slowdowns()
    assert slowdown.units == (Unit("r1"), Unit("r2")) and slowdown.factor > 10
    assert slowdown.evidence.startswith("the link from r1 to r2 takes")
    assert "late on it for 0.40" in slowdown.evidence and "usually 0.00" in slowdown.evidence
    assert ring.named(failed={"r2"}) == []
    ring.run(30, {}, {})
    assert ring.named() == []


@pytest.mark.parametrize(
    ("sending", "waiting"),
    [({"r1": 0.4}, {"r0": 0.4, "r1": 0.4}), ({}, {"r0": 0.4, "r1": 0.4, "r2": 0.4})],
    ids=["r2 is late and reads nothing", "r1 is late and sends nothing"],
)
def test_a_late_replica_accuses_no_link(sending, waiting):
    ring = RingTimes()
    ring.run(BEFORE, {}, {})
    ring.run(20, sending, waiting)
    assert ring.named() == []


def test_between_two_replicas_one_direction_is_named():
    ring = RingTimes(("r0", "r1"))
    ring.run(BEFORE, {}, {})
    ring.run(10, {"r1": 0.4}, {"r0": 0.4, "r1": 0.4})
    assert ring.named() == [("r1", "r0")]


def test_a_network_that_is_slow_as_a_whole_names_no_link():
    ring = RingTimes()
    ring.run(BEFORE, {}, {})
    ring.run(10, dict.fromkeys(ring.names, 0.4), dict.fromkeys(ring.names, 0.4))
    assert ring.named() == []


def test_another_process_at_an_end_of_the_link_begins_a_warm_up():
    ring = RingTimes()
    ring.run(BEFORE, {}, {})
    ring.keep(r2=2)
    ring.run(10, {"r1": 0.4}, {"r2": 0.4})
    assert ring.named() == []


def test_links_without_sending_times_are_not_watched():
    """Links of shared memory report none, and neither does an older version."""
    ring = RingTimes()
    for _ in range(BEFORE):
        for name in ring.names:
            ring.detector.observe(name, StepTimes(waiting_s={"r0": 0.4, "r1": 0.4, "r2": 0.4}))
    assert ring.named() == [] and ring.detector.states(9) == []


def test_a_job_of_one_member_has_no_link():
    ring = RingTimes(("r0",))
    ring.run(BEFORE, {"r0": 0.4}, {"r0": 0.4})
    assert ring.named() == []


def test_at_most_four_links_are_named_the_slowest_first():
    ring = RingTimes(tuple(f"r{n:02}" for n in range(40)))
    ring.run(BEFORE, {}, {})
    slow = {f"r{n:02}": 0.1 * (n + 1) for n in range(6)}
    late = {f"r{n + 1:02}": 0.1 * (n + 1) for n in range(6)}
    ring.run(10, slow, late)
    assert ring.named() == [(f"r{n:02}", f"r{n + 1:02}") for n in (5, 4, 3, 2)]
