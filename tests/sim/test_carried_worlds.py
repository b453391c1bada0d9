"""Rings carry contributions, and every world keeps its promises."""

import math

import pytest
from sim import carried_worlds, noticing

from fabric.protocol.member import rounds
from fabric.protocol.member.rounds import Rounds
from fabric.protocol.messages import member_events as io

SEEDS = 120


def never_tell_what_the_ring_should_carry(patch: pytest.MonkeyPatch) -> None:
    """Bug: a stalled exchange has no end, because nobody knows that all are in it."""
    patch.setattr(rounds, "LATE_S", 1e9)


def keep_what_the_ring_left_behind(patch: pytest.MonkeyPatch) -> None:
    """Bug: a member believes that the ring has carried its contribution, and never tells it."""
    exchanged = Rounds.on_exchanged

    def believed(member: Rounds, event: io.Exchanged) -> None:
        exchanged(member, event)
        if member.round is not None and member.carried_in == event.epoch:
            member.round.due_s = math.inf

    patch.setattr(Rounds, "on_exchanged", believed)


def test_rings_carry_contributions_and_links_have_the_others():
    noticing.meet("carried", carried_worlds.REQUIRED, SEEDS)


@pytest.mark.parametrize("mutate", [never_tell_what_the_ring_should_carry, keep_what_the_ring_left_behind])
def test_the_simulator_notices_contributions_that_never_arrive(mutate):
    noticing.find(mutate, "carried", range(SEEDS))
