"""A relay in front of a replica: it forwards connections, and plays the faults of links without any right.

Peers dial the relay's address, a loopback address of its own, and the relay dials the replica at the same
port. A cut holds bytes back and closes no connection, as a network does that loses every packet.
"""

import asyncio
import contextlib
import re
import socket
from collections.abc import Callable, Mapping
from functools import partial

from msgspec import Struct

from fabric.errors import ConfigError
from fabric.runtime.tasks import BackgroundLoop

_PIECE_BYTES = 1 << 16
_DIAL_S = 2.0
# The dialler names itself within so many bytes.
_GREETING_BYTES = 4096
_NAME = re.compile(rb'"replica":"([^"\\\\]{1,64})"')
_HOLD_S = 0.05
# A piece of at least so many bytes is of a gradient; greetings and messages are shorter.
_GRADIENT_BYTES = 2048


class LinkWeather(Struct):
    """The faults of one replica's links, and what they have done. The relays read it for every piece."""

    holds_to: bool = False  # hold the bytes to the replica
    holds_from: bool = False  # hold the bytes from the replica
    delay_s: float = 0.0  # delay of each piece to the replica
    flips: bool = False  # flip one bit of the next large piece to the replica
    held: int = 0  # pieces that a cut has held back
    delayed: int = 0  # pieces that were delayed
    reset: int = 0  # connections that were reset
    flipped: int = 0  # bits that were flipped

    def clear(self) -> None:
        """End all faults; the counts stay."""
        self.holds_to = self.holds_from = self.flips = False
        self.delay_s = 0.0

    def passes(self, data: bytes) -> bytes:
        """Return ``data`` on its way to the replica, with one bit flipped if that fault is due."""
        if not self.flips or len(data) < _GRADIENT_BYTES:
            return data
        self.flips = False
        self.flipped += 1
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        return bytes(changed)


class _Connection(Struct, eq=False):
    """One forwarded connection. ``near`` leads to the dialler, ``far`` to the replica behind the relay."""

    near: asyncio.StreamWriter
    far: asyncio.StreamWriter
    dialler: LinkWeather  # the weather of the dialler, once its greeting has named it


class LinkRelay:
    """Listens at ``host`` and forwards each port of ``ports`` (0: any) to 127.0.0.1, to the port behind it.

    ``weathers`` holds the faults by replica: those of ``replica``, which is behind this relay, and those of
    the replicas that dial it.
    """

    def __init__(
        self, host: str, ports: Mapping[int, int], replica: str, weathers: Mapping[str, LinkWeather]
    ) -> None:
        self.weather = weathers[replica]
        self._weathers = weathers
        self._listeners: list[asyncio.Server] = []
        self._connections: list[_Connection] = []  # the oldest first
        self.ports: list[int] = []
        self._loop: BackgroundLoop | None = BackgroundLoop("fabric-relay")
        try:
            for port, behind in ports.items():
                listener = socket.create_server((host, port))
                self.ports.append(listener.getsockname()[1])
                serving = asyncio.start_server(partial(self._carry, behind), sock=listener)
                self._listeners.append(self._loop.start(serving).result())
        except OSError as error:
            self.close()
            raise ConfigError(
                f"the drill's relay cannot listen at {host} ({error.strerror}): end the other drill there"
            ) from error

    def close(self) -> None:
        if self._loop is not None:
            self._loop.start(self._end()).result()
            self._loop.close()
            self._loop = None

    def reset_one(self) -> bool:
        """End the oldest connection; return whether there was one."""
        ended = self._loop.start(self._end(1)).result() if self._loop is not None else 0
        self.weather.reset += ended
        return ended > 0

    async def _end(self, most: int | None = None) -> int:
        """End so many of the connections, None for all and the listeners; return how many there were."""
        for listener in self._listeners if most is None else ():
            listener.close()
        ended, self._connections[:most] = self._connections[:most], []
        for end in (end for link in ended for end in (link.near, link.far)):
            end.transport.abort()
        return len(ended)

    async def _carry(self, behind: int, source: asyncio.StreamReader, near: asyncio.StreamWriter) -> None:
        """Forward both directions of one connection until it ends."""
        try:
            async with asyncio.timeout(_DIAL_S):
                answers, far = await asyncio.open_connection("127.0.0.1", behind)
        except (OSError, TimeoutError, asyncio.CancelledError):
            near.close()
            return
        link = _Connection(near, far, LinkWeather())
        self._connections.append(link)
        # Asyncio of Python 3.11 would log the cancellation at the relay's end.
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(self._forward_in(link, source), self._forward_out(link, answers))
        if link in self._connections:
            self._connections.remove(link)
        near.close()
        far.close()

    async def _forward_in(self, link: _Connection, source: asyncio.StreamReader) -> None:
        """Forward from the dialler to the replica behind this relay."""
        begun = b""
        with contextlib.suppress(OSError):
            while data := await source.read(_PIECE_BYTES):
                if len(begun) < _GREETING_BYTES:
                    begun += data[:_GREETING_BYTES]
                    if name := _NAME.search(begun):
                        link.dialler = self._weathers.get(name[1].decode(), link.dialler)
                await self._while_held(lambda: self.weather.holds_to or link.dialler.holds_from)
                if self.weather.delay_s:
                    await asyncio.sleep(self.weather.delay_s)
                    self.weather.delayed += 1
                link.far.write(self.weather.passes(data))
                await link.far.drain()
            link.far.write_eof()

    async def _forward_out(self, link: _Connection, source: asyncio.StreamReader) -> None:
        """Forward from the replica behind this relay to the dialler."""
        with contextlib.suppress(OSError):
            while data := await source.read(_PIECE_BYTES):
                await self._while_held(lambda: self.weather.holds_from or link.dialler.holds_to)
                link.near.write(data)
                await link.near.drain()
            link.near.write_eof()

    async def _while_held(self, is_held: Callable[[], bool]) -> None:
        """Hold a piece while a cut does, and count it for each replica that is cut."""
        while is_held():
            for weather in self._weathers.values():
                weather.held += weather.holds_to or weather.holds_from
            await asyncio.sleep(_HOLD_S)
