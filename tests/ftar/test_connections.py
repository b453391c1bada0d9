"""Links of several connections: their faults at every point, unequal numbers, threads and descriptors."""

import os
import socket
import threading
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from device_harness import SMALL, DeviceMembers
from hypothesis import given
from hypothesis import strategies as st
from ring_harness import (
    WAIT_S,
    names,
    random_tensor,
    same_bits,
    socket_ring,
    sockets_of,
    tcp_pair,
    wait_until,
)
from test_device_faults import CHUNK, RawPeer, chunk, go_on, start
from test_device_ring import documented

from fabric.errors import RoundAborted
from fabric.ftar.chunk_headers import FOLLOWS, HEADER_BYTES, pack, unpack
from fabric.ftar.device import connections
from fabric.ftar.device.connections import connections_for, part_of
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.host.piece_moves import DIGEST_BYTES, Inlet, Outlet, digest
from fabric.ftar.plane import Ring
from fabric.ftar.reduce_ops import Reduction

FOUR = {"shares": False, "connections": 4}
PART = CHUNK // 4


@pytest.fixture(autouse=True)
def small_parts(monkeypatch):
    monkeypatch.setattr(connections, "PART_BYTES", 64)


@given(st.integers(1, 2**31), st.integers(1, 16))
def test_the_parts_of_a_piece_are_the_piece(size, count):
    parts = [part_of(size, number, count) for number in range(count)]
    assert parts[0].start == 0 and parts[-1].stop == size and parts[0]
    assert all(one.stop == two.start for one, two in pairwise(parts))
    assert all(part.start % 64 == 0 for part in parts if part)


def test_a_small_host_has_one_connection_and_a_large_one_a_few():
    assert [connections_for(cores) for cores in (0, 1, 2, 7, 8, 12, 16, 192)] == [1, 1, 1, 1, 4, 6, 8, 8]


@pytest.mark.parametrize("kind", ["tcp", "shm"])
def test_neighbours_may_have_any_number_of_connections(kind):
    """The sums are those of one connection, whatever each link has."""
    numbers = [1, 4, 2]
    with DeviceMembers(3, shares=False) as members:
        rings = [socket_ring(3, kind) for _ in range(max(numbers))]
        links = []
        for i in range(3):
            further_next = [ring[i][0] for ring in rings[1 : numbers[i]]]
            further_previous = [ring[i][1] for ring in rings[1 : numbers[i - 1]]]
            links.append((*rings[0][i], further_next, further_previous))
        for number, ring in enumerate(rings):
            for i in range(3):
                for sock in (ring[i][0], ring[(i + 1) % 3][1]) if number >= numbers[i] else ():
                    sock.close()
        members.install(1, links)
        for step, length in enumerate([1, 63, 1000, 4099]):
            inputs = [random_tensor(length, torch.float32, seed) for seed in range(3)]
            expected = documented(inputs, Reduction())
            for result in members.reduce(1, step, inputs).values():
                assert same_bits(result, expected)


@pytest.mark.parametrize("pieces", [1, 2, 5, 11])
@pytest.mark.parametrize("number", range(4))
@pytest.mark.parametrize("side", ["next", "previous"])
def test_a_connection_that_dies_aborts_the_exchange_with_a_neighbours_name(side, number, pieces):
    links = socket_ring(3, "tcp", 4)
    next_, previous, further_next, further_previous = links[1]
    victim = {"next": [next_, *further_next], "previous": [previous, *further_previous]}[side][number]
    count = 0

    def on_piece(_step: int) -> None:
        nonlocal count
        count += 1
        if count == pieces:
            victim.shutdown(socket.SHUT_RDWR)

    with DeviceMembers(3, **FOUR) as members:
        members.planes[1]._on_piece = on_piece
        members.install(1, links)
        sources = [torch.full((1000,), float(i + 1)) for i in range(3)]
        futures = [members.submit(i, 1, 0, sources[i], torch.zeros(1000)) for i in range(3)]
        ends = {"m1", "m2" if side == "next" else "m0"}
        for future in futures:
            with pytest.raises(RoundAborted, match="lost") as aborted:
                future.result(WAIT_S)
            assert aborted.value.about in ends
        assert all((sources[i] == i + 1).all() for i in range(3))
        go_on(members, 2, [0, 1, 2])


@pytest.fixture
def peer(request):
    peer = RawPeer(**FOUR, **getattr(request, "param", {}))
    yield peer
    peer.close()


def send_part(peer: RawPeer, number: int, damage: bytes = b"") -> None:
    """Send part ``number`` of piece 0, of zeros."""
    sock = [peer.next, *peer.further[:3]][number]
    header = pack(chunk(sequence=number, size=PART), FOLLOWS)
    sock.sendall(header + bytes(PART - len(damage)) + damage + digest(bytes(PART)))


def test_a_piece_is_cut_over_the_connections(peer):
    future = start(peer)
    for number, sock in enumerate([peer.previous, *peer.further[3:]]):
        data = b""
        while len(data) < HEADER_BYTES + PART + DIGEST_BYTES:
            data += sock.recv(HEADER_BYTES + PART + DIGEST_BYTES - len(data))
        header, payload_digest = unpack(data[:HEADER_BYTES])
        assert (header.sequence, header.size, payload_digest) == (number, PART, FOLLOWS)
        assert digest(data[HEADER_BYTES:-DIGEST_BYTES]) == data[-DIGEST_BYTES:]
    peer.plane.abort(1, "enough")
    with pytest.raises(RoundAborted, match="enough"):
        future.result(WAIT_S)


@pytest.mark.parametrize("peer", [{"exchange_s": 0.2}], indirect=True)
@pytest.mark.parametrize("silent", range(4))
def test_one_silent_connection_stalls_the_exchange_and_its_neighbour_is_named(peer, silent):
    peer.plane.set_bounds(entry_s=0.2)
    future = start(peer)
    for number in range(4):
        if number != silent:
            send_part(peer, number)
    with pytest.raises(RoundAborted, match="m1 stalled") as aborted:
        future.result(WAIT_S)
    assert aborted.value.about == "m1"


@pytest.mark.parametrize("number", range(4))
def test_corrupted_bytes_are_noticed_on_every_connection(peer, number):
    future = start(peer)
    send_part(peer, number, damage=b"\1")
    with pytest.raises(RoundAborted, match=f"chunk {number} does not match its digest") as aborted:
        future.result(WAIT_S)
    assert aborted.value.about == "m1"


def test_a_part_on_another_connection_is_not_used(peer):
    future = start(peer)
    peer.further[0].sendall(pack(chunk(sequence=2, size=PART), FOLLOWS))
    with pytest.raises(RoundAborted, match="chunk sizes or rings differ"):
        future.result(WAIT_S)


def test_bytes_on_the_way_back_of_a_further_connection_are_garbage(peer):
    future = start(peer)
    wait_until(lambda: peer.plane.waiting_for)
    peer.further[3].sendall(b"x")
    with pytest.raises(RoundAborted, match="m1 answered on a connection that only takes pieces") as aborted:
        future.result(WAIT_S)
    assert aborted.value.about == "m1"


@pytest.mark.parametrize("number", range(3))
def test_the_end_of_an_idle_connection_is_noticed(peer, number):
    """The plane has sent all that it may, and no bytes are awaited on this connection."""
    future = start(peer, 8)
    wait_until(lambda: peer.plane.waiting_for)
    peer.further[3 + number].close()
    with pytest.raises(RoundAborted, match="lost") as aborted:
        future.result(WAIT_S)
    assert aborted.value.about == "m1"


def threads() -> int:
    return sum(thread.name == "fabric-connection" for thread in threading.enumerate())


def test_no_thread_and_no_descriptor_is_left():
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    wait_until(lambda: not threads())
    before = descriptors()
    with DeviceMembers(2, **FOUR) as members:
        for epoch in range(1, 6):
            members.install(epoch, socket_ring(2, "tcp", 4))
            for step in range(3):
                members.reduce(epoch, step, [torch.ones(500), torch.ones(500)])
            future = members.submit(0, epoch, 3, torch.ones(500), torch.zeros(500))
            wait_until(lambda: members.planes[0].waiting_for)
            members.planes[0].abort(epoch, "enough")
            with pytest.raises(RoundAborted, match="enough"):
                future.result(WAIT_S)
            for plane in members.planes.values():
                plane.retire(epoch + 1)
        assert threads() == 16
    wait_until(lambda: not threads() and descriptors() <= before)


def test_links_that_are_never_used_are_closed():
    links = socket_ring(2, "tcp", 4)
    with DeviceMembers(2, **FOUR) as members:
        members.install(1, links)
        members.planes[0].install(Ring(2, 0, names(2)), *(again := socket_ring(2, "tcp", 4))[0])
        members.planes[0].retire(3)
        assert all(sock.fileno() == -1 for sock in sockets_of(again[0]))
        for sock in sockets_of(again[1]):
            sock.close()
    assert all(sock.fileno() == -1 for end in links for sock in sockets_of(end))


def test_a_thread_moves_a_whole_piece_and_stops_at_a_descriptor():
    near, far = tcp_pair()
    stop = os.eventfd(0, os.EFD_NONBLOCK)
    payload = memoryview(bytearray(os.urandom(1 << 24)))  # more than the socket's buffers take
    came = memoryview(bytearray(len(payload)))
    with near, far:
        near.setblocking(False)
        far.setblocking(False)
        outlet, inlet = Outlet(near.fileno()), Inlet(far.fileno(), bytearray(256), 3, 0, 0.0)
        outlet.begin(b"", payload, True, True)
        inlet.begin(len(came), None, came, 3, 3, False, True)
        sent: list[int] = []
        sender = threading.Thread(target=lambda: sent.append(outlet.pump(stop)))
        sender.start()
        assert inlet.pump(stop) == len(payload) + DIGEST_BYTES
        sender.join()
        assert sent == [len(payload) + DIGEST_BYTES]
        assert inlet.finish() == digest(payload) and came == payload
        assert inlet.moved_s() > 0 and outlet.moved_s() > 0
        inlet.begin(len(came), None, came, 3, 3, False, True)
        caught: list[BaseException] = []

        def receive() -> None:
            try:
                inlet.pump(stop)
            except BlockingIOError as error:
                caught.append(error)

        receiver = threading.Thread(target=receive)
        receiver.start()
        os.eventfd_write(stop, 1)
        receiver.join()
        assert len(caught) == 1
    os.close(stop)


@pytest.mark.parametrize("peer", [{"group": 64}], indirect=True)
def test_slots_bound_the_pieces_that_are_received(peer, monkeypatch):
    """A member that cannot copy takes no more than its slots from the link."""
    made: list[connections.Connections] = []
    init = connections.Connections.__init__
    monkeypatch.setattr(
        connections.Connections, "__init__", lambda self, *given: init(self, *given) or made.append(self)
    )
    peer.device.pause()
    future = start(peer)
    for piece in range(SMALL["slots"] + 1):
        for number, sock in enumerate([peer.next, *peer.further[:3]]):
            header = pack(chunk(sequence=4 * piece + number, size=PART), FOLLOWS)
            sock.sendall(header + bytes(PART) + digest(bytes(PART)))
    wait_until(lambda: made and made[0].complete == SMALL["slots"] and peer.device.is_asked)
    assert made[0]._allowed == SMALL["slots"]
    peer.plane.abort(1, "enough")
    with pytest.raises(RoundAborted, match="enough"):
        future.result(WAIT_S)


def test_a_ring_in_host_memory_closes_the_connections_that_it_does_not_use():
    links = socket_ring(2, "tcp", 3)
    plane = CpuRing(shared_memory=False)
    plane.install(Ring(1, 0, names(2)), *links[0])
    assert [sock.fileno() == -1 for sock in sockets_of(links[0])] == [False, False, True, True, True, True]
    plane.close()
    for sock in sockets_of(links[1]):
        sock.close()


def test_a_plane_that_closes_in_an_exchange_ends_its_threads():
    wait_until(lambda: not threads())
    with DeviceMembers(2, **FOUR) as members:
        members.install(1, socket_ring(2, "tcp", 4))
        future = members.submit(0, 1, 0, torch.ones(500), torch.zeros(500))
        wait_until(lambda: members.planes[0].waiting_for)
        members.planes[0].close()
        with pytest.raises(RoundAborted, match="this process closed its data plane"):
            future.result(WAIT_S)
        wait_until(lambda: not threads())
