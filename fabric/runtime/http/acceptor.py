"""Accepts a service's connections itself, so that each is counted before it costs more than a descriptor.

An event loop's own server hands a TLS connection on only when its handshake is over, and says nothing of
those that never come so far. Here each accepted socket has a seat at once (``connection_limit``). It loses
the seat when it ends, or when somebody else needs it.
"""

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from fabric.runtime.http.connection_limit import ConnectionLimit, ConnectionSlot

log = logging.getLogger(__name__)

# So many are accepted before the loop looks at those that are open.
_AT_ONCE = 64
_HANDSHAKE_S = 20.0
# Out of descriptors: nothing tells when one is free.
_LOOK_AGAIN_S = 0.05


class Seated(asyncio.Protocol):
    """The protocol of one connection: that of the library, and its seat."""

    def __init__(self, library: asyncio.Protocol, seat: ConnectionSlot) -> None:
        self.seat = seat
        self._library = library
        self.data_received = library.data_received  # type: ignore[method-assign]  # the only frequent call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._library.connection_made(transport)

    def eof_received(self) -> bool | None:
        return self._library.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self.seat.leave()
        self._library.connection_lost(error)

    def pause_writing(self) -> None:
        self._library.pause_writing()

    def resume_writing(self) -> None:
        self._library.resume_writing()


class Acceptor:
    """Accepts on ``listening`` until it is closed; ``library`` makes a protocol for each connection."""

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
        """Accept no more; connections that are open stay so."""
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
        seat = self._limit.admit(address, partial(_end, accepted))
        if seat is None:
            accepted.close()
            return
        accepted.setblocking(False)
        accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._opening.add(task := self._loop.create_task(self._open(accepted, seat)))
        task.add_done_callback(self._opening.discard)

    async def _open(self, accepted: socket.socket, seat: ConnectionSlot) -> None:
        is_open = False
        try:
            await self._loop.connect_accepted_socket(
                lambda: Seated(self._library(), seat),
                accepted,
                ssl=self._ssl_context,
                ssl_handshake_timeout=None if self._ssl_context is None else _HANDSHAKE_S,
            )
            is_open = True
        except OSError as error:  # also ssl.SSLError and TimeoutError
            log.debug("a connection from %s was not opened: %s", seat.address, error)
        finally:
            if not is_open:
                seat.leave()
                accepted.close()


def share_of(address: str) -> str:
    """Whose share of the room ``address`` takes: an IPv6 host has a whole /64 of addresses."""
    with suppress(ValueError):
        found = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(found, ipaddress.IPv6Address):
            if found.ipv4_mapped is not None:
                return str(found.ipv4_mapped)
            return str(ipaddress.IPv6Network((int(found) >> 64 << 64, 64)))
    return address


def _end(accepted: socket.socket) -> None:
    """End a connection whose transport may not exist yet: whoever reads it sees its end."""
    with suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
