"""The limit of an HTTP service's connections, and the choice of one to close when there are too many.

A connection costs a descriptor before its sender has shown a token. So a service holds fewer connections than
it may have descriptors, and keeps the others for its own sockets, files and memory. A connection without a
request under way is *idle*, also while a head or a body arrives. At the limit, the service closes the
connection that has been idle for longest. Each address has a share, so that a sender of many connections
loses its own first.
"""

import asyncio
import ipaddress
import logging
import resource
import socket
import ssl
import time
from collections import Counter as Count
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from fabric.model import Value
from fabric.runtime.http import parse_address

log = logging.getLogger(__name__)

# Descriptors left for other uses than HTTP: unix sockets, memory, the store, the trainer status, files.
_RESERVED = 512
# Idle connections cost memory too, about 5 KiB each.
_MOST_IDLE = 8192
_MOST_DESCRIPTORS = 1 << 20
_REPORT_EVERY_S = 60.0

IDLE, FULL = "idle", "full"


class Limits(Value):
    """``total`` connections, ``idle`` ones among them; an address may have half of each."""

    total: int
    idle: int

    @classmethod
    def of(cls, descriptors: int) -> "Limits":
        """Return the limits of a process that may have ``descriptors`` open."""
        total = descriptors - min(_RESERVED, descriptors // 2)
        return cls(total, min(_MOST_IDLE, total // 2))


def raise_descriptor_limit() -> int:
    """Raise this process's limit of open files as far as it may; return the limit."""
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, _MOST_DESCRIPTORS)
    if soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(soft, most)


class ConnectionSlot:
    """The slot of one connection. ``close`` ends the connection; the slot is free at once."""

    __slots__ = ("_limit", "address", "close", "is_free")

    def __init__(self, limit: "ConnectionLimit", address: str, close: Callable[[], None]) -> None:
        self._limit = limit
        self.address = address
        self.close = close
        self.is_free = False

    def busy(self) -> None:
        self._limit.stop_idling(self)

    def idle(self) -> None:
        """Mark the connection as idle: no request is under way, or the sender owes us bytes."""
        self._limit.start_idling(self)

    def leave(self) -> None:
        self._limit.remove(self)


class ConnectionLimit:
    """The open connections; decides which one to close. It has no sockets. ``idle``: an idle one in a log."""

    def __init__(self, limits: Limits | None = None, idle: str = "idle") -> None:
        self.limits = limits or Limits.of(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        self._idle_word = idle
        self.refused: Count[str] = Count({IDLE: 0, FULL: 0})
        self._reported = float("-inf")
        self._open: Count[str] = Count()
        # Idle connections of all addresses, and by address, the connection that is idle longest first.
        self._idle: dict[ConnectionSlot, float] = {}  # each with the time since which it is idle
        self._idle_by: dict[str, dict[ConnectionSlot, None]] = {}

    @property
    def open(self) -> int:
        return self._open.total()

    @property
    def idling(self) -> int:
        return len(self._idle)

    def young_s(self, address: str, least_s: float) -> float:
        """Return how long ``admit`` would still close, for ``address``, one that idles for less than
        ``least_s``; not above 0 where it would close none of another address."""
        is_full = len(self._idle) >= self.limits.idle and not self._has_its_share(address)
        return next(iter(self._idle.values())) + least_s - time.monotonic() if is_full else 0.0

    def _has_its_share(self, address: str) -> bool:
        idle = len(self._idle_by.get(address, {}))
        return self._open[address] >= self.limits.total // 2 or idle >= self.limits.idle // 2

    def admit(self, address: str, close: Callable[[], None]) -> ConnectionSlot | None:
        """Return a slot for a new connection, which is idle at first; this may close another connection.

        Return None where the limit is reached and no connection is idle: the caller closes the new one.
        """
        limits = self.limits
        if self._has_its_share(address):
            has_room = self._close_first(self._idle_by.get(address, {}))
        elif self.open >= limits.total or len(self._idle) >= limits.idle:
            has_room = self._close_first(self._idle)
        else:
            has_room = True
        if not has_room:
            self._report(FULL, address)
            return None
        slot = ConnectionSlot(self, address, close)
        self._open[address] += 1
        self.start_idling(slot)
        return slot

    def close_one(self) -> bool:
        """Close the longest idle connection; False where none is idle."""
        return self._close_first(self._idle)

    def start_idling(self, slot: ConnectionSlot) -> None:
        if not slot.is_free:
            self._idle[slot] = time.monotonic()
            self._idle_by.setdefault(slot.address, {})[slot] = None

    def stop_idling(self, slot: ConnectionSlot) -> None:
        self._idle.pop(slot, None)
        of_address = self._idle_by.get(slot.address, {})
        of_address.pop(slot, None)
        if not of_address:
            self._idle_by.pop(slot.address, None)

    def remove(self, slot: ConnectionSlot) -> None:
        if slot.is_free:
            return
        self.stop_idling(slot)
        slot.is_free = True
        self._open[slot.address] -= 1
        if not self._open[slot.address]:
            del self._open[slot.address]

    def _close_first(self, idle: Iterable[ConnectionSlot]) -> bool:
        slot = next(iter(idle), None)
        if slot is None:
            return False
        self._report(IDLE, slot.address)
        self.remove(slot)
        slot.close()
        return True

    def _report(self, why: str, address: str) -> None:
        self.refused[why] += 1
        now = time.monotonic()
        if now - self._reported >= _REPORT_EVERY_S:
            self._reported = now
            which = "the oldest of these was closed" if why == IDLE else "a new one was refused"
            log.warning(
                "there are too many connections, %d of them %s, and %s, from %s: find out who opens them",
                self.idling,
                self._idle_word,
                which,
                address,
            )


# The most connections that one turn accepts before the event loop serves the open connections.
_AT_ONCE = 64
_HANDSHAKE_S = 20.0
# The pause after the process ran out of file descriptors, because no event reports a free descriptor.
_LOOK_AGAIN_S = 0.05


class OuterProtocol(asyncio.Protocol):
    """The protocol object of one connection, which passes on to that of the HTTP library."""

    def __init__(self, library: asyncio.Protocol) -> None:
        self._library = library
        self.connection_made = library.connection_made  # type: ignore[method-assign]
        self.eof_received = library.eof_received  # type: ignore[method-assign]
        self.pause_writing = library.pause_writing  # type: ignore[method-assign]
        self.resume_writing = library.resume_writing  # type: ignore[method-assign]

    def connection_lost(self, error: Exception | None) -> None:
        self._library.connection_lost(error)


class SlottedProtocol(OuterProtocol):
    """The protocol object of one connection, with the connection's slot."""

    def __init__(self, library: asyncio.Protocol, slot: ConnectionSlot) -> None:
        super().__init__(library)
        self.slot = slot
        self.data_received = library.data_received  # type: ignore[method-assign]

    def connection_lost(self, error: Exception | None) -> None:
        self.slot.leave()
        super().connection_lost(error)


class Acceptor:
    """Accepts connections on ``listening`` until closed; ``library`` makes a protocol for each connection.

    asyncio's own server does not report a TLS connection before its handshake has ended. Here each accepted
    socket gets a slot at once (``connection_limit``). It loses the slot at its end, or when another
    connection needs the slot.
    """

    def __init__(
        self,
        listening: socket.socket,
        library: Callable[[], asyncio.Protocol],
        limit: ConnectionLimit,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self._listening = listening
        self._library = library
        self._limit = limit
        self._ssl_context = ssl_context
        self._loop = asyncio.get_running_loop()
        self._opening: set[asyncio.Task[None]] = set()
        self._pause: asyncio.TimerHandle | None = None
        self._listen()

    def close(self) -> None:
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._listening)
        self._listening.close()
        for task in self._opening:
            task.cancel()

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(_AT_ONCE):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._limit.close_one()
                log.warning("a connection could not be accepted: %s", error)
                self._loop.remove_reader(self._listening)
                self._pause = self._loop.call_later(_LOOK_AGAIN_S, self._listen)
                return
            self._take(accepted, share_of(str(address[0])))

    def _take(self, accepted: socket.socket, address: str) -> None:
        slot = self._limit.admit(address, partial(end_connection, accepted))
        if slot is None:
            accepted.close()
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._opening.add(task := self._loop.create_task(self._open(accepted, slot)))
        task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket, slot: ConnectionSlot) -> None:
        is_open = False
        try:
            await self._loop.connect_accepted_socket(
                lambda: SlottedProtocol(self._library(), slot),
                accepted,
                ssl=self._ssl_context,
                ssl_handshake_timeout=None if self._ssl_context is None else _HANDSHAKE_S,
            )
            is_open = True
        except OSError as error:  # ssl.SSLError and TimeoutError are OSErrors too
            log.debug("a connection from %s was not opened: %s", slot.address, error)
        finally:
            if not is_open:
                slot.leave()
                accepted.close()


def share_of(address: str) -> str:
    """Return the key by which connections from ``address`` count: an IPv6 host may use a whole /64
    network."""
    parsed = parse_address(address)
    if isinstance(parsed, ipaddress.IPv6Address):
        return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
    return address if parsed is None else str(parsed)


def end_connection(accepted: socket.socket) -> None:
    """End a connection whose transport may not exist yet; both ends see the end."""
    with suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
