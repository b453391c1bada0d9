"""After a notice to every host no committed step is lost, and one member writes; else the job goes on."""

from dataclasses import replace

import pytest
from sim import notice_worlds, noticing

from fabric.protocol.leader.orders import OperatorOrders
from fabric.protocol.member.serving import SnapshotServing

SEEDS = 36
MUTATION_SEEDS = 12


def test_no_committed_step_is_lost_when_every_host_gives_notice():
    noticing.meet("notice", notice_worlds.REQUIRED, SEEDS)


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


def choose_the_saver_again_at_each_look(patch):
    look = OperatorOrders._look

    def chosen(orders, record):
        able = [
            (x.leaving, x.replica)
            for x in record.roster
            if x.stores and x.replica in orders._beats(record.roster)
        ]
        return replace(look(orders, record), saver=min(able)[1] if able else "")

    patch.setattr(OperatorOrders, "_look", chosen)


def save_although_a_member_without_notice_has_come(patch):
    heed = SnapshotServing.heed
    patch.setattr(SnapshotServing, "heed", lambda serving, ack: heed(serving, replace(ack, goes_on=False)))


@pytest.mark.parametrize(
    ("mutate", "seed"),
    [(choose_the_saver_again_at_each_look, 90108), (save_although_a_member_without_notice_has_come, 91046)],
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
