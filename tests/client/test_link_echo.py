"""The echo between replicas over real sockets: its figures, and peers that die, stop or lie in the middle."""

import asyncio
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

import pytest
from client.test_peers import Party, of

from fabric.client.control import link_echo
from fabric.client.control.link_echo import ECHO_S, answer_echo, measure_echo, run_echo
from fabric.errors import FabricError, ProtocolError, Unconnected
from fabric.model import SpeedMeasurement
from fabric.runtime.system_calls import NetworkInterface


class Peer:
    """The other end of an echo, whose ``behaviour`` runs in a thread of its own."""

    def __init__(self, behaviour: Callable[[socket.socket], None]) -> None:
        self.near, self._far = socket.socketpair()
        self._thread = threading.Thread(target=behaviour, args=(self._far,), daemon=True)

    def __enter__(self) -> socket.socket:
        self._thread.start()
        return self.near

    def __exit__(self, *_: object) -> None:
        self.near.close()
        self._far.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=10)
        self._far.close()


def counts(sock: socket.socket, most: int, per_read_s: float = 0.0) -> None:
    """Answer until ``most`` bytes have come, then read nothing more."""
    total = 0
    with suppress(OSError):  # the measuring end has ended the connection
        while total < most and (data := sock.recv(4096)):
            total += len(data)
            time.sleep(per_read_s)  # the slow link
            sock.sendall(struct.pack(">Q", total))


def test_a_living_peer_gives_a_round_trip_and_a_rate():
    with Peer(lambda sock: counts(sock, 2**60)) as sock:
        result = measure_echo(7, sock)
    assert result.number == 7 and 0 < result.round_trip_s < ECHO_S and result.bytes_per_s > 1e5
    assert (result.product_s, result.copy_s) == (0.0, 0.0)


def test_an_echo_says_over_which_interface_it_left_and_which_one_is_faster(monkeypatch):
    interfaces = [NetworkInterface("lo", "127.0.0.1", 1000), NetworkInterface("eth1", "10.8.0.1", 25000)]
    monkeypatch.setattr(link_echo, "network_interfaces", lambda: interfaces)
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far, _ = server.accept()
    answering = threading.Thread(target=counts, args=(far, 2**60), daemon=True)
    answering.start()
    with far:
        with near:
            result = measure_echo(7, near)
        answering.join()
    assert result.interface == "lo with 1000 Mbit/s (eth1 at 10.8.0.1 has 25000 Mbit/s)"


def test_a_slow_link_shows_in_both_figures():
    with Peer(lambda sock: counts(sock, 2**60, per_read_s=0.02)) as sock:
        result = measure_echo(7, sock)
    assert result.round_trip_s >= 0.02 and 0 < result.bytes_per_s <= 4096 / 0.02


def test_a_peer_that_stops_before_its_first_answer_ends_the_echo_in_time():
    with Peer(lambda _: None) as sock, pytest.raises(TimeoutError):
        measure_echo(7, sock)


def test_a_peer_that_stops_in_the_transfer_ends_it_in_time():
    with Peer(lambda sock: counts(sock, 8)) as sock:
        result = measure_echo(7, sock)
    assert result.round_trip_s > 0 and result.bytes_per_s == 0.0


@pytest.mark.parametrize("after", [0, 1, 100_000])
def test_a_peer_that_dies_ends_the_echo(after):
    def dies(sock: socket.socket) -> None:
        counts(sock, after)
        sock.shutdown(socket.SHUT_RDWR)

    with Peer(dies) as sock, pytest.raises((OSError, EOFError)):
        measure_echo(7, sock)


@pytest.mark.parametrize("said", [2**63, 0])
def test_a_count_that_cannot_be_true_is_refused(said):
    def lies(sock: socket.socket) -> None:
        for count in (1, said):
            sock.recv(1)
            sock.sendall(struct.pack(">Q", count))

    with Peer(lies) as sock, pytest.raises(ProtocolError, match="has read"):
        measure_echo(7, sock)


async def test_the_answering_end_counts_what_it_reads_and_ends_with_the_connection():
    near, far = socket.socketpair()
    far.setblocking(False)
    with near:
        answering = asyncio.create_task(answer_echo(far))
        result = await asyncio.to_thread(measure_echo, 7, near)
    await asyncio.wait_for(answering, 10)
    assert result.round_trip_s > 0 and result.bytes_per_s > 1e6 and far.fileno() == -1


async def test_the_answering_end_drops_a_silent_peer(monkeypatch):
    monkeypatch.setattr(link_echo, "ANSWER_S", 0.1)
    near, far = socket.socketpair()
    far.setblocking(False)
    with near:
        await asyncio.wait_for(answer_echo(far), 10)
    assert far.fileno() == -1


# --- between two processes' links -------------------------------------------------------------------------


async def linked(a: Party, b: Party) -> None:
    record = of(a.member, b.member)
    for party in (a, b):
        party.peers.link_up(record)
    for party in (a, b):
        await party.event()


async def test_a_member_of_the_epoch_echoes_and_its_links_stay_as_they_are():
    async with Party("a") as a, Party("b") as b:
        await linked(a, b)
        for one, other in ((a, "b"), (b, "a")):
            with await one.peers.dial_echo(other) as sock:
                result = await asyncio.to_thread(measure_echo, 7, sock)
            assert result.round_trip_s > 0 and result.bytes_per_s > 0
        assert (a.peers.linked, b.peers.linked) == (["b"], ["a"])
        assert a.events.empty() and b.events.empty()


async def test_a_replica_that_is_no_member_is_not_echoed():
    async with Party("a") as a, Party("b") as b:
        await linked(a, b)
        with pytest.raises(Unconnected, match="c has left the job"):
            await a.peers.dial_echo("c")


async def test_a_peer_that_accepts_and_never_greets_is_given_up_in_time(monkeypatch):
    monkeypatch.setattr(link_echo, "CONNECT_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        async with Party("a") as a, Party("b") as b:
            await linked(a, b)
            (linking,) = a.peers._epochs.values()
            mute_member = type(b.member)("b", 1, f"127.0.0.1:{mute.getsockname()[1]}", "")
            linking.record = of(a.member, mute_member)
            with pytest.raises(FabricError):
                await asyncio.wait_for(a.peers.dial_echo("b"), 10)


def failing(number: int, dialled: Future) -> SpeedMeasurement:
    def connected() -> None:
        raise AssertionError("there is no connection")

    return run_echo(number, dialled, connected)


def test_an_echo_without_a_connection_has_the_time_0():
    dialled: Future = Future()
    dialled.set_exception(Unconnected("b cannot be reached"))
    assert failing(7, dialled) == SpeedMeasurement(7)


def test_an_echo_whose_connection_never_comes_is_cancelled(monkeypatch):
    monkeypatch.setattr(link_echo, "CONNECT_S", 0.01)
    dialled: Future = Future()
    assert failing(7, dialled) == SpeedMeasurement(7) and dialled.cancelled()


def test_an_echo_in_a_process_that_ends_has_the_time_0():
    dialled: Future = Future()
    dialled.cancel()
    assert failing(7, dialled) == SpeedMeasurement(7)


def test_an_echo_whose_peer_dies_after_the_connection_has_the_time_0_and_leaves_no_socket():
    near, far = socket.socketpair()
    dialled: Future = Future()
    dialled.set_result(near)
    assert run_echo(7, dialled, far.close) == SpeedMeasurement(7) and near.fileno() == -1
