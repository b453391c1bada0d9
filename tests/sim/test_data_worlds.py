"""The data of a job change, by the stages of its loops or by a restart, and every step stays whole."""

from collections.abc import Mapping

import pytest
from sim import data_worlds, noticing
from sim.run import hunt

from fabric.model import Record
from fabric.protocol.member.rounds import Rounds
from fabric.protocol.messages.network import Report
from fabric.protocol.rules import decide

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


def decide_with_the_number_of_another_stage(patch: pytest.MonkeyPatch) -> None:
    def number(reports: Mapping[str, Report], step: int) -> int:
        return next(iter(reports.values())).plan.micro_batches

    patch.setattr(decide, "micro_batches_of", number)


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
        (decide_with_the_number_of_another_stage, "curriculum"),
        (divide_an_undivided_step_among_nobody, "curriculum"),
    ],
)
def test_the_simulator_notices_a_step_that_is_not_whole(mutate, kind):
    noticing.find(mutate, kind, range(MUTATION_SEEDS))
