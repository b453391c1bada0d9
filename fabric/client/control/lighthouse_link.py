"""The leader session: one WebSocket, kept open to the lighthouse that leads.

The link tries the addresses in turn, the last leader first. An attempt lasts under a second, and jittered
back-off follows it. Before the first session a refusal (wrong token, unknown job) ends the process with the
refusal's sentence, unless another address admits the process. After the first session a refusal only leads to
the next attempt: another program may hold the address for a while, or a lighthouse may not have the job's new
token yet."""

import asyncio
import logging
import math
import random
from collections.abc import Callable
from functools import partial

import aiohttp

from fabric.errors import FabricError, ProtocolError
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import wire
from fabric.protocol.messages.network import HeartbeatAck, LeaderMessage, MemberMessage
from fabric.runtime.config import Settings
from fabric.runtime.http.lighthouse_client import LighthouseDialer, come_back_s, describe, permanent_cause
from fabric.runtime.http.token_file import TokenFile

log = logging.getLogger(__name__)

_CONNECT_S = 0.9
_BACKOFF_S = (0.05, 0.5)
_QUIET_S = 3.0  # Problems are logged only after this time: the lighthouse may start together with its job
_LEADER_KINDS = LeaderMessage.__args__


class LighthouseLink:
    """Feeds LeaderConnected, FromLeader and LeaderLost.

    It drops messages while no session is open: the core repeats the necessary messages when a session opens.
    A process that its launcher has ``restarted`` looks for a lighthouse without end: the address was right
    before, and the launcher would take an error for final.
    """

    def __init__(self, settings: Settings, restarted: bool = False) -> None:
        self._replica = settings.replica
        self._urls = list(settings.lighthouse)
        self._contact_s = math.inf if restarted else settings.contact_s
        self._tls = settings.tls
        self._dialer = LighthouseDialer(self._urls, TokenFile(settings.token_file), self._tls, _CONNECT_S)
        query = f"replicas={settings.replicas}&replica={settings.replica}"
        self._path = f"/v1/jobs/{settings.job}/session?{query}"
        self._outbox: asyncio.Queue[bytes] | None = None
        self.waiting_for = ""  # the lighthouse's newest sentence on what the job waits for
        self._problem = ""
        self._reached = False  # a lighthouse has opened a session, or has asked to come back later
        self._let_in = False  # whether a lighthouse has admitted a session of this process
        self._refused: dict[str, str] = {}  # address -> its refusal, until a lighthouse admits this process
        self._mistaken: set[str] = set()  # addresses whose TLS settings do not fit this process's settings
        self._logged: set[str] = set()
        self._begun = 0.0

    @property
    def url(self) -> str:
        """The lighthouse of the open session, or the next one to try."""
        return self._urls[0]

    @property
    def is_connected(self) -> bool:
        return self._outbox is not None

    def send(self, message: MemberMessage) -> None:
        """Queue one message for the leader."""
        if self._outbox is not None:
            self._outbox.put_nowait(wire.encode(message))

    async def run(self, feed: Callable[[io.Event], None], on_refused: Callable[[str], None]) -> None:
        """Keep a session open until cancelled.

        Calls ``on_refused`` and returns when the first contact is refused, fails for good or takes too long.
        """
        self._begun = asyncio.get_running_loop().time()
        deadline = self._begun + self._contact_s
        jitter = random.Random()  # noqa: S311  (back-off, not a secret)
        async with self._dialer.client() as http:
            while True:
                url = self._urls[0]
                try:
                    await self._session(http, url, feed)
                except aiohttp.WSServerHandshakeError as error:
                    if error.status == 429:
                        # Thousands of members may come back at once. The lighthouse's answer gives a delay;
                        # jitter spreads the attempts.
                        self._reached = True
                        await asyncio.sleep(come_back_s(error.headers or {}) * jitter.uniform(0.5, 1.0))
                        continue
                    self._note_answer(url, error.status)
                except (aiohttp.ClientError, OSError, TimeoutError) as error:
                    self._refused.pop(url, None)
                    self._note_problem(error)
                except FabricError as error:
                    self._problem = str(error)
                if not self._let_in and (gave_up := self._given_up(deadline)):
                    on_refused(gave_up)
                    return
                self._urls.append(self._urls.pop(0))
                await asyncio.sleep(jitter.uniform(*_BACKOFF_S))

    def _note_answer(self, url: str, status: int) -> None:
        """Note that an address answered without a session."""
        leader = self._dialer.at  # the leader's address, to which ``url`` may have redirected
        self._problem = f"{leader} answered {status}"
        if status not in (400, 401, 403, 404):
            self._refused.pop(url, None)
            return
        self._problem = _refusal(leader, status)
        if not self._let_in:
            self._refused[url] = self._refused[leader] = self._problem
        elif self._problem not in self._logged:
            self._logged.add(self._problem)
            log.warning("fabric: %s: goes on training without a lighthouse: %s", self._replica, self._problem)

    def _note_problem(self, error: Exception) -> None:
        """Note why no session was opened; log it once where no lighthouse has answered for a while."""
        dialled = self._dialer.at
        self._problem = f"{dialled} cannot be reached ({describe(error, dialled, self._tls)})"
        if permanent_cause(error, self._tls):
            self._mistaken.add(dialled)
        waited_s = asyncio.get_running_loop().time() - self._begun
        if not self._reached and waited_s >= _QUIET_S and self._problem not in self._logged:
            self._logged.add(self._problem)
            until = f"up to {self._contact_s:g} s"
            if self._contact_s == math.inf:
                until = "it waits until one is there, because its launcher has restarted it"
            log.warning("fabric: %s: no lighthouse yet: %s; %s", self._replica, self._problem, until)

    def _given_up(self, deadline: float) -> str:
        """Return why the first contact has failed for good, or an empty string. Waiting does not mend a
        mistake in the TLS settings."""
        refused = [self._refused[url] for url in self._urls if url in self._refused]
        if refused and self._mistaken.issuperset(url for url in self._urls if url not in self._refused):
            return refused[0]
        if self._mistaken.issuperset(self._urls):
            return f"no lighthouse can be spoken to: {self._problem}"
        if not self._reached and asyncio.get_running_loop().time() > deadline:
            return (
                f"no lighthouse was found within {self._contact_s:g} s ({self._problem}): "
                "check FABRIC_LIGHTHOUSE, and that a lighthouse runs there"
            )
        return ""

    async def _session(self, http: aiohttp.ClientSession, url: str, feed: Callable[[io.Event], None]) -> None:
        async with asyncio.timeout(_CONNECT_S * 3):
            dial = partial(http.ws_connect, max_msg_size=wire.MAX_BYTES)
            socket = await self._dialer.follow(url, self._path, dial)
        self._urls = [self._dialer.at, *(other for other in self._urls if other != self._dialer.at)]
        self._reached = self._let_in = True
        self._refused.clear()
        self._logged.clear()
        self._outbox = asyncio.Queue()
        self._problem = ""

        async def send_all(outbox: asyncio.Queue[bytes]) -> None:
            while True:
                data = await outbox.get()
                await socket.send_str(data.decode())

        sender = asyncio.get_running_loop().create_task(send_all(self._outbox))
        feed(io.LeaderConnected())
        try:
            async for message in socket:
                if message.type not in (aiohttp.WSMsgType.TEXT, aiohttp.WSMsgType.BINARY):
                    raise ProtocolError(f"{url} sent {message.type.name} where a message was expected")
                decoded = wire.decode(message.data)
                if not isinstance(decoded, _LEADER_KINDS):
                    raise ProtocolError(f"{url} sent a {type(decoded).__name__}, which is not for members")
                if isinstance(decoded, HeartbeatAck):
                    self.waiting_for = decoded.waiting_for
                feed(io.FromLeader(decoded))
        finally:
            self._outbox = None
            sender.cancel()
            await socket.close()
            feed(io.LeaderLost())
        # The lighthouse ended the session without an error (fail-over, restart): try its address last.

    async def drain(self, within_s: float) -> None:
        """Wait until all sent messages have left, at most ``within_s``."""
        deadline = asyncio.get_running_loop().time() + within_s
        while self._outbox is not None and not self._outbox.empty():
            if asyncio.get_running_loop().time() > deadline:
                return
            await asyncio.sleep(0.005)


def _refusal(url: str, status: int) -> str:
    if status in (401, 403):
        return f"the lighthouse at {url} refused the token: give FABRIC_TOKEN_FILE the job's token"
    if status == 404:
        return f"{url} is not a lighthouse: check FABRIC_LIGHTHOUSE"
    return (
        f"the lighthouse at {url} refused the job or the replica count: check FABRIC_JOB and FABRIC_REPLICAS"
    )
