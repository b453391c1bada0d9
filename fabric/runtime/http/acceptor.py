"""Accepts a service's connections, and counts each before it costs more than a descriptor.

asyncio's own server does not report a TLS connection before its handshake has ended. Here each accepted
socket gets a slot at once (``connection_limit``). It loses the slot at its end, or when another connection
needs the slot.
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

# The most connections that one turn accepts before the event loop serves the open connections.
_AT_ONCE = 64
_HANDSHAKE_S = 20.0
# The pause after the process ran out of file descriptors, because no event reports a free descriptor.
_LOOK_AGAIN_S = 0.05


class SlottedProtocol(asyncio.Protocol):
    """The protocol object of one connection, from the HTTP library, with the connection's slot."""

    def __init__(self, library: asyncio.Protocol, slot: ConnectionSlot) -> None:
        self.slot = slot
        self._library = library
        self.data_received = library.data_received  # type: ignore[method-assign]  # the only frequent call

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._library.connection_made(transport)

    def eof_received(self) -> bool | None:
        return self._library.eof_received()

    def connection_lost(self, error: Exception | None) -> None:
        self.slot.leave()
        self._library.connection_lost(error)

    def pause_writing(self) -> None:
        self._library.pause_writing()

    def resume_writing(self) -> None:
        self._library.resume_writing()


class Acceptor:
    """Accepts connections on ``listening`` until closed; ``library`` makes a protocol for each connection."""

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
        """Stop accepting; open connections stay open."""
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
        slot = self._limit.admit(address, partial(_end, accepted))
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
    with suppress(ValueError):
        parsed = ipaddress.ip_address(address.partition("%")[0])
        if isinstance(parsed, ipaddress.IPv6Address):
            if parsed.ipv4_mapped is not None:
                return str(parsed.ipv4_mapped)
            return str(ipaddress.IPv6Network((int(parsed) >> 64 << 64, 64)))
    return address


def _end(accepted: socket.socket) -> None:
    """End a connection whose transport may not exist yet; the peer sees the end."""
    with suppress(OSError):
        accepted.shutdown(socket.SHUT_RDWR)
