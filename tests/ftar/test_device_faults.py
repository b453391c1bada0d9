"""The ends of a failed exchange on a device, and the bounds on its memory and time."""

import os
import signal
import socket
import traceback
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
import torch
from device_harness import FORMS, SMALL, DeviceMembers
from ftar.simulated_device import SimulatedDevice
from ring_harness import WAIT_S, names, same_bits, socket_ring, sockets_of, wait_until

from fabric.errors import ConfigError, IllegalTransition, RoundAborted
from fabric.ftar.chunk_headers import (
    ANSWER,
    CREDIT,
    DEVICE_REDUCE,
    FOLLOWS,
    HEADER_BYTES,
    ChunkHeader,
    ExchangeSpec,
    pack,
    take_back,
    to_previous,
    unpack,
)
from fabric.ftar.device import connections
from fabric.ftar.device.device_ring import OFFER_HEAD_BYTES, DeviceRing, offer, offer_size, read_offer
from fabric.ftar.host.piece_moves import DIGEST_BYTES, digest
from fabric.ftar.plane import Ring
from fabric.ftar.reduce_ops import Reduction

CHUNK = SMALL["chunk_bytes"]


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(connections, "PART_BYTES", 64)


def ones(count: int, length: int = 1000) -> list[torch.Tensor]:
    return [torch.full((length,), float(i + 1)) for i in range(count)]


def go_on(members: DeviceMembers, epoch: int, who: list[int]) -> None:
    """Check that the next epoch works with the kept gradients."""
    links = socket_ring(len(who), "shm")
    for place, i in enumerate(who):
        members.planes[i].install(Ring(epoch, place, tuple(f"m{j}" for j in who)), *links[place])
    sources = {i: torch.full((1000,), float(i + 1)) for i in who}
    results = {i: torch.zeros(1000) for i in who}
    for future in [members.submit(i, epoch, 1, sources[i], results[i]) for i in who]:
        future.result(WAIT_S)
    expected = torch.full((1000,), float(sum(i + 1 for i in who)))
    assert all(same_bits(results[i], expected) for i in who)


@pytest.mark.parametrize("form", FORMS)
def test_an_abort_ends_the_exchange_at_every_member_with_its_cause(form):
    with DeviceMembers(3, **FORMS[form]) as members:
        members.install(1)
        sources = ones(3)
        futures = [members.submit(i, 1, 0, sources[i], torch.zeros(1000)) for i in (0, 1)]
        wait_until(lambda: members.planes[0].waiting_for or members.planes[1].waiting_for)
        members.planes[1].abort(1, "the leader says so", about="m2")
        for future in futures:
            with pytest.raises(RoundAborted, match="the leader says so") as aborted:
                future.result(WAIT_S)
            assert aborted.value.about == "m2"
        # A member that begins late learns of the abort from its links.
        with pytest.raises(RoundAborted, match="the leader says so"):
            members.submit(2, 1, 0, sources[2], torch.zeros(1000)).result(WAIT_S)
        with pytest.raises(RoundAborted, match="the leader says so"):
            members.submit(0, 1, 1, sources[0], torch.zeros(1000)).result(WAIT_S)
        go_on(members, 2, [0, 1, 2])


@pytest.mark.parametrize("form", FORMS)
def test_an_abort_does_not_wait_for_the_device_and_the_next_exchange_does(form):
    with DeviceMembers(2, **FORMS[form]) as members:
        members.install(1)
        sources, results = ones(2), [torch.zeros(1000) for _ in range(2)]
        members.devices[0].pause()  # as if this member's GPU still ran a long backward
        futures = [members.submit(i, 1, 0, sources[i], results[i]) for i in range(2)]
        wait_until(lambda: members.devices[0].is_asked and members.planes[1].waiting_for == "m0")
        members.planes[0].abort(1, "no longer wanted")
        for future in futures:
            with pytest.raises(RoundAborted, match="no longer wanted"):
                future.result(WAIT_S)
        space = members.planes[0]._space
        assert space.unfinished and not space.unfinished[0].done()
        links = socket_ring(2, "shm")
        for i in range(2):
            members.planes[i].install(Ring(2, i, names(2)), *links[i])
        futures = [members.submit(i, 2, 0, sources[i], results[i]) for i in range(2)]
        wait_until(lambda: members.planes[1].waiting_for == "m0")
        assert not any(future.done() for future in futures)
        members.devices[0].resume()
        for i, future in enumerate(futures):
            future.result(WAIT_S)
            assert (results[i] == 3).all()
            assert (sources[i] == i + 1).all()


class RawPeer:
    """The other member of a ring of two; the test writes its bytes."""

    def __init__(self, position: int = 0, **options) -> None:
        self.device = SimulatedDevice()
        self.plane = DeviceRing(self.device, **{**SMALL, **options})
        pairs = socket_ring(2, "shm", options.get("connections", 1))
        self.plane.install(Ring(1, position, names(2)), *pairs[position])
        self.sockets = sockets_of(pairs[1 - position])
        self.next, self.previous, *self.further = self.sockets
        for sock in self.sockets:
            sock.settimeout(WAIT_S)

    def close(self) -> None:
        self.plane.close()
        self.device.close()
        for sock in self.sockets:
            sock.close()

    def receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            more = self.previous.recv(size - len(data))
            assert more
            data += more
        return data

    def silent(self) -> bool:
        """Whether the plane waits, with nothing on its way to us."""
        wait_until(lambda: self.plane.waiting_for)
        self.previous.setblocking(False)
        try:
            return not self.previous.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self.previous.settimeout(WAIT_S)


@pytest.fixture
def peer(request):
    peer = RawPeer(**getattr(request, "param", {}))
    yield peer
    peer.close()


def start(peer: RawPeer, members_length: int = 4000):
    pool = ThreadPoolExecutor(1)
    future = pool.submit(peer.plane.all_reduce, 1, 0, torch.ones(members_length), torch.zeros(members_length))
    pool.shutdown(wait=False)
    return future


@pytest.mark.parametrize("peer", [{"group": 64}], indirect=True)
def test_chunks_in_shared_memory_are_bounded_by_slots_and_credits(peer):
    future = start(peer)
    handle = read_offer(peer.receive(offer_size(peer.receive(OFFER_HEAD_BYTES))))
    assert handle is not None and handle.nbytes == CHUNK * SMALL["slots"]
    opened = SimulatedDevice()
    memory = opened.open(handle)
    assert memory is not None
    peer.next.sendall(offer(None))
    peer.previous.sendall(to_previous(ANSWER, 1))
    for number in range(SMALL["slots"]):
        header, _ = unpack(peer.receive(HEADER_BYTES))
        assert (header.sequence, header.kind, header.size) == (number, DEVICE_REDUCE, CHUNK)
        assert (memory[number * CHUNK : (number + 1) * CHUNK].view(torch.float32) == 1).all()
    assert peer.silent()
    for credit in (1, 2):
        peer.previous.sendall(to_previous(CREDIT, credit))
        for _ in range(credit):
            peer.receive(HEADER_BYTES)
        assert peer.silent()
    peer.plane.abort(1, "enough")
    with pytest.raises(RoundAborted, match="enough"):
        future.result(WAIT_S)
    opened.close()


def test_a_member_that_cannot_open_the_memory_gets_bytes(peer):
    future = start(peer)
    peer.receive(offer_size(peer.receive(OFFER_HEAD_BYTES)))
    peer.next.sendall(offer(None))
    peer.previous.sendall(to_previous(ANSWER, 0))
    header, payload_digest = unpack(peer.receive(HEADER_BYTES))
    payload = peer.receive(header.size)
    assert payload_digest == FOLLOWS and peer.receive(DIGEST_BYTES) == digest(payload)
    assert (torch.frombuffer(bytearray(payload), dtype=torch.float32) == 1).all()
    peer.plane.abort(1, "enough")
    with pytest.raises(RoundAborted):
        future.result(WAIT_S)


def chunk(sequence: int = 0, size: int = CHUNK, **changes) -> ChunkHeader:
    spec = ExchangeSpec(epoch=1, step=0, exchange=0, world=2, dtype=1, length=4000)
    return ChunkHeader(msgspec.structs.replace(spec, **changes), DEVICE_REDUCE, 1, sequence, size)


TCP = pytest.mark.parametrize("peer", [{"shares": False}], indirect=True)


@TCP
@pytest.mark.parametrize(
    ("sent", "sentence"),
    [
        (chunk(length=5000), "the replicas' models differ"),
        (chunk(dtype=2), "the replicas' models differ"),
        (chunk(operation=3), "the replicas' models differ"),
        (chunk(epoch=2), "epoch 2, we are in exchange 0 of step 0 of epoch 1"),
        (chunk(step=7), "step 7"),
        (chunk(size=CHUNK * 2), "chunk sizes or rings differ"),
        (chunk(size=2**32 - 1), "chunk sizes or rings differ"),
        (chunk(sequence=1), "chunk sizes or rings differ"),
        (chunk(world=3), "chunk sizes or rings differ"),
    ],
)
def test_bytes_for_another_exchange_are_not_summed(peer, sent, sentence):
    future = start(peer)
    peer.next.sendall(pack(sent))
    with pytest.raises(RoundAborted, match=sentence) as aborted:
        future.result(WAIT_S)
    assert aborted.value.about == "m1"
    assert aborted.value.mismatch == ("differ" in sentence)
    while (notice := take_back(back := bytearray(peer.next.recv(4096)))) is None:
        assert back
    assert sentence in notice[0] and notice[1] == "m1"


@TCP
def test_corrupted_bytes_and_foreign_bytes_are_noticed(peer):
    future = start(peer)
    peer.next.sendall(pack(chunk(), FOLLOWS) + bytes(CHUNK - 1) + b"\1" + digest(bytes(CHUNK)))
    with pytest.raises(RoundAborted, match="chunk 0 does not match its digest"):
        future.result(WAIT_S)
    peer.close()
    other = RawPeer(shares=False)
    future = start(other)
    other.next.sendall(b"FTR1" + bytes(200))
    with pytest.raises(RoundAborted, match="no chunk header"):
        future.result(WAIT_S)
    other.close()


@pytest.mark.parametrize("peer", [{"shares": False, "exchange_s": 0.2}], indirect=True)
def test_a_silent_neighbour_is_named_after_the_bound(peer):
    future = start(peer)
    # In a ring of two the first chunk proves that both members have entered the exchange.
    peer.next.sendall(pack(chunk(), FOLLOWS) + bytes(CHUNK) + digest(bytes(CHUNK)))
    with pytest.raises(RoundAborted, match="m1 stalled") as aborted:
        future.result(WAIT_S)
    assert aborted.value.about == "m1"


@TCP
def test_a_device_that_is_stuck_is_no_neighbours_fault(peer):
    peer.plane.set_bounds(entry_s=0.2)
    peer.device.pause()
    with pytest.raises(RoundAborted, match="this member's own device did not end") as aborted:
        start(peer).result(WAIT_S)
    assert aborted.value.about == ""


@TCP
def test_a_device_that_is_lost_ends_the_exchange_and_the_neighbour_hears_why(peer):
    peer.device.pause()
    future = start(peer)
    peer.device.fail(RuntimeError("an illegal memory access was encountered"))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        future.result(WAIT_S)
    notice = take_back(bytearray(peer.next.recv(4096)))
    assert notice is not None and "an illegal memory access" in notice[0]


@pytest.mark.parametrize("form", FORMS)
def test_a_lost_link_names_the_peer(form):
    peer = RawPeer(**FORMS[form])
    future = start(peer)
    for sock in peer.sockets:
        sock.close()
    with pytest.raises(RoundAborted, match="lost") as aborted:
        future.result(WAIT_S)
    assert aborted.value.about == "m1"
    peer.close()


@TCP
def test_misuse_is_refused_before_a_byte_is_sent(peer):
    plane, x = peer.plane, torch.ones(65)[:64]
    for arguments, sentence in [
        ((torch.ones(4, 4),), "flat contiguous"),
        ((torch.ones(64, dtype=torch.complex64),), "cannot be reduced"),
        ((x, torch.ones(63)), "they must agree"),
        ((x, x.as_strided((64,), (1,), 1)), "lies in a part of the gradient"),
        ((x.int(), torch.zeros(64, dtype=torch.int32), Reduction("mean", 2.0)), "have no mean"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            plane.all_reduce(1, 0, *arguments)
    with pytest.raises(IllegalTransition, match="no links yet"):
        plane.all_reduce(7, 0, x, torch.zeros(64))
    with pytest.raises(IllegalTransition, match="has its links already"):
        plane.install(Ring(1, 0, names(2)), *socket_ring(2)[0])
    with pytest.raises(IllegalTransition, match="needs two links"):
        plane.install(Ring(9, 0, names(2)), None, None)
    with pytest.raises(ConfigError, match="positive, finite"):
        plane.set_bounds(exchange_s=0)
    with pytest.raises(ConfigError, match="at least two slots"):
        DeviceRing(peer.device, slots=1)
    plane.retire(2)
    with pytest.raises(RoundAborted, match="epoch 1 is over"):
        plane.all_reduce(1, 0, x, torch.zeros(64))


# --- processes ---------------------------------------------------------------------------------------

WORLD, VICTIM, SURVIVORS = 3, 1, [0, 2]


def fork_victim(pairs, pieces: int, signal_number: int, **options) -> int:
    """Fork a victim that signals itself after this many pieces; return its pid."""
    pid = os.fork()
    if pid:
        for sock in sockets_of(pairs[VICTIM]):
            sock.close()
        return pid
    try:
        count = 0

        def on_piece(_step: int) -> None:
            nonlocal count
            count += 1
            if count == pieces:
                os.kill(os.getpid(), signal_number)

        for i in SURVIVORS:
            for sock in sockets_of(pairs[i]):
                sock.close()
        plane = DeviceRing(SimulatedDevice(), **SMALL, **options, on_piece=on_piece)
        plane.install(Ring(1, VICTIM, names(WORLD)), *pairs[VICTIM])
        # numpy fills the tensor, because torch's thread pool does not survive a fork.
        source = torch.from_numpy(np.full(1000, 2.0, dtype=np.float32))
        plane.all_reduce(1, 0, source, torch.from_numpy(np.zeros(1000, dtype=np.float32)))
    except BaseException:  # noqa: BLE001 - a fork must never return into the test runner
        traceback.print_exc()
    finally:
        os._exit(1)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("pieces", [1, 2, 7, 20])
def test_survivors_of_a_kill_go_on(pieces, form):
    pairs = socket_ring(WORLD, "shm", FORMS[form].get("connections", 1))
    pid = fork_victim(pairs, pieces, signal.SIGKILL, **FORMS[form])
    try:
        with DeviceMembers(WORLD, who=SURVIVORS, **FORMS[form]) as members:
            members.install(1, pairs)
            sources = {i: torch.full((1000,), float(i + 1)) for i in SURVIVORS}
            futures = [members.submit(i, 1, 0, sources[i], torch.zeros(1000)) for i in SURVIVORS]
            for future in futures:
                with pytest.raises(RoundAborted) as aborted:
                    future.result(WAIT_S)
                assert aborted.value.about == f"m{VICTIM}"
            assert all((sources[i] == i + 1).all() for i in SURVIVORS)
            go_on(members, 2, SURVIVORS)
    finally:
        _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("form", FORMS)
def test_a_stopped_member_holds_up_no_member_that_aborts(form):
    pairs = socket_ring(WORLD, "shm", FORMS[form].get("connections", 1))
    pid = fork_victim(pairs, 3, signal.SIGSTOP, **FORMS[form])
    try:
        with DeviceMembers(WORLD, who=SURVIVORS, **FORMS[form]) as members:
            members.install(1, pairs)
            futures = [members.submit(i, 1, 0, torch.ones(1000), torch.zeros(1000)) for i in SURVIVORS]
            _, status = os.waitpid(pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            for i in SURVIVORS:
                members.planes[i].abort(1, "m1 does not answer", about="m1")
            for future in futures:
                with pytest.raises(RoundAborted, match="m1 does not answer"):
                    future.result(WAIT_S)
            go_on(members, 2, SURVIVORS)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
