"""A data plane that uses a library's collectives: one communicator per epoch, built outside the step.

Fabric's authenticated sockets link the members of an epoch. Over these sockets the first member sends the
address of the rendezvous to the others. A thread of each member builds the communicator there before the
first exchange. Later the sockets carry the notice of an abort, and the end of a socket shows a death. One
watchdog thread per epoch reads the sockets. It ends the communicator when the epoch is aborted, a neighbour
is gone, or an exchange exceeds its bound. An ended communicator is never used again.
"""

import json
import math
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fabric.errors import ConfigError, ProtocolError, RoundAborted
from fabric.ftar.chunk_headers import ExchangeSpec
from fabric.ftar.epochs import Bounds, EpochLinks, EpochPlane, received
from fabric.ftar.plane import Ring
from fabric.ftar.reduce_ops import Reduction

_RENDEZVOUS = struct.Struct("<4sI")
_MAGIC = b"FGM1"
_MAX_RENDEZVOUS_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """The address, on the first member's host, at which an epoch's members build their communicator."""

    host: str
    port: int


# NCCL communicators, one per epoch.
#
# Written from torch's documentation; ``docs/benchmarks.md`` says which parts have run on a GPU. NCCL
# refuses two ranks on one GPU. A communicator fails when a member dies, so every epoch has its own
# communicator. torch would end the process when a collective times out. Here the watchdog of the epoch
# ends the communicator instead, so torch's handling is off and its timeout exceeds fabric's.


_cuda: Any = torch.cuda  # torch declares no types for its streams and events
_dist: Any = torch.distributed  # torch declares no types for this module
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# This timeout is longer than any time budget of fabric, so that torch's timeout never comes first.
_NEVER = timedelta(days=30)
# The watchdog of the epoch replaces torch's own.
_TORCH_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class NcclCommunicator:
    """NCCL's collectives among the members of one epoch. It keeps ``store`` alive, because the process group
    may read it."""

    def __init__(self, group: Any, device: torch.device, store: Any) -> None:
        self._group = group
        self._device = device
        self._store = store

    def start(self, tensor: torch.Tensor, operation: str) -> Callable[[], None]:
        """Begin to reduce in place by ``sum``, ``min`` or ``max``.

        NCCL's stream and the calling thread's wait for each other. The returned function blocks, in any
        thread, until the result is complete. It raises RuntimeError when the collective failed, and may
        return normally when it was aborted.
        """
        options = _dist.AllreduceOptions()
        options.reduceOp = _OPERATIONS[operation]
        with _cuda.device(self._device):
            work = self._group.allreduce([tensor], options)
            work.wait()  # enqueues a wait and returns
            # An abort ends NCCL's kernel, so the event completes.
            done = _cuda.Event(blocking=True)
            done.record(_cuda.current_stream(self._device))

        def wait() -> None:
            done.synchronize()

        return wait

    def abort(self) -> None:
        """End the collective under way, from another thread; called once, and may take a while."""
        self._group.abort()


class NcclFactory:
    """Makes communicators of one GPU each. Raises ConfigError where this torch has no NCCL."""

    def __init__(self, device: torch.device) -> None:
        if not dist.is_nccl_available():
            raise ConfigError("this build of torch has no NCCL: use another data plane, or a CUDA build")
        self._device = device
        for name, value in _TORCH_SETTINGS.items():
            os.putenv(name, value)  # torch's native code reads it for the first communicator

    def open_rendezvous(self, ring: Ring, host: str) -> tuple[Rendezvous, Any]:
        """Open the rendezvous at ``host``, the first member's address; also return its store, to be kept
        open."""
        store = _dist.TCPStore(host, 0, ring.world, is_master=True, timeout=_NEVER, wait_for_workers=False)
        return Rendezvous(host, store.port), store

    def make(
        self,
        ring: Ring,
        rendezvous: Rendezvous,
        kept: Any,
        timeout_s: float,
        began: Callable[[NcclCommunicator], None],
    ) -> NcclCommunicator:
        """Build the communicator by a first collective, together with all other members; blocks.

        ``kept`` is the store of ``open_rendezvous`` at the first member, else None. ``began`` gets the
        communicator as soon as it can be aborted.
        """
        bound = timedelta(seconds=timeout_s)
        store = kept or _dist.TCPStore(
            rendezvous.host,
            rendezvous.port,
            ring.world,
            is_master=False,
            timeout=bound,
            wait_for_workers=False,
        )
        store.set_timeout(bound)
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER  # noqa: SLF001  there is no other way to it
        prefix = _dist.PrefixStore(f"fabric/{ring.epoch}", store)
        group = _dist.ProcessGroupNCCL(prefix, ring.position, ring.world, options)
        made = NcclCommunicator(group, self._device, store)
        began(made)
        made.start(torch.zeros(1, device=self._device), "sum")()
        return made


class GroupLinks(EpochLinks):
    """The sockets of one epoch, its communicator once built, and the threads of both."""

    def __init__(
        self,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
        factory: NcclFactory,
        make_s: float,
    ) -> None:
        super().__init__(ring, next_socket, previous_socket)
        self.communicator: NcclCommunicator | None = None
        self.changed = threading.Condition()
        # The deadline of the exchange under way, in seconds of the monotonic clock.
        self.deadline_s = math.inf
        self._factory = factory
        self._make_s = make_s
        self._rendezvous_bytes = bytearray()
        self._met = threading.Event()
        self._where: Rendezvous | None = None
        self._begun: NcclCommunicator | None = None
        # Whether the watchdog has ended; at its end it aborts the communicator, if any.
        self._watched_out = False
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Build the communicator and watch over it, both in the background."""
        if self.ring.world == 1:
            return
        for work, name in ((self._build, "fabric-group"), (self._watch, "fabric-watchdog")):
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def aborted(self, why: str, about: str) -> None:
        """Tell the previous member, and wake the waiting threads. The watchdog then ends the communicator."""
        super().aborted(why, about)
        with self.changed:
            self.changed.notify_all()
        self._met.set()

    def release(self) -> None:
        """Close the descriptors. If the watchdog still polls them, it closes them when it ends."""
        if not self._threads:
            super().release()

    def ready(self, deadline_s: float) -> NcclCommunicator:
        """Wait for the communicator until ``deadline_s``. Raises RoundAborted."""
        with self.changed:
            while self.communicator is None:
                self.check()
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    raise RoundAborted(f"epoch {self.ring.epoch} had no communicator within its bound")
                self.changed.wait(left_s)
            self.check()
            return self.communicator

    # --- the thread that builds -------------------------------------------------------------------

    def _build(self) -> None:
        kept = None
        try:
            if self.ring.position == 0:
                assert self.next is not None
                host = self.next.getsockname()[0] if self.next.family != socket.AF_UNIX else "127.0.0.1"
                self._where, kept = self._factory.open_rendezvous(self.ring, host)
                body = json.dumps([self._where.host, self._where.port]).encode()
                self.next.send(_RENDEZVOUS.pack(_MAGIC, len(body)) + body)
            else:
                self._met.wait()
            if self._where is None or self.cause is not None:
                return
            built = self._factory.make(self.ring, self._where, kept, self._make_s, self._began)
        except (RuntimeError, OSError, ValueError) as error:
            why = f"the communicator of epoch {self.ring.epoch} could not be built: {_first_line(error)}"
            self.abort(why)
            return
        with self.changed:
            self.communicator = built
            self.changed.notify_all()

    def _began(self, communicator: NcclCommunicator) -> None:
        with self.changed:
            self._begun = communicator
            is_late = self._watched_out
        if is_late:
            communicator.abort()

    # --- the watchdog -----------------------------------------------------------------------------

    def _watch(self) -> None:
        assert self.next is not None and self.previous is not None
        poll = select.poll()
        for descriptor in (self.wake, self.next.fileno(), self.previous.fileno()):
            poll.register(descriptor, select.POLLIN)
        while self.cause is None:
            try:
                self._listen(poll)
            except RoundAborted as error:
                self.abort(str(error), error.about)
            except ProtocolError as error:
                self.abort(f"a neighbour of epoch {self.ring.epoch} sent garbage: {error}")
        with self.changed:
            communicator, self._watched_out = self._begun, True
        if communicator is not None:
            communicator.abort()
        with self._lock:
            self._threads.clear()
            if self._closing and not self._in_use:
                super().release()

    def _listen(self, poll: select.poll) -> None:
        left_s = self.deadline_s - time.monotonic()
        if left_s <= 0:
            raise RoundAborted(f"the exchange of epoch {self.ring.epoch} did not end within its bound")
        # The watchdog polls at least once a second: an exchange may begin meanwhile and set a deadline.
        ready = dict(poll.poll(min(left_s, 1.0) * 1000 + 1))
        assert self.next is not None and self.previous is not None
        if self.previous.fileno() in ready:
            self._receive_rendezvous(received(self.previous, self.ring.previous))
        if self.next.fileno() in ready:
            self.hear_back()

    def _receive_rendezvous(self, data: bytes) -> None:
        self._rendezvous_bytes += data
        if len(self._rendezvous_bytes) < _RENDEZVOUS.size or self._where is not None:
            return
        magic, size = _RENDEZVOUS.unpack_from(self._rendezvous_bytes)
        if magic != _MAGIC or size > _MAX_RENDEZVOUS_BYTES:
            raise ProtocolError(
                "these bytes name no rendezvous: check that all members use the same data plane"
            )
        if len(self._rendezvous_bytes) >= _RENDEZVOUS.size + size:
            self._where = _decode(bytes(self._rendezvous_bytes[_RENDEZVOUS.size : _RENDEZVOUS.size + size]))
            if self.ring.position < self.ring.world - 1:
                assert self.next is not None
                self.next.send(bytes(self._rendezvous_bytes))
            self._met.set()


class GroupPlane(EpochPlane[GroupLinks]):
    """DataPlane over communicators that ``factory`` builds: see ``plane``.

    ``owns`` says which tensors the plane can reduce; for others it raises an error instead of crashing.
    ``make_s`` bounds the building of a communicator. ``entry_s`` bounds the whole exchange, because this
    plane cannot tell a late member from a stuck member; ``exchange_s`` is only checked for its range.

    The library decides the order of a sum, and promises equal bits on all members. Members check that
    promise: they compare digests before they commit (docs/protocol.md).
    """

    def __init__(
        self,
        factory: NcclFactory,
        owns: Callable[[torch.Tensor], bool],
        exchange_s: float = 30.0,
        make_s: float = 120.0,
    ) -> None:
        make_links = partial(GroupLinks, factory=factory, make_s=make_s)
        super().__init__(Bounds(7200.0, exchange_s), owns, make_links)

    kind = "nccl"
    shares_memory = False  # the library moves the bytes itself

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Refuse: this plane reduces any memory of the device in place."""
        raise ConfigError("this data plane has no memory of its own: reduce the gradients where they are")

    def register(self, descriptor: int, memory: torch.Tensor) -> None:
        """Without effect."""

    def unregister(self, memory: torch.Tensor) -> None:
        """Without effect."""

    def _reduce(
        self,
        links: GroupLinks,
        spec: ExchangeSpec,
        source: torch.Tensor,
        result: torch.Tensor,
        how: Reduction,
    ) -> None:
        links.deadline_s = time.monotonic() + self._bounds.entry_s
        try:
            if result.data_ptr() != source.data_ptr():
                result.copy_(source)
            if links.ring.world > 1 and source.numel():
                communicator = links.ready(links.deadline_s)
                kind = "sum" if how.operation == "mean" else how.operation
                try:
                    wait = communicator.start(result, kind)
                except RuntimeError as error:
                    raise _failed(links.ring, error) from error
                _until_done(links, wait)
            if how.operation == "mean":
                # Divide by a tensor: on a GPU torch would multiply by the reciprocal of a number.
                wide = torch.float64 if result.dtype == torch.float64 else torch.float32
                weight = torch.full((), how.weight, dtype=wide, device=result.device)
                result.copy_(result.to(wide).div_(weight))
        finally:
            links.deadline_s = math.inf


def _until_done(links: GroupLinks, work: Callable[[], None]) -> None:
    """Run ``work``; return when it ends or the epoch is aborted, whichever is first.
    ``work`` cannot be interrupted, so a new thread runs it and ends when the work ends.
    """
    outcome: list[BaseException | None] = []

    def run() -> None:
        error: BaseException | None = None
        try:
            work()
        except Exception as caught:  # noqa: BLE001  whatever a library raises is this exchange's failure
            error = caught
        with links.changed:
            outcome.append(error)
            links.changed.notify_all()

    threading.Thread(target=run, name="fabric-collective", daemon=True).start()
    with links.changed:
        links.changed.wait_for(lambda: outcome or links.cause is not None)
    links.check()
    error = outcome[0]
    if error is not None:
        raise _failed(links.ring, error) from error


def _failed(ring: Ring, error: BaseException) -> RoundAborted:
    return RoundAborted(f"the exchange of epoch {ring.epoch} failed: {_first_line(error)}")


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]


def _decode(body: bytes) -> Rendezvous:
    try:
        match json.loads(body):
            case [str(host), int(port)] if 0 < port < 2**16 and len(host) < 256:
                return Rendezvous(host, port)
    except (ValueError, RecursionError):
        pass
    raise ProtocolError("the rendezvous that the first member sent is not an address")
