"""A launcher's words to the lighthouse: how its attempts end, and what it says to its replica's other hosts.

A thread of its own carries them. So a lighthouse that does not answer, or a name that nobody looks up, delays
no signal, no restart and no output.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Coroutine, Mapping
from typing import Any

import aiohttp
from msgspec import to_builtins
from msgspec.structs import replace

import fabric
from fabric.cli.launch.attempt import Place
from fabric.cli.launch.devices import device_kind
from fabric.errors import FabricError, Unreachable
from fabric.model import Value, counted, printable, shortened
from fabric.protocol.messages.wire import decode_value
from fabric.protocol.nodes import NodeEnd, NodeOrder, NodeSays
from fabric.runtime.config import advertised_host, settings
from fabric.runtime.http.lighthouse_client import Lighthouses
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.rank_layout import RankLayout
from fabric.runtime.tasks import BackgroundLoop

# A report that no lighthouse has taken by then is old, and is dropped.
_TRIES_S = 30.0
_REPORT_PAUSE_S = 2.0
_REPORT_ANSWER_S = 5.0
LAST_REPORT_S = 15.0  # a launcher that gives up waits at most this long for its last report
_LONGEST = 300  # characters of a reason that the lighthouse takes

_ORDER_S = 20.0  # more than a lighthouse holds a request
_ORDER_PAUSE_S = 0.5  # between two requests that failed; the first one is repeated sooner, for BROKEN_S
_AGAIN_S = 0.05
LAST_WORDS_S = 3.0  # a launcher that ends waits at most this long until the other hosts know

log = logging.getLogger(__name__)


class PatientLoop(asyncio.SelectorEventLoop):
    """An event loop on which a name that nobody looks up does not hold back the end of the process.

    The interpreter waits at its end for the threads in which asyncio's own loop looks up names.
    """

    async def getaddrinfo(self, host: Any, port: Any, **options: int) -> Any:
        looked_up: concurrent.futures.Future[Any] = concurrent.futures.Future()
        looked_up.set_running_or_notify_cancel()

        def look_up() -> None:
            try:
                looked_up.set_result(socket.getaddrinfo(host, port, **options))
            except (OSError, UnicodeError) as error:
                looked_up.set_exception(error)

        threading.Thread(target=look_up, name="fabric-look-up", daemon=True).start()
        return await asyncio.wrap_future(looked_up, loop=self)


class WordsThread:
    """The thread that carries words, from the first ones on.

    ``descriptor`` is an eventfd, which is readable when some have arrived, or an order has.
    """

    def __init__(self) -> None:
        self._loop: BackgroundLoop | None = None
        self.descriptor = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def start(self, work: Coroutine[Any, Any, None]) -> "concurrent.futures.Future[None]":
        """Begin ``work``; cancelling the future cancels it."""
        if self._loop is None:
            self._loop = BackgroundLoop("fabric-words", PatientLoop())
        carried = self._loop.start(work)
        carried.add_done_callback(self._note_end)
        return carried

    def close(self) -> None:
        """Cancel all work."""
        if self._loop is not None:
            self._loop.close()

    def _note_end(self, carried: "concurrent.futures.Future[None]") -> None:
        if not carried.cancelled() and (error := carried.exception()) is not None:
            log.error("the launcher's words to the lighthouse ended by a defect", exc_info=error)
        os.eventfd_write(self.descriptor, 1)


class AttemptReport(Value):
    """How an attempt ended, so that people see replicas that never attach."""

    attempt: int
    why: str
    last_line: str  # of standard error; empty: the launcher does not read it
    gave_up: bool  # the launcher starts the replica no more
    stopped: int  # the signal that ended the launcher; 0: none


class Reporter:
    """Sends reports to the leader one at a time; a newer report ends the sending of the older one."""

    def __init__(self, environment: Mapping[str, str], thread: WordsThread) -> None:
        self._environment = {**environment, "FABRIC_LAYOUT": ""}  # it may be a list of several
        self._thread = thread
        self._sending: concurrent.futures.Future[None] | None = None

    def tell(self, report: AttemptReport) -> "concurrent.futures.Future[None]":
        """Begin to report the end of an attempt; return what is done when it has arrived."""
        if self._sending is not None:
            self._sending.cancel()
        body = to_builtins(replace(report, why=shortened(report.why, _LONGEST)))
        self._sending = self._thread.start(self._send(body))
        return self._sending

    async def _send(self, body: dict[str, Any]) -> None:
        with contextlib.suppress(FabricError):  # the lighthouse knows no such job, or is of an older release
            chosen = settings(self._environment)
            token = TokenFile(chosen.token_file)  # it may be replaced while no lighthouse leads
            lighthouses = Lighthouses(chosen.lighthouse, chosen.job, token, chosen.tls)
            body |= {"replica": chosen.replica, "host": advertised_host(chosen), "spare": chosen.spare}
            until = time.monotonic() + _TRIES_S
            while time.monotonic() < until:
                try:
                    path = lighthouses.path("launcher")
                    async with lighthouses.open(path, body, total_s=_REPORT_ANSWER_S):
                        return
                except Unreachable:
                    await asyncio.sleep(_REPORT_PAUSE_S)


class OtherHosts:
    """The launcher's line to its replica's other hosts (``protocol.nodes``), and its place among them."""

    def __init__(self, environment: Mapping[str, str], nodes: int, node: int, thread: WordsThread) -> None:
        chosen = settings({"FABRIC_REPLICA": "spare-node", **environment, "FABRIC_LAYOUT": ""})
        token = TokenFile(chosen.token_file)
        self._lighthouses = Lighthouses(chosen.lighthouse, chosen.job, token, chosen.tls)
        self._thread = thread
        self._replica = environment.get("FABRIC_REPLICA", "")  # a spare host belongs to none yet
        self._carried: concurrent.futures.Future[None] | None = None
        kind, count, device_gb = device_kind(environment)
        self.says = NodeSays(
            uuid.uuid4().hex,
            advertised_host(chosen),
            node,
            nodes,
            "",
            "none",
            rack=chosen.rack,
            device=kind,
            devices=count,
            device_gb=device_gb,
            memory_gb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9,
        )
        self.own_ranks = range(0)
        self._heard: tuple[NodeSays | None, NodeOrder] = None, NodeOrder("wait")  # an order answers to words

    @property
    def order(self) -> NodeOrder:
        """The newest order, unless it answers to earlier words."""
        says, order = self._heard
        return order if says is self.says else NodeOrder("wait")

    def wait_for_attempt(self, layout: RankLayout, port: int) -> None:
        """Say that this host waits for the next attempt; rank 0 would listen on ``port``."""
        count = layout.ranks // self.says.nodes
        shape = f"{self.says.nodes} nodes of {counted(count, 'rank')} ({layout}), fabric {fabric.__version__}"
        self.own_ranks = range(count)
        self._say(shape=shape, address=f"{self.says.host}:{port}", run="", end=None)

    def take_place(self, order: NodeOrder) -> Place:
        """Obey an order to start, and return this host's place."""
        first = order.node * len(self.own_ranks)
        self.own_ranks = range(first, first + len(self.own_ranks))
        self._replica = order.replica or self._replica
        self._say(run=order.run, attempt=order.attempt, node=order.node, instead=order.instead)
        host, _, port = order.head.rpartition(":")
        return Place(order.node, self.says.nodes, host, int(port))

    def tell_end(self, end: NodeEnd) -> None:
        """Say how this host's ranks ended."""
        self._say(end=end)

    def leave(self, why: str) -> "concurrent.futures.Future[None]":
        """Say why this launcher ends. The future is done when that has arrived."""
        return self._say(gone=why)

    def _say(self, **news: Any) -> "concurrent.futures.Future[None]":
        """Replace what the others hear of this host."""
        self.says = replace(self.says, **news)
        if self._carried is not None:
            self._carried.cancel()
        body = {"replica": self._replica, "says": to_builtins(self.says)}
        self._carried = self._thread.start(self._carry(self.says, body))
        return self._carried

    async def _carry(self, says: NodeSays, body: dict[str, Any]) -> None:
        """Say these words, and hear orders until other words replace them."""
        knows: tuple[str, ...] | None = None
        while True:
            order = await self._ask(body | {"knows": knows})
            if says.gone:
                return
            if order.key != knows:
                self._heard = says, replace(order, why=printable(order.why))
                os.eventfd_write(self._thread.descriptor, 1)
            knows = order.key

    async def _ask(self, body: dict[str, Any]) -> NodeOrder:
        """Return the next order; while no lighthouse answers, ask again."""
        reported, pause_s = "", _AGAIN_S
        while True:
            try:
                path = self._lighthouses.path("nodes")
                async with self._lighthouses.open(path, body, total_s=_ORDER_S) as answer:
                    return decode_value(NodeOrder, await answer.read(), "the order")
            except (FabricError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
                if isinstance(error, FabricError) and str(error) != reported:
                    reported = str(error)
                    log.warning("this replica's hosts cannot meet: %s", reported)
                await asyncio.sleep(pause_s)
                pause_s = _ORDER_PAUSE_S
