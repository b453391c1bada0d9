"""Reports the trainers' statuses to the lighthouse every quarter of a second (in large jobs once a second).
A report says in few bytes that nothing has changed.

The trainer's own heartbeats stop when C code holds the interpreter's lock, when the trainer is stopped, and
when it is killed. The checkpoint server is small and rarely busy, so its status is a second source of
liveness. It sends a change of the trainer's state at once; its silence means that the host is in trouble. It
connects to one lighthouse at a time; a lighthouse that does not lead redirects it to the leader. When a
connection ends, it tries the next address.
"""

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable
from itertools import cycle
from urllib.parse import quote

import aiohttp
from msgspec.structs import replace

from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.errors import ProtocolError, Unreachable
from fabric.protocol.messages.network import (
    EpochNotice,
    ServerStatus,
    StatusTerms,
    StatusUnchanged,
    TrainerStatus,
)
from fabric.protocol.messages.wire import decode, encode
from fabric.runtime.http.lighthouse_client import LighthouseDialer, come_back_s
from fabric.runtime.http.token_file import TokenFile

log = logging.getLogger(__name__)

# The lighthouse's replies are small; a larger reply comes from another program.
_MAX_REPLY_BYTES = 64 * 1024
# The longest status period that a lighthouse may ask for: a lighthouse takes longer silence for death.
_MOST_EVERY_S = 1.0
_PERIOD_S = 0.25  # seconds between two status messages
_CONNECT_S = 2.0
_SEND_S = 2.0
_HEARTBEAT_S = 3.0  # a lighthouse silent for longer makes the sender try the next one
# The shortest and the longest pause before another attempt to connect.
_LEAST_PAUSE_S, _MOST_PAUSE_S = 0.05, 0.8


class StatusSender:
    """Keeps one of the lighthouses of ``settings`` informed, until cancelled.

    ``compose`` makes the status message with a number. ``changed`` is set when a trainer's state may have
    changed between two messages. ``heard`` takes each epoch notice.
    """

    def __init__(
        self,
        settings: ServerSettings,
        token: TokenFile | str | None,
        compose: Callable[[int], TrainerStatus | ServerStatus],
        changed: asyncio.Event,
        heard: Callable[[EpochNotice], None],
    ) -> None:
        job, replica = quote(settings.job, safe=""), quote(settings.replica, safe="")
        self._path = f"/v1/jobs/{job}/trainer-status?replica={replica}"
        self._urls = [url.rstrip("/") for url in settings.lighthouse]
        self._compose, self._changed, self._heard = compose, changed, heard
        self._chance = random.Random()  # noqa: S311 - spreads reconnections, protects nothing
        self._dialer = LighthouseDialer(settings.lighthouse, token, settings.tls, _CONNECT_S)
        self._number = 0
        self._every_s, self._takes_unchanged = _MOST_EVERY_S, False  # until the lighthouse says otherwise
        self._said = ""
        self._at = ""
        self._problem = ""

    def describe(self) -> dict[str, object]:
        """Return the connected lighthouse's URL (or ""), the number of sent messages, and the current
        problem."""
        return {"lighthouse": self._at, "beats": self._number, "problem": self._problem}

    async def run(self) -> None:
        """Connect, send statuses until the connection ends, and connect again, for ever."""
        pause_s = _LEAST_PAUSE_S
        async with self._dialer.client() as client:
            for url in cycle(self._urls):
                beats = self._number
                try:
                    async with asyncio.timeout(2 * _CONNECT_S):
                        # The WebSocket's own ping detects a silent lighthouse.
                        socket = await self._dialer.follow(
                            url,
                            self._path,
                            client.ws_connect,
                            heartbeat=_HEARTBEAT_S,
                            max_msg_size=_MAX_REPLY_BYTES,
                        )
                    try:
                        self._at, self._problem = self._dialer.at, ""
                        self._every_s, self._takes_unchanged = _MOST_EVERY_S, False
                        await self._beat(socket)
                    finally:
                        self._at = ""
                        with contextlib.suppress(TimeoutError):
                            async with asyncio.timeout(_SEND_S):
                                await socket.close()
                    self._say("the lighthouse closed the connection")
                except aiohttp.WSServerHandshakeError as error:
                    self._say(f"it answered {error.status}")
                    if error.status == 429:  # many servers reconnect at once; the answer names a delay
                        away_s = come_back_s(error.headers or {})
                        await asyncio.sleep(away_s * self._chance.uniform(0.5, 1.0))
                except (aiohttp.ClientError, OSError, TimeoutError, ValueError, Unreachable) as error:
                    self._say(f"{type(error).__name__}: {error}")
                if self._number > beats + 1:
                    pause_s = _LEAST_PAUSE_S
                await asyncio.sleep(pause_s * self._chance.uniform(0.5, 1.0))
                pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    async def _beat(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        """Send trainer statuses on ``socket`` until it ends."""
        replies = asyncio.create_task(_listen(socket, self._hear))
        loop = asyncio.get_running_loop()
        lasting: TrainerStatus | ServerStatus | None = None  # of the status that was sent last
        try:
            while not replies.done():
                due = loop.time() + max(_PERIOD_S, self._every_s)
                self._changed.clear()
                self._number += 1
                status = self._compose(self._number)
                before, lasting = lasting, _lasting(status)
                is_same = self._takes_unchanged and lasting == before
                says = StatusUnchanged(self._number) if is_same else status
                async with asyncio.timeout(_SEND_S):
                    await socket.send_str(encode(says).decode())
                self._said = ""
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout_at(due):
                        await self._changed.wait()
        finally:
            replies.cancel()
            await asyncio.wait({replies})

    def _hear(self, notice: EpochNotice | StatusTerms) -> None:
        """Take a notice or the terms; both set the period of statuses, which is longer in large jobs."""
        self._every_s = min(notice.every_s, _MOST_EVERY_S)
        if isinstance(notice, EpochNotice):
            self._heard(notice)
        else:
            self._takes_unchanged = True

    def _say(self, why: str) -> None:
        """Log ``why`` unless it is the reason that was logged last."""
        self._problem = f"{self._dialer.at}: {why}"
        if why != self._said:
            self._said = why
            log.warning("the status connection to %s is interrupted: %s", self._dialer.at, why)


def _lasting(status: TrainerStatus | ServerStatus) -> TrainerStatus | ServerStatus:
    """Return the status without its number and without ages, which grow by themselves."""
    if isinstance(status, ServerStatus):
        return ServerStatus(tuple(replace(x, number=0, ages_s=()) for x in status.statuses))
    return replace(status, number=0, ages_s=())


async def _listen(
    socket: aiohttp.ClientWebSocketResponse, heard: Callable[[EpochNotice | StatusTerms], None]
) -> None:
    """Pass on epoch notices and terms until the connection ends; ignore messages of newer lighthouses."""
    async for message in socket:
        with contextlib.suppress(ProtocolError):
            notice = decode(message.data) if message.type is aiohttp.WSMsgType.TEXT else None
            if isinstance(notice, EpochNotice | StatusTerms):
                heard(notice)
