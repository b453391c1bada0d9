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
    patch.setattr(SnapshotServing, "is_to_save", lambda serving: serving.must_save)


def give_up_when_the_saver_dies(patch):
    is_to_save = SnapshotServing.is_to_save
    patch.setattr(
        SnapshotServing,
        "is_to_save",
        lambda serving: is_to_save(serving) and serving._epochs.current.names[0] == serving._context.replica,
    )


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
