"""Which rank, stage or link makes a replica of several ranks slow."""

import random
from collections.abc import Mapping, Sequence

import pytest

from fabric.health.detector import KEPT_STEPS, JobDetector
from fabric.health.localise import Scope, Slowdown, Unit
from fabric.health.work import WorkAmount
from fabric.model import Member, RankAddress, RankTimes

BEFORE = 80
REPLICAS = ("r0", "r1", "r2")


class Ranks:
    """Replicas of four ranks that wait for the slowest rank of their replica."""

    def __init__(self, stages: Sequence[int] = (0, 0, 0, 0), replicas: Sequence[str] = REPLICAS) -> None:
        self.detector = JobDetector(most_ranks=1000)
        self.keep(replicas, len(stages))
        self.rng = random.Random(3)
        self.step = 0
        self.stages = stages
        self.replicas = replicas
        self.wall: dict[str, float] = {}

    def keep(self, replicas: Sequence[str], ranks: int) -> None:
        others = (RankAddress("", ""),) * (ranks - 1)
        self.detector.keep([Member(name, 1, "", "", ranks=others) for name in replicas])

    def run(
        self, steps: int, factors: Mapping[tuple[str, int], float] | None = None, link_s: float = 0.0
    ) -> None:
        """``link_s``: seconds more for which each rank of r1 waits."""
        factors = factors or {}
        for _ in range(steps):
            self.step += 1
            for replica in self.replicas:
                own, works = [], []
                for rank in range(len(self.stages)):
                    lengths = [self.rng.randrange(100, 2000) for _ in range(8)]
                    works.append(WorkAmount(sum(lengths), sum(x * x for x in lengths), 8.0, 2))
                    usual = 1e-5 * sum(lengths) * self.rng.gauss(1, 0.01)
                    own.append(usual * factors.get((replica, rank), 1.0))
                slow = link_s if replica == "r1" else 0.0
                self.wall[replica] = max(own) + 0.01 + slow
                times = [
                    RankTimes(seconds, self.wall[replica] - seconds, work.tokens, work.squares, stage)
                    for stage, work, seconds in zip(self.stages, works, own, strict=True)
                ]
                self.report(replica, times, works[0], is_well=not (slow or factors))

    def report(self, replica: str, times: Sequence[RankTimes], work: WorkAmount, **more: bool) -> None:
        self.detector.observe(replica, 1, self.step, work, self.wall[replica], times, **more)

    def locate(self, factor: float, replica: str = "r1") -> Slowdown:
        whole = Slowdown(Scope.REPLICA, (Unit(replica),), factor, "the replica is slow")
        return self.detector._part(whole, self.wall[replica] * (1 - 1 / factor))


def test_one_slow_rank_is_named_although_all_ranks_of_its_replica_take_as_long():
    ranks = Ranks()
    ranks.run(BEFORE)
    ranks.run(4, {("r1", 2): 2.0})
    part = ranks.locate(2.0)
    assert (part.scope, part.units) == (Scope.RANK, (Unit("r1", 0, 2),))
    assert "rank 2 of stage 0 of replica r1 takes" in part.evidence


def test_all_ranks_of_one_stage_are_a_slow_stage():
    ranks = Ranks(stages=(0, 0, 1, 1))
    ranks.run(BEFORE)
    ranks.run(4, {("r1", 2): 2.0, ("r1", 3): 2.0})
    part = ranks.locate(2.0)
    assert (part.scope, part.units) == (Scope.STAGE, (Unit("r1", 1, 0), Unit("r1", 1, 1)))


def test_one_rank_of_a_stage_is_a_rank_of_that_stage():
    ranks = Ranks(stages=(0, 0, 1, 1))
    ranks.run(BEFORE)
    ranks.run(4, {("r1", 3): 2.0})
    part = ranks.locate(2.0)
    assert (part.scope, part.units) == (Scope.RANK, (Unit("r1", 1, 1),))


def test_ranks_that_are_all_slow_leave_the_whole_replica_accused():
    ranks = Ranks()
    ranks.run(BEFORE)
    ranks.run(4, {("r1", rank): 2.0 for rank in range(4)})
    assert ranks.locate(2.0).scope is Scope.REPLICA


def test_ranks_that_only_wait_longer_accuse_their_links():
    ranks = Ranks()
    ranks.run(BEFORE)
    ranks.run(4, link_s=0.2)
    part = ranks.locate(1.0 + 0.2 / 0.1)
    assert part.scope is Scope.LINK and len(part.units) == 4
    assert "no rank computes slowly" in part.evidence


def test_a_rank_whose_extra_time_explains_nothing_is_not_accused():
    """A rank that mostly waits has a short time of its own, whose noise must not name it."""
    ranks = Ranks()
    ranks.run(BEFORE)
    ranks.run(4, {("r1", 0): 1.15}, link_s=1.0)
    assert ranks.locate(8.0).scope is Scope.LINK


def test_a_job_of_one_replica_compares_its_ranks_with_each_other():
    ranks = Ranks(replicas=("r1",))
    ranks.run(BEFORE)
    ranks.run(4, {("r1", 1): 2.0})
    assert ranks.locate(2.0).units == (Unit("r1", 0, 1),)


def test_the_warm_up_names_no_rank():
    ranks = Ranks()
    ranks.run(20, {("r1", 1): 2.0})
    assert ranks.locate(2.0).evidence == "the replica is slow"


def test_a_new_process_starts_with_an_empty_history():
    ranks = Ranks()
    ranks.run(BEFORE)
    ranks.detector.observe("r1", 2, 1, WorkAmount(1.0), 1.0, [RankTimes(1.0)] * 4)
    assert "r1" not in {unit.replica for unit, _ in ranks.detector.ranks()}


def test_a_repeated_or_impossible_report_does_not_count():
    ranks = Ranks(replicas=("r1",))
    ranks.run(BEFORE)
    before = {unit: list(x.detector.relative) for unit, x in ranks.detector.ranks()}
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        ranks.step += 1
        times = [RankTimes(seconds, 0.0, 1.0)] * 4
        ranks.report("r1", times, WorkAmount(1.0))
    times = [RankTimes(0.05, 0.0, 5000.0)] * 4
    ranks.report("r1", times, WorkAmount(1.0))
    assert {unit: list(x.detector.relative) for unit, x in ranks.detector.ranks()} == before


def test_a_job_that_begins_again_from_an_older_state_forgets_the_later_steps():
    ranks = Ranks(replicas=("r1",))
    ranks.run(BEFORE)
    ranks.step = 10
    ranks.run(1)
    assert all([step for step, _ in x.detector.relative] == [11] for _, x in ranks.detector.ranks())


def test_the_history_is_bounded_and_left_replicas_are_forgotten():
    ranks = Ranks()
    ranks.run(3 * KEPT_STEPS)
    assert all(len(x.detector.relative) <= KEPT_STEPS for _, x in ranks.detector.ranks())
    ranks.keep(["r0"], 4)
    assert {unit.replica for unit, _ in ranks.detector.ranks()} == {"r0"}
    ranks.keep(REPLICAS, 4)
    ranks.run(1)  # the equals of the same stage are forgotten too


@pytest.mark.parametrize("factor", [1.0, 1.05])
def test_ranks_within_the_noise_leave_the_replica_accused(factor):
    ranks = Ranks()
    ranks.run(BEFORE)
    ranks.run(4, {("r1", 1): factor})
    assert ranks.locate(2.0).scope is Scope.REPLICA
