"""The echo over a link between replicas: round trips and one transfer, bounded in time and in bytes.

The replica that measures connects to its peer, so the bytes take the way of the ring's links, which carry
nothing at a step boundary. The peer answers with the number of bytes that it has read so far. The connection
ends with the echo.

A probe from outside the roster is simpler: a message of LARGE_BYTES goes there and another one comes back.
"""

import asyncio
import os
import select
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import CancelledError, Future
from contextlib import asynccontextmanager, suppress

from fabric.errors import FabricError, ProtocolError
from fabric.model import SpeedMeasurement
from fabric.protocol.messages.network import LARGE_BYTES
from fabric.runtime.system_calls import network_interfaces, speeds_of

CONNECT_S = 0.5  # seconds for the connection and its greeting
ECHO_S = 0.5  # seconds for the round trips and the transfer together
ANSWER_S = 2 * ECHO_S  # after this time the peer ends the connection
_TRIPS, _TRIPS_S = 8, 0.1  # the most round trips, and the seconds after which no other one follows
_TRANSFER_S = 0.2
_MOST_BYTES = 64 * 2**20
_PIECE = memoryview(bytes(2**18))
# The most connections that one process echoes at a time; each has a buffer of the size of _PIECE.
MOST_ECHOES = 16
_echoed: set[socket.socket] = set()
# The most probes that one process answers at a time. Another one ends at once, and counts as answered.
MOST_PROBES = 256
_probed: set[socket.socket] = set()
_COUNT = struct.Struct(">Q")
PROBE_S = 3.0  # seconds for the two large messages of a probe
_LARGE = os.urandom(LARGE_BYTES)


def run_echo(
    number: int, dialled: "Future[socket.socket]", on_connected: Callable[[], None]
) -> SpeedMeasurement:
    """Wait for the connection and measure it, for at most 2 * CONNECT_S + ECHO_S together.

    An echo that fails has the time 0.
    """
    try:
        with dialled.result(2 * CONNECT_S) as sock:
            on_connected()
            return measure_echo(number, sock)
    except (FabricError, OSError, EOFError, CancelledError):  # TimeoutError is an OSError
        dialled.cancel()
        return SpeedMeasurement(number)


def measure_echo(number: int, sock: socket.socket) -> SpeedMeasurement:
    """Measure the link behind ``sock``, a connection whose other end runs ``answer_echo``.

    Raises OSError or EOFError if the connection ends, TimeoutError without an answer within ECHO_S,
    ProtocolError for an answer that cannot be true.
    """
    echo = _Echo(sock, time.monotonic() + ECHO_S)
    round_trip_s = echo.least_round_trip_s()
    bytes_per_s = echo.transfer(round_trip_s)
    # Name the interface over which ``sock`` sends, and a faster one of this host; empty: not known.
    interface, faster = speeds_of(sock.getsockname()[:1], network_interfaces())
    if faster:
        interface += f" ({faster.name} at {faster.address} has {faster.mbit_s} Mbit/s)"
    return SpeedMeasurement(number, round_trip_s=round_trip_s, bytes_per_s=bytes_per_s, interface=interface)


async def answer_echo(sock: socket.socket) -> None:
    """Tell the other end how many bytes have come, after each read, until its end or ANSWER_S."""
    async with _one_of(_echoed, MOST_ECHOES, sock, ANSWER_S) as may_begin:
        loop, buffer, total = asyncio.get_running_loop(), bytearray(len(_PIECE)), 0
        while may_begin and (count := await loop.sock_recv_into(sock, buffer)):
            total += count
            await loop.sock_sendall(sock, _COUNT.pack(total))


@asynccontextmanager
async def _one_of(
    under_way: set[socket.socket], most: int, sock: socket.socket, within_s: float
) -> AsyncIterator[bool]:
    """Close ``sock`` at the end or after ``within_s``; yield whether fewer than ``most`` are under way."""
    with sock, suppress(OSError):  # TimeoutError is an OSError
        may_begin = len(under_way) < most
        if may_begin:
            under_way.add(sock)
        try:
            async with asyncio.timeout(within_s):
                yield may_begin
        finally:
            under_way.discard(sock)


async def carries_large_messages(sock: socket.socket) -> bool:
    """Whether large packets pass in both directions, by an exchange with ``answer_probe``.

    A peer of the version before closes the connection at once: it counts as one that they reach.
    """
    try:
        async with asyncio.timeout(PROBE_S):
            await asyncio.get_running_loop().sock_sendall(sock, _LARGE)
            await _read_large(sock)
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


async def answer_probe(sock: socket.socket) -> None:
    """Read one large message and send one, within PROBE_S."""
    async with _one_of(_probed, MOST_PROBES, sock, PROBE_S) as may_begin:
        if may_begin and await _read_large(sock):
            await asyncio.get_running_loop().sock_sendall(sock, _LARGE)


async def _read_large(sock: socket.socket) -> bool:
    """Read LARGE_BYTES; return whether they came before the end of the connection."""
    left = LARGE_BYTES
    while left and (data := await asyncio.get_running_loop().sock_recv(sock, left)):
        left -= len(data)
    return not left


class _Echo:
    """The measuring end; ``deadline`` bounds all of it, on the monotonic clock."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._deadline = deadline
        self._poll = select.poll()
        self._answers = bytearray()
        self._sent = 0  # bytes
        self._counted, self._counted_at = 0, 0.0  # bytes that the peer has read, and when it said so

    def least_round_trip_s(self) -> float:
        """Return the shortest of a few round trips: other work of a process makes some of them longer."""
        trips: list[float] = []
        while len(trips) < _TRIPS and sum(trips) < _TRIPS_S:
            began = time.monotonic()
            self._sent += self._sock.send(_PIECE[:1])
            while self._counted < self._sent:
                if not self._wait(select.POLLIN, self._deadline):
                    raise TimeoutError("the peer has not answered in time")
            trips.append(time.monotonic() - began)
        return min(trips)

    def transfer(self, round_trip_s: float) -> float:
        """Return the bytes per second that the peer has read; 0 where it has read none in time."""
        before, began = self._counted, time.monotonic()
        until = min(began + _TRANSFER_S + round_trip_s, self._deadline)
        last = self._sent + _MOST_BYTES
        while self._counted < last:
            events = select.POLLIN | (select.POLLOUT if self._sent < last else 0)
            if not self._wait(events, until):
                break
        counted = self._counted - before
        return counted / max(self._counted_at - began, 1e-6) if counted else 0.0

    def _wait(self, events: int, until: float) -> bool:
        """Wait for these events and send or read; return False after ``until``."""
        left_s = until - time.monotonic()
        self._poll.register(self._sock, events)
        ready = self._poll.poll(left_s * 1000) if left_s > 0 else []
        if not ready:
            return False
        if ready[0][1] & select.POLLOUT:
            with suppress(BlockingIOError):
                self._sent += self._sock.send(_PIECE)
        if ready[0][1] & ~select.POLLOUT:
            self._read()
        return True

    def _read(self) -> None:
        data = self._sock.recv(len(_PIECE))
        if not data:
            raise EOFError("the peer has ended the echo")
        self._answers += data
        end = len(self._answers) - len(self._answers) % _COUNT.size
        if end:
            (counted,) = _COUNT.unpack_from(self._answers, end - _COUNT.size)
            if not self._counted <= counted <= self._sent:
                raise ProtocolError(f"the peer says that it has read {counted} bytes of {self._sent}")
            self._counted, self._counted_at = counted, time.monotonic()
            del self._answers[:end]
