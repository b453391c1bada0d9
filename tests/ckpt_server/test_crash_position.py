"""The server reports a dead trainer's crash marker until the job has passed its step, also under later
trainers.
"""

import os

import pytest

from fabric.ckpt_server.server.slots import CRASH_MARKER, Memfd, SlotTable
from fabric.ckpt_server.server.trainer_watch import MARKER_BYTES, CrashLog, TrainerWatch, encode_marker
from fabric.lighthouse.connections.validation import decode_statuses
from fabric.model import MAX_MICRO_BATCHES, Death
from fabric.protocol.messages.network import TrainerStatus
from fabric.protocol.messages.wire import encode


@pytest.fixture
async def watched():
    memory, trainer = SlotTable(), TrainerWatch()
    deaths = CrashLog(memory, trainer)
    slot = memory.slot(CRASH_MARKER, 0)
    await memory.allocate(slot, MARKER_BYTES)
    trainer.incarnation = 7

    def note(value):
        os.pwrite(slot.memfd.fd, value.to_bytes(8, "little"), 0)

    yield deaths, trainer, note
    memory.close()


async def test_a_death_at_a_micro_batch_is_in_every_status(watched):
    deaths, _, note = watched
    note(encode_marker(12, 0))
    assert deaths.seen("running") == ()
    assert deaths.seen("gone") == deaths.seen("gone") == (Death(7, 12, 0),)


def test_a_note_whose_memory_is_still_being_allocated_counts_as_absent():
    """The status sender may run while a thread still allocates the marker's memory."""
    memory = SlotTable()
    deaths = CrashLog(memory, TrainerWatch())
    memory.slot(CRASH_MARKER, 0).memfd = Memfd("a note")
    assert deaths.seen("running") == () == deaths.seen("gone")
    memory.close()
    assert deaths.seen("gone") == (), "let go"


async def test_a_trainer_that_died_outside_of_a_micro_batch_leaves_no_note(watched):
    deaths, _, note = watched
    note(encode_marker(12, 3))
    note(0)
    assert deaths.seen("gone") == ()


async def test_a_successor_takes_the_note_away_and_outlives_the_evidence(watched):
    deaths, trainer, note = watched
    note(encode_marker(12, 3))
    deaths.seen("gone")
    trainer.on_attach()
    trainer.incarnation = 8
    assert deaths.seen("gone") == (Death(7, 12, 3),), "the successor has not died at it"
    note(encode_marker(12, 5))
    assert deaths.seen("running") == (Death(7, 12, 3),)
    note(encode_marker(13, 0))
    assert deaths.seen("running") == (), "the job is past that step"


async def test_both_deaths_of_one_replica_are_reported(watched):
    deaths, trainer, note = watched
    for incarnation in (7, 8):
        trainer.incarnation = incarnation
        note(encode_marker(2**30, MAX_MICRO_BATCHES - 1))
        found = deaths.seen("gone")
        trainer.on_attach()
    assert found == (Death(7, 2**30, MAX_MICRO_BATCHES - 1), Death(8, 2**30, MAX_MICRO_BATCHES - 1))


@pytest.mark.parametrize("garbage", [2**64 - 1, 2**63, 2**21 - 1, MAX_MICRO_BATCHES + 1, 1])
async def test_garbage_in_a_note_has_no_status_refused(watched, garbage):
    """The lighthouse refused every status of such a server, for good."""
    deaths, _, note = watched
    note(garbage)
    status = TrainerStatus("r0", 7, "gone", 1, deaths=deaths.seen("gone"))
    assert decode_statuses(encode(status).decode()) == (status,)
    note(encode_marker(12, 3))
    assert Death(7, 12, 3) in deaths.seen("gone"), "a sound note counts afterwards"
