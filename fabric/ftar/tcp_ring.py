"""The data plane for tensors in host memory: a ring of TCP links that ends at once when it cannot go on.

One thread calls ``all_reduce``; the control thread installs links, aborts and retires. What they share is a
table of epochs under one lock, and each epoch's links guard themselves. An epoch that failed stays failed:
whoever aborted it and why is what every later call for it raises, until it is retired.
"""

import math
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from fabric.errors import ConfigError, IllegalTransition, RoundAborted
from fabric.ftar.chunks import Round
from fabric.ftar.exchange import Area, Bounds, Exchange, Waiting
from fabric.ftar.links import RingLinks
from fabric.ftar.plane import Ring
from fabric.ftar.reduce import ALIGNMENT, DTYPE_CODES, schedule

CHUNK_BYTES = 1024 * 1024
# Every cut of every type falls on whole elements, for the widest type is eight bytes.
_CHUNK_UNIT_BYTES = ALIGNMENT * 8
# Aborts of epochs whose links have not come yet are remembered, so many at most.
_MAX_EARLY_ABORTS = 64


class TcpRing:
    """DataPlane over TCP links: see ``plane``.

    ``exchange_s`` bounds the silence inside an exchange, ``entry_s`` the wait for members that are late
    for it, which must exceed what user code may take. ``chunk_bytes`` must be equal on all members.
    ``checksum`` covers every payload and not only the headers. ``on_piece(step)`` is called in the midst of
    an exchange, after every piece that arrived: for tests that must hit exactly there.
    """

    def __init__(
        self,
        chunk_bytes: int = CHUNK_BYTES,
        exchange_s: float = 30.0,
        entry_s: float = 7200.0,
        checksum: bool = True,
        on_piece: Callable[[int], None] = lambda _step: None,
    ) -> None:
        if chunk_bytes < _CHUNK_UNIT_BYTES or chunk_bytes > 2**30:
            raise ConfigError(
                f"chunks of {chunk_bytes} bytes are not possible: "
                f"choose between {_CHUNK_UNIT_BYTES} bytes and 1 GiB"
            )
        if not (0 < exchange_s < math.inf and 0 < entry_s < math.inf):
            raise ConfigError("the bounds of an exchange are positive, finite numbers of seconds")
        self._bounds = Bounds(entry_s, exchange_s)
        self._checksum = checksum
        self._on_piece = on_piece
        self._scratch = torch.zeros(chunk_bytes // _CHUNK_UNIT_BYTES * _CHUNK_UNIT_BYTES, dtype=torch.uint8)
        self._epochs = _Epochs()
        self._turn = threading.Lock()
        self._newest = (-1, -1, -1)
        self._waiting = Waiting("", {})

    @property
    def waiting_for(self) -> str:
        """Name of the peer that the exchange waits for at this moment, or empty."""
        return self._waiting.peer

    @property
    def waiting_s(self) -> dict[str, float]:
        """Seconds waited for each peer in the newest exchange."""
        return dict(self._waiting.seconds)

    def install(
        self,
        ring: Ring,
        next_socket: socket.socket | None,
        previous_socket: socket.socket | None,
    ) -> None:
        """Take the links of an epoch: see DataPlane.

        Raises IllegalTransition for an epoch that is installed already, or without its sockets.
        """
        if ring.world > 1 and (next_socket is None or previous_socket is None):
            raise IllegalTransition(
                f"epoch {ring.epoch} has {ring.world} members, so its ring needs two links"
            )
        self._epochs.add(RingLinks(ring, next_socket, previous_socket))

    def all_reduce(self, epoch: int, step: int, buffer: torch.Tensor) -> None:
        """Sum in place over the members of ``epoch``: see DataPlane and ``reduce`` for the order.

        ``buffer`` is a contiguous 1-D CPU tensor of a type in ``reduce.DTYPE_CODES``, any length;
        anything else raises ConfigError before a byte is sent. Raises RoundAborted.
        """
        _check_buffer(buffer)
        if not self._turn.acquire(blocking=False):
            raise IllegalTransition("two threads reduce on one plane: it takes one at a time")
        try:
            self._reduce(self._epochs.get(epoch), step, buffer.detach())
        finally:
            self._turn.release()

    def abort(self, epoch: int, why: str, about: str = "") -> None:
        """End the epoch's exchange from any thread: see DataPlane."""
        self._epochs.abort(epoch, why, about)

    def retire(self, before_epoch: int) -> None:
        """Close the links of older epochs: see DataPlane."""
        self._epochs.retire(before_epoch)

    def close(self) -> None:
        """Abort and close everything; idempotent."""
        self._epochs.close()

    def _reduce(self, links: RingLinks, step: int, buffer: torch.Tensor) -> None:
        ring = links.ring
        self._waiting = waiting = Waiting("", {})
        links.enter()
        try:
            round_ = Round(
                ring.epoch,
                step,
                self._next_exchange(ring.epoch, step),
                ring.world,
                DTYPE_CODES[buffer.dtype],
                buffer.numel(),
            )
            if ring.world > 1 and buffer.numel():
                area = Area(buffer, self._scratch)
                chunk_elements = self._scratch.numel() // area.item_bytes
                plan = schedule(buffer.numel(), ring.world, ring.position, chunk_elements)
                exchange = Exchange(links, area, round_, plan, self._checksum, self._on_piece)
                exchange.run(self._bounds, waiting)
        except RoundAborted as error:
            # The first cause wins: an abort that came while this one unwound is not overwritten.
            links.abort(str(error), error.about)
            raise
        except BaseException as error:
            # Half an exchange is on the links: nobody may go on with them.
            links.abort(f"an error here ended the exchange: {error!r}")
            raise
        finally:
            links.leave()

    def _next_exchange(self, epoch: int, step: int) -> int:
        last_epoch, last_step, last = self._newest
        exchange = last + 1 if (epoch, step) == (last_epoch, last_step) else 0
        self._newest = (epoch, step, exchange)
        return exchange


class _Epochs:
    """Links by epoch, aborts that came before their links, and from where on epochs still count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._links: dict[int, RingLinks] = {}
        self._early_aborts: dict[int, tuple[str, str]] = {}
        self._retired_before = 0
        self._closed = False

    def add(self, links: RingLinks) -> None:
        epoch = links.ring.epoch
        with self._lock:
            known = epoch in self._links
            if not known and not self._closed and epoch >= self._retired_before:
                self._links[epoch] = links
                if epoch in self._early_aborts:
                    links.abort(*self._early_aborts.pop(epoch))
                return
        links.close(f"epoch {epoch} is over")
        if known:
            raise IllegalTransition(f"epoch {epoch} has its links already")

    def get(self, epoch: int) -> RingLinks:
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
        with self._lock:
            self._closed = True
            everything = list(self._links.values())
            self._links.clear()
        for links in everything:
            with suppress(OSError):
                links.close("this process closed its data plane")


def _check_buffer(buffer: torch.Tensor) -> None:
    if buffer.dtype not in DTYPE_CODES:
        raise ConfigError(
            f"a tensor of {buffer.dtype} cannot be reduced: use one of "
            + ", ".join(str(d).removeprefix("torch.") for d in DTYPE_CODES)
        )
    if buffer.dim() != 1 or not buffer.is_contiguous() or buffer.device.type != "cpu":
        raise ConfigError(
            f"the ring reduces flat contiguous tensors in host memory, not shape "
            f"{tuple(buffer.shape)} on {buffer.device}: copy it into one first"
        )
