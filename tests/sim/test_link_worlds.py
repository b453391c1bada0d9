"""While links are cut, members that can go on do.

Status names the missing links, and no healthy member is evicted.
"""

from collections.abc import Callable

import pytest
from sim import link_worlds, noticing

from fabric.protocol.leader import core as leader_core
from fabric.protocol.leader.admission import Admission
from fabric.protocol.leader.evictions import RingRebuilder
from fabric.protocol.leader.liveness import Liveness
from fabric.protocol.member.links import LinkWatch
from fabric.protocol.rules.link_graph import Healing

SEEDS = 24
CALM_SEEDS = 40
MUTATION_SEEDS = 40
Patch = pytest.MonkeyPatch


def test_steps_commit_while_some_members_reach_each_other_and_the_status_names_the_missing():
    noticing.meet("links", link_worlds.REQUIRED, SEEDS)


def test_no_member_is_evicted_while_only_lighthouses_and_the_store_fail():
    noticing.meet("calm", [f"fault: {kind}" for kind in link_worlds.CALM_FAULTS], CALM_SEEDS)


def leave_nobody_out_for_a_link(patch: Patch) -> None:
    patch.setattr(RingRebuilder, "_leave_out_unreachable", lambda rebuilds, record: False)


def let_in_whoever_asks(patch: Patch) -> None:
    """Bug: the leader admits a replica even if it does not reach the members."""
    patch.setattr(Admission, "_cut_off", lambda admission, record, peer: "")


def let_in_as_soon_as_a_link_is_whole(patch: Patch) -> None:
    """Bug: the leader admits a replica as soon as a link works again."""
    patch.setattr(Healing, "is_calm", lambda healing, process, now: True)


def no_credit_after_an_election(patch: Patch) -> None:
    """Bug: after an election the leader evicts members that are not back yet."""
    patch.setattr(Liveness, "grace_until", property(lambda liveness: float("-inf")))


def a_leader_that_was_away_accuses(patch: Patch) -> None:
    patch.setattr(leader_core, "DEAF_S", 1e9)


def never_test_links(patch: Patch) -> None:
    """Bug: a long round sends no large message, so a host that loses them stops the job."""
    patch.setattr(LinkWatch, "test_deadline", lambda watch: None)


LINKS = (
    never_test_links,
    leave_nobody_out_for_a_link,
    let_in_whoever_asks,
    let_in_as_soon_as_a_link_is_whole,
)
CALM = (no_credit_after_an_election, a_leader_that_was_away_accuses)


@pytest.mark.parametrize("mutate", LINKS, ids=lambda mutate: mutate.__name__)
def test_these_worlds_notice_wrong_exclusions_and_admissions(mutate: Callable[[Patch], None]):
    noticing.find(mutate, "links", range(MUTATION_SEEDS))


@pytest.mark.parametrize("mutate", CALM, ids=lambda mutate: mutate.__name__)
def test_calm_worlds_notice_an_eviction_without_a_cause(mutate: Callable[[Patch], None]):
    noticing.find(mutate, "calm", range(MUTATION_SEEDS))
