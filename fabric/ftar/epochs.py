"""Which epochs a plane has links of, and how one of them ends: what all planes share.

An epoch that failed stays failed: whoever aborted it and why is what every later call for it raises, until
it is retired. Descriptors are closed only when no exchange uses them, since a closed number could be
somebody else's by the next poll.
"""

import math
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, TypeVar

from fabric.errors import ConfigError, IllegalTransition, RoundAborted
from fabric.ftar.plane import Ring

# Aborts of epochs whose links have not come yet are remembered, so many at most.
_MAX_EARLY_ABORTS = 64


@dataclass(slots=True)
class Waiting:
    """Whom the exchange waits for now and last, and for how long it has waited for each in this step."""

    peer: str
    seconds: dict[str, float]
    last: str = ""


@dataclass(frozen=True, slots=True)
class Bounds:
    """How long a wait may last, in seconds: which of the two when, see ``exchange``."""

    entry_s: float
    exchange_s: float

    def changed(self, exchange_s: float | None, entry_s: float | None) -> "Bounds":
        """These, with what is given in place of its own. Raises ConfigError for what bounds nothing."""
        new = Bounds(
            self.entry_s if entry_s is None else entry_s,
            self.exchange_s if exchange_s is None else exchange_s,
        )
        if not (0 < new.exchange_s < math.inf and 0 < new.entry_s < math.inf):
            raise ConfigError("the bounds of an exchange are positive, finite numbers of seconds")
        return new


class EpochLinks:
    """What one epoch's exchanges go over. ``wake`` is an eventfd that is readable once it is aborted."""

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
        self._lock = threading.RLock()
        self._in_use = False
        self._closing = False
        for sock in (next_socket, previous_socket):
            if sock is not None:
                sock.setblocking(False)

    def enter(self) -> None:
        """Begin an exchange: the descriptors stay open until ``leave``. Raises RoundAborted."""
        with self._lock:
            self.check()
            self._in_use = True

    def leave(self) -> None:
        """The exchange is over; close now if that was asked for meanwhile."""
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
        """Wake the exchange and tell the previous member; the first cause is the one that counts."""
        with self._lock:
            if self.cause is not None:
                return
            self.cause = (why, about)
            os.eventfd_write(self.wake, 1)
            self.aborted(why, about)

    def aborted(self, why: str, about: str) -> None:
        """What else an abort does, once; may not block."""

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
        """Close the descriptors."""
        for sock in (self.next, self.previous):
            if sock is not None:
                sock.close()
        if self.wake >= 0:
            os.close(self.wake)
            self.wake = -1


Links = TypeVar("Links", bound=EpochLinks)


class Epochs(Generic[Links]):
    """Links by epoch, aborts that came before their links, and from where on epochs still count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[int, Links] = {}
        self._early_aborts: dict[int, tuple[str, str]] = {}
        self._retired_before = 0
        self._closed = False

    def add(self, links: Links) -> bool:
        """Keep ``links``; False where they were closed instead, because their epoch is over.

        Raises IllegalTransition, and closes them, where their epoch has its links already.
        """
        epoch = links.ring.epoch
        with self._lock:
            known = epoch in self._links
            if not known and not self._closed and epoch >= self._retired_before:
                self._links[epoch] = links
                if epoch in self._early_aborts:
                    links.abort(*self._early_aborts.pop(epoch))
                return True
        links.close(f"epoch {epoch} is over")
        if known:
            raise IllegalTransition(f"epoch {epoch} has its links already")
        return False

    def get(self, epoch: int) -> Links:
        """The links of ``epoch``. Raises RoundAborted where it is over, IllegalTransition before it is."""
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
        """End ``epoch``, which may not have its links yet."""
        with self._lock:
            links = self._links.get(epoch)
            if links is None and epoch >= self._retired_before:
                self._early_aborts.setdefault(epoch, (why, about))
                if len(self._early_aborts) > _MAX_EARLY_ABORTS:
                    del self._early_aborts[min(self._early_aborts)]
        if links is not None:
            links.abort(why, about)

    def retire(self, before_epoch: int) -> None:
        """Close the links of older epochs."""
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
    """One exchange at a time, numbered within its step as its callers on all members number it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._newest = (-1, -1, -1)

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise IllegalTransition("two threads reduce on one plane: it takes one at a time")

    def __exit__(self, *_error: object) -> None:
        self._lock.release()

    def number(self, epoch: int, step: int) -> int:
        """How many exchanges of this step and epoch came before this one."""
        last_epoch, last_step, last = self._newest
        exchange = last + 1 if (epoch, step) == (last_epoch, last_step) else 0
        self._newest = (epoch, step, exchange)
        return exchange


class EpochPlane(Generic[Links]):
    """What the planes have in common of DataPlane: bounds, waits, and how an exchange of an epoch ends."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds.changed(None, None)
        self._epochs: Epochs[Links] = Epochs()
        self._exchanges = ExchangeCounter()
        self._waiting = Waiting("", {})

    @property
    def waiting_for(self) -> str:
        """Name of the peer that the exchange waits for at this moment, or empty."""
        return self._waiting.peer

    @property
    def waiting_s(self) -> dict[str, float]:
        """Seconds waited for each peer in the newest exchange."""
        return dict(self._waiting.seconds)

    def set_bounds(self, exchange_s: float | None = None, entry_s: float | None = None) -> None:
        """Change the bounds, from any thread, for the exchanges to come: see DataPlane."""
        self._bounds = self._bounds.changed(exchange_s, entry_s)

    def abort(self, epoch: int, why: str, about: str = "") -> None:
        """End the epoch's exchange from any thread: see DataPlane."""
        self._epochs.abort(epoch, why, about)

    def retire(self, before_epoch: int) -> None:
        """Close the links of older epochs: see DataPlane."""
        self._epochs.retire(before_epoch)

    def close(self) -> None:
        """Abort and close everything; idempotent."""
        self._epochs.close()

    @contextmanager
    def _entered(self, epoch: int) -> Iterator[Links]:
        """The links of ``epoch`` for one exchange; however that fails, the epoch is aborted."""
        with self._exchanges:
            links = self._epochs.get(epoch)
            self._waiting = waiting = Waiting("", {})
            links.enter()
            try:
                yield links
            except RoundAborted as error:
                error.waited_for = waiting.last
                # The first cause wins: an abort that came while this one unwound is not overwritten.
                links.abort(str(error), error.about)
                raise
            except BaseException as error:
                if isinstance(error, Exception):
                    links.check()  # what goes wrong after an abort does so because of it: memory may be gone
                # Half an exchange is on the links: nobody may go on with them.
                links.abort(f"an error here ended the exchange: {error!r}")
                raise
            finally:
                links.leave()
