"""The ring carries one note of each member to all others, over TCP."""

import pytest
import torch
from ftar.ring_harness import RingMembers, tcp_pair

from fabric.errors import RoundAborted
from fabric.ftar.chunk_headers import HEADER_BYTES, NOTE, ChunkHeader, ExchangeSpec, digest, pack
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.plane import MOST_NOTE_BYTES, Ring, RingNotes


def notes_of(members: RingMembers, step: int) -> list[dict[int, bytes]]:
    return [members.planes[i].notes.carried(1, step) for i in members.who]


def inputs(world: int, length: int = 4096) -> list[torch.Tensor]:
    return [torch.full((length,), float(i + 1)) for i in range(world)]


@pytest.mark.parametrize("options", [{}, {"checksum": False}, {"chunk_bytes": 4096}])
@pytest.mark.parametrize("world", [2, 3, 5])
def test_every_member_gets_every_note_and_the_same_sum(world, options):
    with RingMembers(world, **options) as members:
        members.install(1)
        for step in range(3):
            notes = {i: b"%d of step %d" % (i, step) for i in range(world)}
            for i, note in notes.items():
                members.planes[i].notes.put(1, step, note)
            results = members.reduce(1, step, inputs(world))
            assert all(result.eq(sum(range(1, world + 1))).all() for result in results.values())
            assert notes_of(members, step) == [notes] * world
            assert notes_of(members, step + 1) == [{}] * world


def test_a_note_goes_with_a_later_exchange_of_its_step():
    with RingMembers(3) as members:
        members.install(1)
        members.reduce(1, 0, inputs(3))
        assert notes_of(members, 0) == [{}] * 3
        members.planes[1].notes.put(1, 0, b"late")
        members.reduce(1, 0, inputs(3))
        members.reduce(1, 0, inputs(3))
        assert notes_of(members, 0) == [{1: b"late"}] * 3


def test_notes_of_other_rounds_and_long_notes_stay_behind():
    with RingMembers(2) as members:
        members.install(1)
        members.planes[0].notes.put(2, 0, b"another epoch")
        members.planes[1].notes.put(1, 0, b"x" * (MOST_NOTE_BYTES + 1))
        members.reduce(1, 0, inputs(2))
        assert notes_of(members, 0) == [{}, {}]
        members.planes[1].notes.put(1, 1, b"x" * MOST_NOTE_BYTES)
        members.reduce(1, 1, inputs(2))
        assert [len(found[1]) for found in notes_of(members, 1)] == [MOST_NOTE_BYTES] * 2


@pytest.mark.parametrize("plane", ["shm", "mixed"])
def test_shared_memory_carries_no_note(plane):
    with RingMembers(4, plane=plane) as members:
        members.install(1)
        for i in members.who:
            members.planes[i].notes.put(1, 0, b"note")
        members.reduce(1, 0, inputs(4))
        assert all(len(found) < 4 for found in notes_of(members, 0))


def test_a_note_is_taken_once_and_by_its_round_only():
    notes = RingNotes()
    notes.put(1, 4, b"mine")
    assert notes.take(1, 5, 0) == b"" and notes.carried(1, 4) == {}
    assert notes.take(1, 4, 0) == b"mine" and notes.take(1, 4, 0) == b""
    assert notes.carried(1, 4) == {0: b"mine"} and notes.carried(1, 5) == {}


@pytest.mark.parametrize("kind", ["damaged", "too long", "two in a row"])
def test_a_note_that_cannot_be_used_ends_the_exchange(kind):
    """The test is the other member of the ring."""
    (near_next, far_previous), (far_next, near_previous) = tcp_pair(), tcp_pair()
    with far_next, far_previous:
        plane = CpuRing()
        plane.install(Ring(1, 0, ("a", "b")), near_next, near_previous)
        spec = ExchangeSpec(1, 0, 0, 2, 1, 4096)
        size = MOST_NOTE_BYTES + 1 if kind == "too long" else 4
        note = pack(ChunkHeader(spec, NOTE, 1, 0, size), digest(b"note"))
        body = b"nope" if kind == "damaged" else b"note"
        far_next.sendall(note + body + (note if kind == "two in a row" else bytes(HEADER_BYTES)))
        with pytest.raises(RoundAborted, match="from b"):
            plane.all_reduce(1, 0, torch.zeros(4096))
        plane.close()
