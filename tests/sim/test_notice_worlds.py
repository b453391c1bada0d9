"""After a notice to every host no committed step is lost, and one member writes; else the job goes on."""

import pytest
from msgspec.structs import replace
from sim import notice_worlds, noticing

from fabric.protocol.leader.orders import OperatorOrders
from fabric.protocol.member.serving import SnapshotServing

SEEDS = 36
MUTATION_SEEDS = 12


def test_no_committed_step_is_lost_when_every_host_gives_notice():
    noticing.meet("notice", notice_worlds.REQUIRED, SEEDS)


@pytest.mark.parametrize(
    ("seed", "why"),
    [
        (95018, "the one process without notice died, and the job begins again from the saved state"),
        (95388, "a member that a new epoch no longer listed began the job again after the others had ended"),
        (95146, "the saver and the lighthouse died at once"),
        (96690, "the saver ended while the next leader did not see the other member yet, which saved again"),
    ],
)
def test_a_seed_of_a_wrong_end_after_a_notice_passes(seed, why):
    noticing.met_without_a_bug("notice", seed)


def let_everyone_save(patch):
    heed = OperatorOrders.heed
    patch.setattr(
        OperatorOrders,
        "heed",
        lambda orders, peer, ack: replace(heed(orders, peer, ack), save=peer.beat.noticed),
    )


def drain_nobody(patch):
    patch.setattr(OperatorOrders, "_drain_noticed", lambda orders, record: None)


def save_nothing_without_a_leader(patch):
    patch.setattr(SnapshotServing, "is_to_save", lambda serving: serving.saves)


def give_up_when_the_saver_dies(patch):
    look = OperatorOrders._look

    def kept(orders, record):
        first = orders.noticed.saver
        found = look(orders, record)
        orders.noticed = replace(found, saver=first or found.saver)
        return orders.noticed

    patch.setattr(OperatorOrders, "_look", kept)


def name_a_member_that_does_not_save_yet(patch):
    look = OperatorOrders._look

    def chosen(orders, record):
        beats = orders._beats(record.roster)
        able = [(beats[x.replica].saves, x.replica) for x in record.roster if x.stores and x.replica in beats]
        return replace(look(orders, record), saver=min(able)[1] if able else "")

    patch.setattr(OperatorOrders, "_look", chosen)


def save_although_a_member_without_notice_has_come(patch):
    heed = SnapshotServing.heed
    patch.setattr(SnapshotServing, "heed", lambda serving, ack: heed(serving, replace(ack, goes_on=False)))


def drain_while_one_saves(patch):
    drain, look = OperatorOrders.drain, OperatorOrders._look

    def drained(orders, record):
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(OperatorOrders, "_look", lambda *given: replace(look(*given), saver=""))
            return drain(orders, record)

    patch.setattr(OperatorOrders, "drain", drained)


@pytest.mark.parametrize(
    ("mutate", "seed"),
    [
        (name_a_member_that_does_not_save_yet, 90108),
        (save_although_a_member_without_notice_has_come, 91046),
        (drain_while_one_saves, 95208),
    ],
)
def test_the_seed_that_found_a_wrong_answer_to_a_notice_notices_it_again(mutate, seed):
    noticing.find(mutate, "notice", (seed,))


@pytest.mark.parametrize(
    ("mutate", "kind"),
    [
        (let_everyone_save, "all at once"),
        (drain_nobody, "all but one"),
        (save_nothing_without_a_leader, "no lighthouse"),
        (give_up_when_the_saver_dies, "the saver dies"),
    ],
)
def test_the_simulator_notices_a_wrong_answer_to_a_notice(mutate, kind):
    noticing.find(mutate, "notice", notice_worlds.seeds_of(kind)[:MUTATION_SEEDS])
