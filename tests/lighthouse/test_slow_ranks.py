"""The lighthouse names the slow rank of a replica, and shows the speeds of all ranks by step."""

import pytest
from lighthouse.test_slowness import BEFORE, Fleet
from msgspec.structs import replace

from fabric.errors import ProtocolError
from fabric.health.detector import FIRST_STEPS, KEPT_STEPS, JobDetector
from fabric.health.work import WorkAmount
from fabric.lighthouse.connections.validation import decode_member
from fabric.lighthouse.diagnosis.slowness import MOST_ROWS, speeds_by_step
from fabric.model import Member, RankAddress, RankTimes, StepTimes
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire
from fabric.protocol.messages.rank_messages import MOST_TIMED_RANKS


class RankedFleet(Fleet):
    """Replicas of ``size`` ranks, which wait for the slowest of their replica."""

    size = 4
    stages: tuple[int, ...] = (0, 0, 0, 0)

    def __post_init__(self) -> None:
        super().__post_init__()
        ranks = (RankAddress("", ""),) * (self.size - 1)
        roster = tuple(replace(x, ranks=ranks) for x in self.record.roster)
        self.record = self.core.state.record = replace(self.record, roster=roster)

    def times(self, name: str, factors: dict[str, float]) -> StepTimes:
        """``factors``: by rank, such as "r1.2"."""
        whole = super().times(name, {})
        own = [
            whole.compute_s * factors.get(f"{name}.{n}", 1.0) * self.rng.gauss(1, 0.01)
            for n in range(self.size)
        ]
        tokens = sum(whole.work.values())
        wall = max(own) + 0.001
        ranks = tuple(
            RankTimes(x, wall - x, tokens, whole.squares, stage)
            for x, stage in zip(own, self.stages, strict=False)
        )
        return replace(whole, compute_s=wall, ranks=ranks)

    def slow(self, steps: int, **factors: float) -> list[tuple[str, str]]:
        return self.run(steps, **{name.replace("_", "."): factor for name, factor in factors.items()})


def test_the_slow_rank_of_a_replica_is_named():
    fleet = RankedFleet()
    assert fleet.run(BEFORE) == []
    events = fleet.slow(8, r1_2=2.0)
    assert events[0] == ("slow", "r1") and ("advice", "r1") in events
    (slow,) = fleet.watch.to_json(fleet.core)["slow"]
    assert (slow["scope"], slow["replica"], slow["ranks"]) == ("rank", "r1", [2])
    assert slow["factor"] == pytest.approx(2.0, rel=0.1)
    assert fleet.slow(30) == [("no longer slow", "r1")]


def test_the_slow_stage_of_a_replica_is_named_with_its_ranks():
    fleet = RankedFleet()
    fleet.stages = (0, 1, 0, 1)
    fleet.run(BEFORE)
    fleet.slow(8, r1_1=2.0, r1_3=2.0)
    (slow,) = fleet.watch.to_json(fleet.core)["slow"]
    assert (slow["scope"], slow["ranks"]) == ("stage", [1, 3])


def test_a_slowdown_that_moves_to_another_rank_is_an_event_of_its_own():
    fleet = RankedFleet()
    fleet.run(BEFORE)
    fleet.slow(8, r1_2=2.0)
    assert ("slow part", "r1") in fleet.slow(10, r1_3=2.0)
    (slow,) = fleet.watch.to_json(fleet.core)["slow"]
    assert slow["ranks"] == [3]


def test_a_job_slow_as_a_whole_accuses_no_rank():
    fleet = RankedFleet()
    fleet.run(BEFORE)
    everybody = {f"{name}_{rank}": 1.5 for name in fleet.names for rank in range(fleet.size)}
    assert fleet.slow(30, **everybody) == [("slow", "")]
    (slow,) = fleet.watch.to_json(fleet.core)["slow"]
    assert (slow["scope"], slow["ranks"]) == ("job", [])


def test_the_only_replica_of_a_job_has_its_slow_rank_named():
    fleet = RankedFleet(("r0",))
    fleet.run(BEFORE)
    fleet.slow(8, r0_1=2.0)
    (slow,) = fleet.watch.to_json(fleet.core)["slow"]
    assert (slow["scope"], slow["ranks"]) == ("rank", [1])


@pytest.mark.parametrize("more", [{"busy": "evaluation, at most 60 s"}])
def test_ranks_of_a_busy_replica_are_not_watched(more):
    fleet = RankedFleet()
    fleet.step += 1
    for name in fleet.names:
        fleet.watch.hear(fleet.core, name, 1, fleet.beat(name, fleet.times(name, {}), **more))
    assert fleet.watch.to_json(fleet.core)["by_step"]["rows"] == []


def test_ranks_are_not_watched_while_a_member_joins():
    fleet = RankedFleet()
    joining = tuple(replace(x, joining=x.replica == "r2") for x in fleet.record.roster)
    fleet.joining = {"r2"}
    fleet.core.state.record = replace(fleet.record, roster=joining)
    fleet.run(BEFORE)
    assert fleet.watch.to_json(fleet.core)["by_step"]["rows"] == []


# --- speeds by step ---------------------------------------------------------------------------------------


def test_the_speed_of_each_rank_is_shown_for_the_newest_steps():
    fleet = RankedFleet()
    fleet.run(BEFORE)
    fleet.slow(5, r1_2=2.0)
    shown = fleet.watch.to_json(fleet.core)["by_step"]
    assert shown["steps"] == list(range(BEFORE + 6 - KEPT_STEPS, BEFORE + 6)) and shown["left_out"] == 0
    assert [(x["replica"], x["rank"]) for x in shown["rows"]] == [
        (name, rank) for name in fleet.names for rank in range(4)
    ]
    row = shown["rows"][6]
    assert row["speeds"][0] == pytest.approx(1.0, rel=0.1)
    assert row["speeds"][-1] == pytest.approx(0.5, rel=0.1)
    assert row["seconds"] > 1.8 * row["predicted_s"]
    assert row["speed"] == pytest.approx(0.5, rel=0.1)


def test_replicas_of_one_rank_have_a_row_each():
    fleet = Fleet()
    fleet.run(BEFORE)
    fleet.run(5, r2=2.0)
    rows = fleet.watch.to_json(fleet.core)["by_step"]["rows"]
    assert [(x["replica"], x["rank"], x["stage"]) for x in rows] == [("r0", 0, 0), ("r1", 0, 0), ("r2", 0, 0)]
    assert rows[2]["speeds"][-1] == pytest.approx(0.5, rel=0.1)


def test_a_row_and_the_table_of_replicas_agree_about_a_speed():
    fleet = Fleet()
    fleet.run(BEFORE)
    fleet.run(1, r2=3.0)
    shown = fleet.watch.to_json(fleet.core)
    row = shown["by_step"]["rows"][2]
    assert row["speeds"][-1] < 0.4, "the newest step alone"
    assert row["speed"] == shown["replicas"]["r2"]["speed"] > 0.9


def test_steps_that_a_rank_did_not_report_are_empty():
    fleet = Fleet()
    fleet.run(BEFORE)
    fleet.names = ("r0", "r1")
    fleet.run(3)
    rows = fleet.watch.to_json(fleet.core)["by_step"]["rows"]
    assert rows[2]["speeds"][-3:] == [None] * 3 and rows[2]["speeds"][-4] is not None


def test_a_large_job_shows_its_slowest_ranks():
    times = {f"r{n:03}": [(1, 1.0), (2, 2.0 if n == 500 else 1.0)] for n in range(600)}
    shown = speeds_by_step([], times, {})
    assert len(shown["rows"]) == MOST_ROWS and shown["left_out"] == 600 - MOST_ROWS
    assert [x["speeds"][-1] for x in shown["rows"] if x["replica"] == "r500"] == [0.5]


# --- bounds -----------------------------------------------------------------------------------------------


def report(watch: JobDetector, replica: str, ranks: int) -> None:
    """Report one step more than those that do not count."""
    for step in range(FIRST_STEPS + 1):
        times = (RankTimes(1.0, 0.0, 1.0),) * ranks
        watch.observe(replica, 1, step, WorkAmount(1.0), 1.0, times)


def watched(watch: JobDetector) -> set[str]:
    return {unit.replica for unit, _ in watch.ranks()}


def members(count: int, ranks: int) -> list[Member]:
    others = (RankAddress("", ""),) * (ranks - 1)
    return [Member(f"r{n}", 1, "", "", ranks=others) for n in range(count)]


def test_a_job_of_ten_thousand_members_does_no_work_by_rank():
    watch = JobDetector(most_ranks=1000)
    roster = members(10_000, 4)
    watch.keep(roster)
    for member in roster:
        report(watch, member.replica, 4)
    assert not watched(watch)


def test_at_most_as_many_ranks_are_watched_as_replicas_are_compared():
    watch = JobDetector(most_ranks=1000)
    watch.keep(members(250, 4))
    report(watch, "r0", 4)
    assert watched(watch) == {"r0"}
    watch.keep(members(251, 4))
    report(watch, "r0", 4)
    assert not watched(watch)


def test_a_report_with_another_number_of_ranks_than_the_member_has_is_dropped():
    watch = JobDetector(most_ranks=1000)
    watch.keep(members(2, 4))
    for ranks in (1, 3, 5, 64):
        report(watch, "r0", ranks)
    report(watch, "stranger", 4)
    assert not watched(watch)


def test_a_heartbeat_with_too_many_ranks_is_refused():
    times = StepTimes(ranks=(RankTimes(),) * (MOST_TIMED_RANKS + 1))
    beat = m.Heartbeat(1, 1, 1, 1, times=times)
    with pytest.raises(ProtocolError, match="ranks must be a list of at most 64"):
        decode_member(wire.encode(beat).decode())
