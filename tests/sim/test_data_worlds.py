"""The data of a job change, by the stages of its loops or by a restart, and every step stays whole."""

import pytest
from sim import data_worlds, noticing
from sim.run import hunt

from fabric.model import Record
from fabric.protocol.leader.state import JobState
from fabric.protocol.member.rounds import Rounds
from fabric.protocol.rules.assignment import Work
from fabric.protocol.rules.decide import WorkByStep

SEEDS = 60
REBATCHED_SEEDS = 12
MUTATION_SEEDS = 40


def test_every_step_has_the_micro_batches_of_its_stage():
    noticing.meet("curriculum", data_worlds.REQUIRED, SEEDS)


def test_a_restart_with_other_batches_loses_and_invents_no_micro_batch():
    counts, failures = hunt(0, REBATCHED_SEEDS, "rebatched")
    assert not failures, "\n".join(failures)
    assert counts["data: all started again with other batches"] == REBATCHED_SEEDS
    assert counts["path: cold start"], "the steps after the restart count with the new number"


def decide_with_the_number_of_the_first_stage(patch: pytest.MonkeyPatch) -> None:
    def at(work: WorkByStep, step: int) -> Work:
        return Work(work.micro_batches, work.record.sharing)

    def number(state: JobState, record: Record) -> int:
        return next(iter(state.liveness.peers.values())).session.micro_batches

    patch.setattr(WorkByStep, "at", at)
    patch.setattr(JobState, "micro_batches", number)


def divide_an_undivided_step_among_nobody(patch: pytest.MonkeyPatch) -> None:
    divide = Rounds._divide

    def divided(member: Rounds, record: Record, able: object) -> tuple[int, ...]:
        resume = member._epochs.resume
        follows = resume is not None and resume.fence == record.fence and resume.undivided
        return () if follows else divide(member, record, able)  # type: ignore[arg-type]

    patch.setattr(Rounds, "_divide", divided)


@pytest.mark.parametrize(
    ("mutate", "kind"),
    [
        (decide_with_the_number_of_the_first_stage, "curriculum"),
        (decide_with_the_number_of_the_first_stage, "rebatched"),
        (divide_an_undivided_step_among_nobody, "curriculum"),
    ],
)
def test_the_simulator_notices_a_step_that_is_not_whole(mutate, kind):
    noticing.find(mutate, kind, range(MUTATION_SEEDS))
