"""The connections of one TCP link: each carries its part of every piece, with a thread of its own.

One connection with one thread cannot fill a fast network. So a link to a neighbour may have several. A piece
is cut into a part for each connection. The cuts depend on the size of the piece and the number of connections
alone, so both ends agree about them. Sums, and the order of pieces, are the same with any number.

The compiled ``piece_moves`` moves and digests a part without the interpreter's lock. The thread of the
exchange says how many pieces may move (``allow``), and uses those that have moved (``complete``).
"""

import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch

from fabric.errors import ProtocolError
from fabric.ftar.chunk_headers import FOLLOWS, HEADER_BYTES, ChunkHeader, check_expected, pack, unpack
from fabric.ftar.host.piece_moves import DIGEST_BYTES, Inlet, Outlet
from fabric.ftar.ring_schedule import DTYPE_CODES

# With four connections loopback moved 9.2 GB/s, with eight 9.5, on 16 cores (2026-11-27).
_MOST_CONNECTIONS = 8
_CORES_PER_CONNECTION = 2
_FEW_CORES = 8
# A smaller part costs more in calls than its connection gains.
PART_BYTES = 256 * 1024
_CUT_BYTES = 64  # a stripe of the digest
_INLET_SCRATCH_BYTES = 256
_TWO_BYTES = DTYPE_CODES[torch.float16]  # parts are even, and an inlet without own elements only keeps them


def connections_for(cores: int) -> int:
    """Return how many connections a process with ``cores`` processor cores gives to a link over TCP."""
    return 1 if cores < _FEW_CORES else min(_MOST_CONNECTIONS, cores // _CORES_PER_CONNECTION)


def part_of(size: int, number: int, count: int) -> range:
    """Return the bytes of a piece of ``size`` bytes on connection ``number`` of ``count``; maybe none."""
    each = max(PART_BYTES, -(-size // count))
    each = -(-each // _CUT_BYTES) * _CUT_BYTES
    return range(min(size, number * each), min(size, (number + 1) * each))


class MoverThreads:
    """Daemon threads for one direction of the links of a plane, started when they are first needed."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._count = 0
        self._lock = threading.Lock()

    def start(self, work: Sequence[Callable[[], None]]) -> None:
        """Run all of ``work`` at the same time; the work of earlier calls has ended."""
        with self._lock:
            while self._count < len(work):
                self._count += 1
                run = partial(_run_all, self._work)
                threading.Thread(target=run, name="fabric-connection", daemon=True).start()
            for task in work:
                self._work.put(task)

    def close(self) -> None:
        """End the threads, each after its work."""
        with self._lock:
            ended, self._work = self._work, queue.SimpleQueue()
            for _ in range(self._count):
                ended.put(None)
            self._count = 0


def _run_all(tasks: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (task := tasks.get()) is not None:
        task()


# Makes the header of a part from the numbers of its piece and its bytes.
HeaderOf = Callable[[int, int], ChunkHeader]


class PartSender:
    """Sends parts of pieces over one connection, with a digest behind each."""

    def __init__(self, sock: socket.socket, header: HeaderOf, slots: Sequence[memoryview]) -> None:
        self._header, self._slots = header, slots
        self._outlet = Outlet(sock.fileno())
        self.moved_s = self._outlet.moved_s

    def move(self, piece: int, part: range, stop: int) -> None:
        """Move one part. Raises BlockingIOError once the descriptor ``stop`` is readable, another OSError."""
        payload = self._slots[piece % len(self._slots)][part.start : part.stop]
        self._outlet.begin(pack(self._header(piece, len(part)), FOLLOWS), payload, True, True)
        left = HEADER_BYTES + len(part) + DIGEST_BYTES
        while left:
            left -= self._outlet.pump(stop)


class PartReceiver:
    """Receives and verifies parts of pieces from one connection."""

    def __init__(self, sock: socket.socket, header: HeaderOf, slots: Sequence[memoryview]) -> None:
        self._header, self._slots = header, slots
        scratch = bytearray(_INLET_SCRATCH_BYTES)
        self._inlet = Inlet(sock.fileno(), scratch, _TWO_BYTES, 0, 0.0)
        self._received_header = memoryview(bytearray(HEADER_BYTES))
        self.moved_s = self._inlet.moved_s

    def move(self, piece: int, part: range, stop: int) -> None:
        """Move one part. Raises as a sender does, and EOFError, ProtocolError."""
        self._receive(self._received_header, False, stop)
        header, payload_digest = unpack(self._received_header)
        check_expected(header, self._header(piece, len(part)))
        payload = self._slots[piece % len(self._slots)][part.start : part.stop]
        if self._receive(payload, payload_digest == FOLLOWS, stop) is None:
            raise ProtocolError(
                f"chunk {header.sequence} does not match its digest: bytes were corrupted on the way or "
                "in memory; if it repeats, check that host's memory and network"
            )

    def _receive(self, into: memoryview, digested: bool, stop: int) -> bytes | None:
        self._inlet.begin(len(into), None, into, _TWO_BYTES, _TWO_BYTES, False, digested)
        left = len(into) + DIGEST_BYTES * digested
        while left:
            left -= self._inlet.pump(stop)
        return self._inlet.finish()


class Connections:
    """One direction of a link in one exchange: pieces of ``sizes`` bytes, each in one part per mover.

    ``wake`` is called when a piece is complete, or a connection fails. ``close`` must end the use.
    """

    def __init__(
        self,
        movers: Sequence[PartSender | PartReceiver],
        sizes: Sequence[int],
        threads: MoverThreads,
        wake: Callable[[], None],
    ) -> None:
        self._movers, self._sizes, self._wake = movers, sizes, wake
        self._stop = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._turn = threading.Condition()
        used = [n for n in range(len(movers)) if any(part_of(x, n, len(movers)) for x in set(sizes))]
        self._moved = [0 if n in used else len(sizes) for n in range(len(movers))]
        self._running = len(used)
        self._allowed = 0
        self._stopped = False
        self._error: Exception | None = None
        self.complete = 0  # the number of pieces that have moved
        threads.start([partial(self._run, number) for number in used])

    def moved_s(self) -> float:
        """Return the monotonic time at which bytes moved last."""
        return max(mover.moved_s() for mover in self._movers)

    def allow(self, pieces: int) -> None:
        """Let the first ``pieces`` pieces move. Raises the error of a connection that has failed."""
        if self._error is not None:
            raise self._error
        if pieces > self._allowed:
            with self._turn:
                self._allowed = pieces
                self._turn.notify_all()

    def close(self) -> None:
        """End the work, and return when no thread uses the sockets and the memory any more."""
        os.eventfd_write(self._stop, 1)
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
            self._turn.wait_for(lambda: not self._running)
        os.close(self._stop)

    def _run(self, number: int) -> None:
        try:
            for piece, size in enumerate(self._sizes):
                part = part_of(size, number, len(self._movers))
                if part:
                    with self._turn:
                        while self._allowed <= piece and not self._stopped:
                            self._turn.wait()
                    if self._stopped:
                        return
                    self._movers[number].move(piece, part, self._stop)
                self._count(number, piece + 1)
        except BlockingIOError:
            pass  # the exchange has ended
        except (EOFError, OSError, ProtocolError, ValueError) as error:
            self._error = self._error or error
        finally:
            with self._turn:
                self._running -= 1
                self._turn.notify_all()
            self._wake()

    def _count(self, number: int, pieces: int) -> None:
        with self._turn:
            self._moved[number] = pieces
            before, self.complete = self.complete, min(self._moved)
            rose = self.complete > before
        if rose:
            self._wake()
