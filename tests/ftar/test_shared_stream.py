"""A link of shared memory: a torn read does not count, and foreign bytes are refused."""

import contextlib
import os
import socket
import struct
import sys
import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from ring_harness import WAIT_S, RingMembers, names, same_bits, wait_until

from fabric.errors import ConfigError, ProtocolError, RoundAborted
from fabric.ftar.chunk_headers import REDUCE, SEGMENT, ChunkHeader, ExchangeSpec, digest, notice, pack
from fabric.ftar.host.cpu_ring import CpuRing, RingLinks
from fabric.ftar.host.exchange_buffers import Operands
from fabric.ftar.host.shm_segments import OwnSegments, PeerSegments, SegmentRef
from fabric.ftar.host.shm_transport import Inbox, Outbox, ReferenceReceiver, ReferenceSender
from fabric.ftar.plane import Ring
from fabric.ftar.reduce_ops import SUM
from fabric.ftar.ring_schedule import DTYPE_CODES, schedule

ROUND = ExchangeSpec(5, 3, 0, 2, DTYPE_CODES[torch.float32], 32)


def message(header: ChunkHeader, number: int, value: int) -> bytes:
    body = struct.pack("<Q", 1) + SegmentRef(0, 0, number, value).pack()
    return pack(header, digest(body)) + body


class Pair:
    """Both ends of one link, driven by a test."""

    def __init__(self) -> None:
        one, two = socket.socketpair()
        one.setblocking(False)
        two.setblocking(False)
        self.own, self.others = OwnSegments(), PeerSegments()
        self.outbox, self.inbox = Outbox(one, self.own), Inbox(two, self.others, Ring(5, 1, names(2)), False)
        self.bucket = self.own.allocate(4096).memory[:128].view(torch.float32)
        self.result = torch.full((32,), 2.0)
        plan = schedule(32, 2, 0, 16)
        operands = Operands(self.bucket, self.bucket, SUM, work=self.bucket)
        self.sender = ReferenceSender(self.outbox, None, operands, plan.sends, self.header)
        mine = Operands(self.result, self.result, SUM, work=self.result)
        self.receiver = ReferenceReceiver(self.inbox, None, mine, plan.sends, self.header)

    def header(self, piece) -> ChunkHeader:
        return ChunkHeader(ROUND, REDUCE, 0, piece.sequence, 64)

    def __enter__(self) -> "Pair":
        return self

    def __exit__(self, *_error: object) -> None:
        for end in (self.outbox, self.inbox):
            end.close()
            end.sock.close()
        self.own.close()
        self.others.close()


def test_a_chunk_is_read_in_the_memory_of_its_sender():
    with Pair() as pair:
        pair.bucket.fill_(3.0)
        assert pair.sender.pump(free=1)
        assert pair.receiver.pump() == (True, True)
        assert pair.receiver.pump() == (True, True)
        assert torch.equal(pair.result[:16], torch.full((16,), 5.0))


def test_a_chunk_that_its_sender_gave_up_during_the_read_is_discarded():
    with Pair() as pair:
        pair.sender.pump(free=1)
        pair.outbox.raise_guard(notice(5, 0, "m1 is gone", "m1"))
        pair.bucket.fill_(1e9)
        pair.receiver.pump()
        with pytest.raises(RoundAborted, match="m1 is gone") as aborted:
            pair.receiver.pump()
        assert aborted.value.about == "m1"
        assert pair.receiver.completed == 0


def test_an_abort_raises_the_guard_before_the_exchange_returns(monkeypatch):
    """Member 1 is held while it reads member 0's bucket, which member 0 overwrites after the abort."""
    reading, go_on = threading.Event(), threading.Event()
    find = Inbox.find

    def slow_find(inbox, *place):
        memory = find(inbox, *place)
        if threading.current_thread() is held.get("thread"):
            reading.set()
            assert go_on.wait(WAIT_S)
        return memory

    held: dict[str, threading.Thread] = {}
    monkeypatch.setattr(Inbox, "find", slow_find)
    with RingMembers(3, plane="shm", chunk_bytes=1024) as members:
        members.install(1)
        reduce = members.planes[1].all_reduce

        def noted(*arguments, **options) -> None:
            held["thread"] = threading.current_thread()
            reduce(*arguments, **options)

        members.planes[1].all_reduce = noted
        buckets = {i: members.shared(i, torch.ones(3000)) for i in range(3)}
        futures = members.start(1, 1, buckets)
        assert reading.wait(WAIT_S)
        members.planes[0].abort(1, "m2 is gone", about="m2")
        with pytest.raises(RoundAborted):
            futures[0].result(WAIT_S)
        buckets[0].fill_(1e9)
        go_on.set()
        for i in (1, 2):
            with pytest.raises(RoundAborted, match="m2 is gone") as aborted:
                futures[i].result(WAIT_S)
            assert aborted.value.about == "m2"


def test_no_member_returns_before_the_farthest_member_has_read_everything(monkeypatch):
    """Member 3 reads the memory of all members, also of members that are not its neighbours."""
    go_on = threading.Event()
    tell_read = RingLinks.tell_read

    def slow_tell_read(links, spec):
        assert links.ring.position != 3 or go_on.wait(WAIT_S)
        tell_read(links, spec)

    monkeypatch.setattr(RingLinks, "tell_read", slow_tell_read)
    with RingMembers(4, plane="shm") as members:
        members.install(1)
        results = {i: torch.zeros(64) for i in range(4)}
        futures = members.start(1, 1, {i: torch.full((64,), 1.0 + i) for i in range(4)}, results)
        wait_until(lambda: all((results[i] == 10).all() and members.planes[i].waiting_for for i in range(3)))
        assert not any(future.done() for future in futures.values())
        go_on.set()
        for i in range(4):
            futures[i].result(WAIT_S)


def test_no_member_returns_before_the_next_member_has_read_everything(monkeypatch):
    go_on = threading.Event()
    tell_read = RingLinks.tell_read

    def slow_tell_read(links, spec):
        assert links.ring.position == 0 or go_on.wait(WAIT_S)
        tell_read(links, spec)

    monkeypatch.setattr(RingLinks, "tell_read", slow_tell_read)
    with RingMembers(2, plane="shm") as members:
        members.install(1)
        buffers = {0: torch.full((64,), 1.0), 1: torch.full((64,), 7.0)}
        results = {i: torch.zeros(64) for i in range(2)}
        futures = members.start(1, 1, buffers, results)
        wait_until(lambda: members.planes[0].waiting_for == "m1" and (results[0] == 8).all())
        assert not futures[0].done()
        go_on.set()
        for i in range(2):
            futures[i].result(WAIT_S)
            assert same_bits(results[i], torch.full((64,), 8.0))


@pytest.fixture
def slow_reader(monkeypatch):
    """Hold member 1 before it copies a result from another member's memory; return the events (reading,
    go_on).
    """
    reading, go_on = threading.Event(), threading.Event()
    keep = Operands.keep

    def slow_keep(operands, piece, received, lent):
        if float(operands.source[-1]) == 7.0:  # the fold leaves a member's last segment to the next member
            reading.set()
            assert go_on.wait(WAIT_S)
        keep(operands, piece, received, lent)

    monkeypatch.setattr(Operands, "keep", slow_keep)
    yield reading, go_on
    go_on.set()


def _lasting(members: RingMembers, step: int = 1) -> tuple[dict[int, torch.Tensor], dict[int, Future]]:
    """Run one exchange whose results stay unchanged; member 1's elements are all seven. The results, and how
    it goes.
    """
    values = {i: torch.full((64,), 7.0 if i == 1 else 1.0) for i in members.who}
    results = {i: members.shared(i, torch.zeros(64)) for i in members.who}
    return results, members.start(1, step, values, results, result_is_stable=True)


@pytest.mark.parametrize("world", [2, 4])
def test_members_whose_results_last_do_not_wait_for_readers(slow_reader, world):
    reading, go_on = slow_reader
    with RingMembers(world, plane="shm") as members:
        members.install(1)
        results, futures = _lasting(members)
        assert reading.wait(WAIT_S)
        futures[0].result(WAIT_S)
        assert not futures[1].done()
        go_on.set()
        for i in range(world):
            futures[i].result(WAIT_S)
            assert same_bits(results[i], torch.full((64,), 6.0 + world))


def test_a_result_that_was_overwritten_after_the_epoch_ended_is_discarded(slow_reader):
    reading, go_on = slow_reader
    with RingMembers(2, plane="shm") as members:
        members.install(1)
        results, futures = _lasting(members)
        assert reading.wait(WAIT_S)
        futures[0].result(WAIT_S)
        members.planes[0].retire(2)
        results[0].fill_(1e9)
        go_on.set()
        with pytest.raises(RoundAborted, match="epoch 1 is over"):
            futures[1].result(WAIT_S)


def test_a_ring_with_a_tcp_link_waits_for_its_readers_too(monkeypatch):
    go_on = threading.Event()
    tell_read = RingLinks.tell_read

    def slow_tell_read(links, spec):
        assert links.ring.position != 1 or go_on.wait(WAIT_S)
        tell_read(links, spec)

    monkeypatch.setattr(RingLinks, "tell_read", slow_tell_read)
    with RingMembers(3, plane="mixed") as members:
        members.install(1)
        results, futures = _lasting(members)
        wait_until(lambda: all((results[i] == 9).all() and members.planes[i].waiting_for for i in (0, 2)))
        assert not futures[0].done()
        assert not futures[2].done()
        go_on.set()
        for i in range(3):
            futures[i].result(WAIT_S)


def test_members_that_disagree_about_whether_results_last_abort():
    with RingMembers(2, plane="shm") as members:
        members.install(1)
        futures = [
            *members.start(1, 1, {0: torch.ones(64)}, {0: torch.ones(64)}, result_is_stable=True).values(),
            *members.start(1, 1, {1: torch.ones(64)}, {1: torch.ones(64)}).values(),
        ]
        for future in futures:
            with pytest.raises(RoundAborted):
                future.result(WAIT_S)


@pytest.mark.parametrize(
    ("kind", "number", "value", "sentence"),
    [
        (REDUCE, 9, 0, "has not shown"),
        (REDUCE, 0, 4096, "has not shown"),
        (REDUCE, 0, 2, "has not shown"),
        (SEGMENT, 1, 4096, "none came"),
    ],
)
def test_references_to_unshared_memory_are_refused(kind, number, value, sentence):
    with Pair() as pair:
        pair.sender.pump(free=1)
        pair.receiver.pump()
        pair.receiver.pump()
        pair.outbox.sock.send(message(ChunkHeader(ROUND, kind, 0, 1, 64), number, value))
        pair.receiver._expect = lambda _: ChunkHeader(ROUND, kind, 0, 1, 64)
        with pytest.raises(ProtocolError, match=sentence):
            pair.receiver.pump()


def test_garbage_on_a_link_aborts_and_names_the_sender():
    ours_next, reader = socket.socketpair()
    ours_previous, writer = socket.socketpair()
    plane = CpuRing()
    try:
        plane.install(Ring(5, 0, names(2)), ours_next, ours_previous)
        writer.sendall(bytes(500))
        with pytest.raises(RoundAborted, match="no chunk header") as aborted:
            plane.all_reduce(5, 3, torch.ones(32), torch.ones(32))
        assert aborted.value.about == "m1"
    finally:
        plane.close()
        reader.close()
        writer.close()


def test_memory_that_could_end_under_its_reader_is_refused():
    descriptor = os.memfd_create("not-sealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(ProtocolError, match="may end"):
        PeerSegments().map(descriptor, 4096, epoch=1)
    own = OwnSegments()
    shown = own.allocate(4096)
    with pytest.raises(ProtocolError, match="may end"):
        PeerSegments().map(own.duplicate(shown), 8192, epoch=1)
    own.close()


def test_another_members_memory_is_mapped_to_be_read_only():
    own, others = OwnSegments(), PeerSegments()
    mapped = others.map(own.duplicate(own.allocate(4096)), 4096, epoch=1)
    line = next(
        x
        for x in Path("/proc/self/maps").read_text().splitlines()
        if x.startswith(f"{mapped.data_ptr():08x}-")
    )
    assert line.split()[1] == "r--s"
    own.close()
    others.close()


def test_a_mapping_outlives_an_epoch_and_goes_when_two_have_not_used_it():
    own, others = OwnSegments(), PeerSegments()
    shown = own.allocate(4096)
    first = others.map(own.duplicate(shown), 4096, epoch=1)
    others.retire(2)
    assert others.map(own.duplicate(shown), 4096, epoch=2) is first
    others.retire(3)
    assert others.map(own.duplicate(shown), 4096, epoch=2) is first
    others.retire(4)
    assert others.map(own.duplicate(shown), 4096, epoch=4) is not first
    own.close()
    others.close()


def open_files() -> set[tuple[str, int]]:
    """Return this process's descriptors with their inodes; other tests may close theirs at any moment."""
    found = set()
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own descriptor is closed already
            found.add((link.name, link.stat().st_ino))
    return found


def test_descriptors_do_not_pile_up_over_epochs():
    before = open_files()
    with RingMembers(3, plane="shm") as members:
        counts = []
        for epoch in range(1, 6):
            members.install(epoch)
            members.reduce(epoch, 1, [torch.ones(5000)] * 3)
            for plane in members.planes.values():
                plane.retire(epoch)
            for thread in threading.enumerate():
                # this thread holds descriptors until it has unmapped the memory
                if thread.name == "fabric-unmap":
                    thread.join()
            counts.append(len(open_files() - before))
        assert counts[0] and counts[1:] == counts[1:2] * 4


def test_a_lack_of_shared_memory_is_a_sentence():
    with pytest.raises(ConfigError, match="FABRIC_DATA_PLANE=tcp"):
        OwnSegments().allocate(2**60)


def test_a_result_is_the_gradient_itself_or_lies_elsewhere():
    with RingMembers(1) as members:
        members.install(1)
        plane, gradient = members.planes[0], torch.ones(10)
        with pytest.raises(ConfigError, match="lies in a part of the gradient"):
            plane.all_reduce(1, 1, gradient[:8], gradient[2:])
        with pytest.raises(ConfigError, match="must agree"):
            plane.all_reduce(1, 1, gradient, torch.ones(9))
        plane.all_reduce(1, 1, gradient)


def test_bounds_may_be_changed_between_exchanges():
    with RingMembers(2, entry_s=3600.0) as members:
        members.install(1)
        members.planes[0].set_bounds(entry_s=0.05)
        with pytest.raises(RoundAborted, match="stalled"):
            members.start(1, 1, {0: torch.ones(100)})[0].result(WAIT_S)
        with pytest.raises(ConfigError, match="positive"):
            members.planes[0].set_bounds(exchange_s=0.0)


def test_segments_are_mapped_in_one_thread_while_another_retires_epochs():
    own, others, errors = OwnSegments(), PeerSegments(), []
    shown = own.allocate(4096)

    def retire() -> None:
        try:
            for epoch in range(3000):
                others.retire(epoch)
        except RuntimeError as error:
            errors.append(error)

    retiring, before = threading.Thread(target=retire), sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        retiring.start()
        for size in range(1, 1500):  # each size is a mapping of its own
            others.map(own.duplicate(shown), size, epoch=1 << 40)
        retiring.join()
    finally:
        sys.setswitchinterval(before)
    assert errors == []
    others.close()
    own.close()
