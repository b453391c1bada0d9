"""The simulator: its ledger adds up, and each policy does what its definition says."""

import pytest
from msgspec import structs
from papers.published import PlannedRestarts

from fabric.model import Member
from fabric.plan.advice import (
    CheckpointRestart,
    ConstantBatch,
    FtHsdp,
    Replication,
    SPARePolicy,
    busiest_of_spread,
)
from fabric.plan.engine import SimulatedJob, simulate
from fabric.plan.failures import Fixed, Repair, Trace, WeibullRenewal
from fabric.protocol.rules.assignment import spread

NEVER = Fixed(1e11)
QUIET = SimulatedJob(groups=4, steps=100, compute_s=9.0, exchange_s=1.0, jitter=0.0, restart_fails=False)
POLICIES = [CheckpointRestart(), Replication(2), SPARePolicy((0, 1)), FtHsdp(), ConstantBatch(8)]


def once(at_s, unit=0):
    """Return a failure process with one failure, and no other during the test."""
    return Trace(((at_s, unit),), 1e10)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.label)
def test_without_failures_a_step_takes_its_slots_and_the_exchange(policy):
    ledger = simulate(QUIET, policy, NEVER)
    slots = 2 if isinstance(policy, Replication) else 1
    assert ledger.total_s == pytest.approx(100 * (9 * slots + 1))
    assert ledger.training_s == pytest.approx(1000)
    assert ledger.failures == 0


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.label)
def test_the_ledger_accounts_for_all_time(policy):
    job = structs.replace(
        QUIET, groups=8, steps=300, jitter=0.05, save_s=5, save_every=10, restart_s=60, restart_fails=True
    )
    ledger = simulate(job, policy, WeibullRenewal(20_000.0, 1.0), seed=3)
    assert ledger.finished
    assert ledger.failures > 0
    parts = structs.asdict(ledger)
    assert sum(parts[name] for name in parts if name.endswith("_s")) == pytest.approx(ledger.total_s)
    # ``training_s`` counts committed progress only, so it equals the ideal time under every policy.
    assert ledger.training_s == pytest.approx(job.ideal_s, rel=0.02)


def test_equal_seeds_give_equal_ledgers():
    def play():
        return simulate(QUIET, ConstantBatch(8), WeibullRenewal(900.0, 1.0), seed=7)

    assert play() == play()


def test_checkpoint_and_restart_repeats_the_steps_since_the_checkpoint():
    job = structs.replace(QUIET, save_s=2.0, save_every=10, restart_s=100.0)
    # With steps of 10 s and saves after steps 10, 20, ..., a failure at 253 s loses 3 steps and 9 s.
    ledger = simulate(job, CheckpointRestart(), once(253.0))
    assert ledger.rework_s == pytest.approx(253 - 2 * 102)
    assert ledger.recovery_s == pytest.approx(100)
    assert ledger.restarts == 1
    assert ledger.training_s == pytest.approx(1000)


def test_replication_masks_a_failure_and_restarts_when_a_block_is_gone():
    job = structs.replace(QUIET, save_every=10, save_s=0.0, restart_s=100.0)
    assert simulate(job, Replication(2), once(55.0)).restarts == 0
    pair = Trace(((55.0, 0), (75.0, 1)), 1e10)
    assert simulate(job, Replication(2), pair).restarts == 1
    other_block = Trace(((55.0, 0), (75.0, 2)), 1e10)
    assert simulate(job, Replication(2), other_block).restarts == 0


def test_spare_computes_a_patch_and_then_two_slots():
    # Group 0 fails at step 6: every group computes one more slot (depth 2) and exchanges a second time.
    ledger = simulate(QUIET, SPARePolicy((0, 1)), once(55.0))
    assert ledger.stall_s == pytest.approx(0.5 + 0.1 + 9.0)
    assert ledger.redundant_s == pytest.approx(94 * 9.0)
    assert ledger.restarts == 0


def test_constant_batch_computes_only_the_micro_batches_of_the_dead():
    # Of 8 micro-batches for 3 survivors the busiest computes 3; of 32 in later steps it computes 11.
    job = structs.replace(QUIET, repair=Repair(1e9))
    ledger = simulate(job, ConstantBatch(8, stall_s=0.25), once(55.0))
    assert ledger.stall_s == pytest.approx(0.5 + 0.25 + 9 * 3 / 8)
    assert ledger.redundant_s == pytest.approx(94 * 9.0 * 3 / 8)


def test_a_repaired_group_comes_back_and_no_group_waits():
    job = structs.replace(QUIET, repair=Repair(100.0))
    ledger = simulate(job, ConstantBatch(8, stall_s=0.25), once(55.0))
    assert ledger.redundant_s < 10 * 9.0
    assert ledger.recovery_s == 0


def test_a_spare_shortens_the_absence():
    job = structs.replace(QUIET, repair=Repair(500.0), spares=1, spare_join_s=20.0)
    with_spare = simulate(job, ConstantBatch(8), once(55.0))
    without = simulate(structs.replace(job, spares=0), ConstantBatch(8), once(55.0))
    assert with_spare.redundant_s < without.redundant_s / 5


def test_planned_restarts_lose_no_step():
    job = structs.replace(QUIET, groups=8, steps=400, restart_s=50.0, save_s=1.0)
    policy = PlannedRestarts(8, restart_below=6)
    ledger = simulate(job, policy, WeibullRenewal(4000.0, 1.0), seed=1)
    assert ledger.restarts > 0
    assert ledger.rework_s == 0


def test_a_job_that_cannot_finish_is_given_up():
    job = structs.replace(QUIET, save_every=0, give_up_after=5.0)
    ledger = simulate(job, CheckpointRestart(), Fixed(50.0))
    assert not ledger.finished
    assert ledger.total_s < 6 * job.ideal_s


def test_the_quotient_for_many_members_equals_the_assignment():
    for orphans in (1, 5, 8, 40, 100):
        members = [Member(f"r{i}", 1, "", "") for i in range(40)]
        given = spread(range(orphans), members, {m.replica: 1 for m in members})
        assert busiest_of_spread(orphans, 40) == max(len(ids) for ids in given.values())
    assert busiest_of_spread(8, 3) == 3
