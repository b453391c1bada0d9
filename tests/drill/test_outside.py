"""A running job is judged from outside: by the lighthouse's records and status, without a journal."""

import math

import pytest
from msgspec import structs
from msgspec.structs import replace

from fabric.audit.journal import LostReplica, RecordedRun, RecoveryFacts
from fabric.drill.judge.drill_record import (
    DrillRecord,
    InjectedFault,
    StepSighting,
)
from fabric.drill.judge.drill_verdict import OutsideTimes, judge_drill

FAULT = InjectedFault("kill", ("r1",), 105.0, 105.0, observed="gone", undone="started", pids={"r1": 1})
RECOVERY = RecoveryFacts("death", 105.2, step=5, step_committed=105.4, lost={"r1": LostReplica(108.0)})
SEEN = tuple(
    StepSighting(100.0 + t, name, t)
    for t in range(20)
    for name in ("r0", "r1")
    if name == "r0" or t not in (5, 6, 7)
)
HONEST = DrillRecord(RecordedRun({}), 119.0, (FAULT,), (RECOVERY,), SEEN, is_over=False, began=100.0)


def holds(record: DrillRecord, expectation: str) -> bool:
    (outcome,) = judge_drill(record, [expectation]).outcomes
    return outcome.holds


def test_an_honest_drill_meets_its_expectations_and_says_what_was_not_seen():
    verdict = judge_drill(HONEST)
    assert verdict.holds and verdict.broken == verdict.disagreements == ()
    measured = {o.expectation for o in verdict.outcomes if o.value is not None}
    assert measured == {"steps_lost==0", "restarts==0", "unexplained-wait<=10s", "rejoined<=120s"}
    assert [text.partition(":")[0] for text in verdict.unseen] == ["no journal was read"]
    assert verdict.faults[0].rejoined_s == {"r1": 3.0}


@pytest.mark.parametrize(
    ("expectation", "change"),
    [
        ("rejoined<=120s", {"sightings": tuple(x for x in SEEN if x.replica == "r0" or x.t < 105)}),
        ("rejoined<=2s", {}),
        ("steps-lost==0", {"recoveries": (structs.replace(RECOVERY, steps_lost=2),)}),
        ("restarts==0", {"recoveries": (RECOVERY, structs.replace(RECOVERY, lost={"r0": LostReplica()}))}),
        ("unexplained-wait<=10s", {"ended": 140.0}),
        ("standstill<=10s", {"ended": 140.0}),
        ("steps>=100", {}),
        ("digests-equal", {}),
        ("steps-lost==0", {"recoveries": None}),
    ],
)
def test_a_violated_expectation_is_noticed(expectation, change):
    assert not holds(replace(HONEST, **change), expectation)


def test_a_wait_that_a_recovery_explains_is_not_unexplained():
    slow = structs.replace(RECOVERY, detected=119.5, step_committed=139.0, lost={})
    record = replace(HONEST, ended=140.0, recoveries=(RECOVERY, slow))
    assert holds(record, "unexplained-wait<=2s") and not holds(record, "standstill<=2s")


def test_losses_before_the_drill_are_not_the_drills():
    before = structs.replace(RECOVERY, detected=50.0, steps_lost=3, lost={"r0": LostReplica()})
    record = replace(HONEST, recoveries=(before, RECOVERY))
    assert holds(record, "steps-lost==0") and holds(record, "restarts==0")


def test_a_replica_that_never_returned_takes_for_ever():
    assert math.isinf(OutsideTimes(HONEST).rejoined_s(FAULT, "r9"))


def test_sources_that_were_not_there_are_named():
    verdict = judge_drill(replace(HONEST, recoveries=None, sightings=()))
    assert [text.partition(":")[0] for text in verdict.unseen] == [
        "no journal was read",
        "the lighthouse gave no recovery records",
        "the lighthouse gave no status",
    ]
