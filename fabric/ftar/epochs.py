"""The epochs of which a plane has links, and how an epoch ends: the common part of all planes.

An epoch that failed stays failed: every later call for it raises the first cause, until the epoch is retired.
Descriptors are closed only when no exchange uses them, because the kernel may give a closed descriptor's
number to another file.
"""

import math
import os
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

import torch

from fabric.errors import ConfigError, IllegalTransition, ProtocolError, RoundAborted
from fabric.ftar import chunk_headers
from fabric.ftar.chunk_headers import ChunkHeader, ExchangeSpec
from fabric.ftar.plane import Ring, RingNotes
from fabric.ftar.reduce_ops import SUM, Reduction, check_tensors, put_together
from fabric.ftar.ring_schedule import DTYPE_CODES
from fabric.transport.tcp import sending_s

# The number of aborts kept for epochs whose links have not come yet.
_MAX_EARLY_ABORTS = 64
_READ_BYTES = 4096


@dataclass(slots=True)
class Waiting:
    """The waits of one exchange."""

    peer: str  # the peer that this member waits for now, or empty
    seconds: dict[str, float]  # time that this member has waited so far, by peer
    last: str = ""  # the peer that this member waited for last
    sending: dict[str, float] = field(default_factory=dict)  # time for which bytes to a peer were under way
    epoch: int = 0
    sent_s: float = 0.0  # such a time on the link to the next member, since the epoch's links began


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a wait may last, in seconds."""

    entry_s: float  # time limit until all members have entered the exchange
    exchange_s: float  # once all members have entered: time limit without a byte of progress

    def changed(self, exchange_s: float | None, entry_s: float | None) -> "Bounds":
        """Return these bounds with the given ones replaced. Raises ConfigError for a bound out of range."""
        new = Bounds(
            self.entry_s if entry_s is None else entry_s,
            self.exchange_s if exchange_s is None else exchange_s,
        )
        if not (0 < new.exchange_s < math.inf and 0 < new.entry_s < math.inf):
            raise ConfigError("the bounds of an exchange are positive, finite numbers of seconds")
        return new


def is_shared(sock: socket.socket | None) -> bool:
    """Whether this link connects members on one host; both ends get the same answer."""
    return sock is not None and sock.family == socket.AF_UNIX


def lost(peer: str, error: OSError | None) -> RoundAborted:
    """Return the abort for the end of the link to ``peer``."""
    detail = "its end of the ring closed"
    if error is not None:
        detail = os.strerror(error.errno).lower() if error.errno else str(error)
    return RoundAborted(f"the ring link to {peer} was lost: {detail}", peer)


def received(sock: socket.socket, peer: str) -> bytes:
    """Return the bytes that have come from ``peer``, maybe none. Raises RoundAborted at the link's end."""
    try:
        data = sock.recv(_READ_BYTES)
    except BlockingIOError:
        return b""
    except OSError as error:
        raise lost(peer, error) from error
    if not data:
        raise lost(peer, None)
    return data


class EpochLinks:
    """The links of one epoch. ``wake`` is an eventfd that is readable once the epoch is aborted."""

    answers: ClassVar[tuple[int, ...]] = ()  # the kinds of messages that the next member sends back

    def __init__(
        self, ring: Ring, next_socket: socket.socket | None, previous_socket: socket.socket | None
    ) -> None:
        if ring.world > 1 and (next_socket is None or previous_socket is None):
            raise IllegalTransition(
                f"epoch {ring.epoch} has {ring.world} members, so its ring needs two links"
            )
        self.ring = ring
        self.next = next_socket
        self.previous = previous_socket
        self.wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.cause: tuple[str, str] | None = None
        self._came_back = bytearray()
        self._lock = threading.RLock()
        self._in_use = False
        self._closing = False
        for sock in (next_socket, previous_socket):
            if sock is not None:
                sock.setblocking(False)

    def add(self, further_next: Sequence[socket.socket], further_previous: Sequence[socket.socket]) -> None:
        """Take further connections of both links. Links that use one connection close the others."""
        for sock in (*further_next, *further_previous):
            sock.close()

    def enter(self) -> None:
        """Begin an exchange: the descriptors stay open until ``leave``. Raises RoundAborted."""
        with self._lock:
            self.check()
            self._in_use = True

    def take_parts(self, parts: Sequence[torch.Tensor], result: torch.Tensor) -> None:
        """Take the elements of an exchange into ``result``, where it begins in place."""
        put_together(parts, result)

    def leave(self) -> None:
        """End an exchange; close the descriptors if ``close`` was called meanwhile."""
        with self._lock:
            self._in_use = False
            if self._closing:
                self.release()

    def check(self) -> None:
        """Raise RoundAborted if this epoch was aborted."""
        if self.cause is not None:
            why, about = self.cause
            raise RoundAborted(why, about)

    def abort(self, why: str, about: str = "") -> None:
        """Wake the exchange and tell the previous member; only the first cause counts."""
        with self._lock:
            if self.cause is not None:
                return
            self.cause = (why, about)
            os.eventfd_write(self.wake, 1)
            self.aborted(why, about)

    def start(self) -> None:
        """Begin what the links need in the background; they are those of their epoch now."""

    def aborted(self, why: str, about: str) -> None:
        """Tell the previous member, which tells the member before it, until all members know the cause.

        Called once; must not block.
        """
        if self.previous is not None:
            # A ring link carries few bytes backward, so the socket's buffer has room for this message.
            with suppress(OSError):
                self.previous.send(chunk_headers.notice(self.ring.epoch, self.ring.position, why, about))

    def hear_back(self) -> None:
        """Read what the next member has sent back; return when no complete message is left.

        Raises RoundAborted at the notice of an abort, or when the link has ended.
        """
        assert self.next is not None
        peer = self.ring.next
        self._came_back += received(self.next, peer)
        try:
            while (message := chunk_headers.take_back(self._came_back, *self.answers)) is not None:
                if isinstance(message, tuple):
                    why, about = message
                    raise RoundAborted(why, about if about in self.ring.names else "")
                self.heard(message)
        except ProtocolError as error:
            raise RoundAborted(f"{peer} answered on the ring with garbage: {error}", peer) from error

    def heard(self, message: ChunkHeader) -> None:
        """Take a message of one of ``answers`` from the next member."""
        raise NotImplementedError

    def close(self, why: str) -> None:
        """Abort, and close the sockets as soon as no exchange uses them; idempotent."""
        self.abort(why)
        with self._lock:
            if self._closing:
                return
            self._closing = True
            if not self._in_use:
                self.release()

    def release(self) -> None:
        for sock in (self.next, self.previous):
            if sock is not None:
                sock.close()
        if self.wake >= 0:
            os.close(self.wake)
            self.wake = -1


Links = TypeVar("Links", bound=EpochLinks)


class Epochs(Generic[Links]):
    """Links by epoch, early aborts, and the oldest epoch that is not retired."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[int, Links] = {}
        self._early_aborts: dict[int, tuple[str, str]] = {}
        self._retired_before = 0
        self._closed = False

    def add(self, links: Links) -> bool:
        """Keep ``links``; if their epoch is over, close them and return False.

        If their epoch has links already, close them and raise IllegalTransition.
        """
        epoch = links.ring.epoch
        with self._lock:
            has_links = epoch in self._links
            if not has_links and not self._closed and epoch >= self._retired_before:
                self._links[epoch] = links
                if epoch in self._early_aborts:
                    links.abort(*self._early_aborts.pop(epoch))
                return True
        links.close(f"epoch {epoch} is over")
        if has_links:
            raise IllegalTransition(f"epoch {epoch} has its links already")
        return False

    def get(self, epoch: int) -> Links:
        """Return the links of ``epoch``. Raises RoundAborted after its end, IllegalTransition before its
        links."""
        with self._lock:
            links = self._links.get(epoch)
            if links is not None:
                return links
            if self._closed or epoch < self._retired_before:
                raise RoundAborted(f"epoch {epoch} is over: its links were closed")
            if epoch in self._early_aborts:
                raise RoundAborted(*self._early_aborts[epoch])
        raise IllegalTransition(f"epoch {epoch} has no links yet: install them before its rounds")

    def abort(self, epoch: int, why: str, about: str) -> None:
        """End ``epoch``, whose links may come later."""
        with self._lock:
            links = self._links.get(epoch)
            if links is None and epoch >= self._retired_before:
                self._early_aborts.setdefault(epoch, (why, about))
                if len(self._early_aborts) > _MAX_EARLY_ABORTS:
                    del self._early_aborts[min(self._early_aborts)]
        if links is not None:
            links.abort(why, about)

    def retire(self, before_epoch: int) -> None:
        with self._lock:
            self._retired_before = max(self._retired_before, before_epoch)
            old = [e for e in self._links if e < before_epoch]
            retired = [self._links.pop(e) for e in old]
            for epoch in [e for e in self._early_aborts if e < before_epoch]:
                del self._early_aborts[epoch]
        for links in retired:
            links.close(f"epoch {links.ring.epoch} is over: epoch {before_epoch} is in force")

    def close(self) -> None:
        """Close everything; idempotent."""
        with self._lock:
            self._closed = True
            everything = list(self._links.values())
            self._links.clear()
        for links in everything:
            with suppress(OSError):
                links.close("this process closed its data plane")


class ExchangeCounter:
    """Admits one exchange at a time. All members give an exchange the same number within its step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = (-1, -1, -1)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise IllegalTransition("two threads reduce on one plane: it takes one at a time")

    def __exit__(self, *_error: object) -> None:
        self._lock.release()

    def number(self, epoch: int, step: int) -> int:
        """Return the number of earlier exchanges of this step and epoch."""
        last_epoch, last_step, last = self._newest
        exchange = last + 1 if (epoch, step) == (last_epoch, last_step) else 0
        self._newest = (epoch, step, exchange)
        return exchange


class EpochPlane(Generic[Links]):
    """The part of DataPlane that all planes share: bounds, waits, and the end of an epoch's exchange."""

    _memory: ClassVar[str] = "on its own device"  # the memory of its tensors, for a sentence

    def __init__(
        self, bounds: Bounds, owns: Callable[[torch.Tensor], bool], make_links: Callable[..., Links]
    ) -> None:
        """``owns``: whether the plane can use the memory of a tensor. ``make_links`` gets a ring and its
        sockets."""
        self._bounds = bounds.changed(None, None)
        self._owns = owns
        self._make_links = make_links
        self._epochs: Epochs[Links] = Epochs()
        self._exchanges = ExchangeCounter()
        self._waiting = Waiting("", {})
        self.notes = RingNotes()

    @property
    def waiting_for(self) -> str:
        return self._waiting.peer

    @property
    def waiting_s(self) -> dict[str, float]:
        return dict(self._waiting.seconds)

    @property
    def sending_s(self) -> dict[str, float]:
        return dict(self._waiting.sending)

    def set_bounds(self, exchange_s: float | None = None, entry_s: float | None = None) -> None:
        self._bounds = self._bounds.changed(exchange_s, entry_s)

    connections = 1

    def install(
        self,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
        further_next: Sequence[socket.socket] = (),
        further_previous: Sequence[socket.socket] = (),
    ) -> None:
        """Take the links of an epoch: see DataPlane.

        Raises IllegalTransition for an epoch that is installed already, or without its sockets.
        """
        links = self._make_links(ring, next_socket, previous_socket)
        links.add(further_next, further_previous)
        if self._epochs.add(links):
            links.start()

    def all_reduce(
        self,
        epoch: int,
        step: int,
        source: torch.Tensor | Sequence[torch.Tensor],
        result: torch.Tensor | None = None,
        reduction: Reduction = SUM,
        result_is_stable: bool = False,
    ) -> None:
        parts: Sequence[torch.Tensor] = ()
        if not isinstance(source, torch.Tensor):
            assert result is not None
            parts, source = source, result
        result = source if result is None else result
        check_tensors(source, result, reduction, self._owns, self._memory)
        with self._entered(epoch) as links:
            if parts:
                links.take_parts(parts, result)
            spec = ExchangeSpec(
                epoch,
                step,
                self._exchanges.number(epoch, step),
                links.ring.world,
                DTYPE_CODES[source.dtype],
                source.numel(),
                reduction.code,
                result_is_stable,
                reduction.form(source.dtype),
            )
            self._reduce(links, spec, source.detach(), result.detach(), reduction)

    def _reduce(
        self, links: Links, spec: ExchangeSpec, source: torch.Tensor, result: torch.Tensor, how: Reduction
    ) -> None:
        """Reduce checked tensors over ``links``, without autograd."""
        raise NotImplementedError

    def abort(self, epoch: int, why: str, about: str = "") -> None:
        self._epochs.abort(epoch, why, about)

    def retire(self, before_epoch: int) -> None:
        self._epochs.retire(before_epoch)

    def close(self) -> None:
        self._epochs.close()

    @contextmanager
    def _entered(self, epoch: int) -> Iterator[Links]:
        """Yield the links of ``epoch`` for one exchange; any failure of it aborts the epoch."""
        with self._exchanges:
            links = self._epochs.get(epoch)
            before, self._waiting = self._waiting, Waiting("", {}, epoch=epoch)
            waiting = self._waiting
            links.enter()
            try:
                yield links
            except RoundAborted as error:
                error.waited_for = waiting.last
                # The links keep only the first cause: an abort that came before this error stays the cause.
                links.abort(str(error), error.about)
                raise
            except BaseException as error:
                if isinstance(error, Exception):
                    links.check()  # an abort may have released the memory, which explains this error
                # The links still hold bytes of the aborted exchange, so no later exchange may use them.
                links.abort(f"an error here ended the exchange: {error!r}")
                raise
            finally:
                if links.next is not None:
                    waiting.sent_s = sending_s(links.next)
                if new_s := waiting.sent_s - (before.sent_s if before.epoch == epoch else 0.0):
                    waiting.sending[links.ring.next] = new_s
                links.leave()
