"""``POST /v1/jobs/{job}/nodes``: where the launchers of a replica of several hosts meet (``protocol.nodes``).

A request is held until there is another order than the one that the launcher has, for some seconds at most.
The tables belong to one term of leadership: the next leader learns all from the launchers again.
"""

import asyncio
import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import replace

from fabric.errors import ProtocolError, Refused
from fabric.lighthouse.connections.validation import check_name
from fabric.lighthouse.http.operator_routes import body_of
from fabric.lighthouse.jobs.jobs import Jobs
from fabric.protocol.messages.wire import decode_as
from fabric.protocol.nodes import SPARE, NodeOrder, NodeSays, ReplicaNodes

HELD_S = 10.0
_SWEEP_S = 0.25
_MAX_REPLICAS = 1024
_EXAMPLE = '{"replica": "r0", "says": {"id": "...", "host": "node-7", "number": 1, ...}}'


class Meeting:
    """The launchers of one replica, and the requests that wait for their next order."""

    def __init__(self, note: Callable[[ReplicaNodes], None], on_end: Callable[[], None]) -> None:
        self.nodes = ReplicaNodes(lambda: uuid.uuid4().hex)
        self._note, self._on_end = note, on_end
        self._stage = self.nodes.stage
        # Each request that waits -> whether it must be answered although no order has changed.
        self.held: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self.is_over = False  # no launcher is left, or the term of its lighthouse has ended
        self._timer: asyncio.TimerHandle | None = None

    def look(self) -> None:
        """Wake the requests whose orders have changed, and look again soon."""
        if self.nodes.stage != self._stage:
            self._stage = self.nodes.stage
            self.wake(lambda _: True)
            self._note(self.nodes)
        if self._timer is None and self.nodes.launchers:
            self._timer = asyncio.get_running_loop().call_later(_SWEEP_S, self._sweep)
        elif not self.nodes.launchers:
            self._on_end()

    def wake(self, which: Callable[[Callable[[], bool]], bool]) -> None:
        """Answer the held requests for which this is true."""
        for waiter, is_urgent in self.held.items():
            if not waiter.done() and which(is_urgent):
                waiter.set_result(None)

    def _sweep(self) -> None:
        self._timer = None
        self.wake(lambda is_urgent: is_urgent())
        if not self.is_over:
            self.nodes.sweep(time.monotonic())
            self.look()


def words_of(body: dict[str, Any]) -> tuple[NodeSays, tuple[str, str, str] | None]:
    """Return what a launcher says, and the order that it knows. Raises ProtocolError."""
    says = decode_as(NodeSays, body.get("says"), "says")
    knows = decode_as(tuple[str, str, str] | None, body.get("knows"), "knows")  # type: ignore[arg-type]
    lost = says.end.lost if says.end is not None else ()
    words = (says.host, says.shape, says.address, says.gone, says.rack, says.device, *lost)
    if not "".join(words).isprintable():
        raise ProtocolError('"says" has characters that cannot be printed')
    return says, knows


class NodeMeetings:
    """The meetings of one lighthouse. ``term`` names the term in which it leads, None while it does not."""

    def __init__(self, jobs: Jobs, term: Callable[[], object]) -> None:
        self._jobs, self._term = jobs, term
        self._of_term: object = None
        self._meetings: dict[tuple[str, str], Meeting] = {}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Take what one launcher says, and answer with its next order."""
        body = await body_of(request, _EXAMPLE)
        job, replica = check_name("job", request.match_info["job"]), str(body.get("replica", ""))
        says, knows = words_of(body)
        if replica or says.number != SPARE:
            meetings = {replica: self._find(job, check_name("replica", replica))}
        else:  # a spare host for whichever replica needs one
            self._find_term()
            meetings = {name: x for (of_job, name), x in self._meetings.items() if of_job == job}
        shell = self._jobs.by_name.get(job)
        suspects = shell.core.evidence.suspect_hosts() if shell is not None else ()
        for meeting in meetings.values():
            meeting.nodes.hear(says, time.monotonic(), suspects)
            meeting.look()
        broken = True
        try:
            order = await self._next_order(request, job, meetings, says, knows)
            broken = False
        finally:
            for meeting in meetings.values():
                meeting.nodes.answered(says.id, time.monotonic(), broken=broken)
                meeting.look()
        return web.json_response(text=json.dumps(msgspec.to_builtins(order)))

    async def _next_order(
        self,
        request: web.Request,
        job: str,
        meetings: dict[str, Meeting],
        says: NodeSays,
        knows: tuple[str, str, str] | None,
    ) -> NodeOrder:
        transport = request.transport

        def is_urgent() -> bool:
            return (
                (transport is None or transport.is_closing())
                or self._term() != self._of_term
                or (not says.run and self._is_complete(job))
            )

        order = self._order(job, meetings, says)
        if order.key != knows or is_urgent():
            return order
        waiter = asyncio.get_running_loop().create_future()
        for meeting in meetings.values():
            meeting.held[waiter] = is_urgent
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(HELD_S):
                    await waiter
        finally:
            for meeting in meetings.values():
                meeting.held.pop(waiter, None)
        if transport is None or transport.is_closing():
            raise web.HTTPBadRequest(text="the launcher has closed its connection")
        return order if self._term() != self._of_term else self._order(job, meetings, says)

    def _order(self, job: str, meetings: dict[str, Meeting], says: NodeSays) -> NodeOrder:
        """The order of the first replica that needs this launcher."""
        if not says.run and self._is_complete(job):
            return NodeOrder("leave", f"job {job} is complete")
        now = time.monotonic()
        orders = [replace(x.nodes.order(says.id, now), replica=name) for name, x in meetings.items()]
        waits = NodeOrder("wait", "this host stands by as a spare host")
        return next(
            (order for order in orders if order.do != "wait"),
            next((order for order in orders if order.is_refusal or len(orders) == 1), waits),
        )

    def _is_complete(self, job: str) -> bool:
        shell = self._jobs.by_name.get(job)
        return bool(shell and shell.core.state.record and shell.core.state.record.complete)

    def _find_term(self) -> None:
        if self._term() != self._of_term:
            for meeting in self._meetings.values():
                meeting.is_over = True
                meeting.wake(lambda _: True)  # its requests ask the next leader
            self._meetings, self._of_term = {}, self._term()

    def _find(self, job: str, replica: str) -> Meeting:
        self._find_term()
        meeting = self._meetings.get((job, replica))
        if meeting is None:
            self._meetings = {key: x for key, x in self._meetings.items() if x.nodes.launchers}
            if len(self._meetings) >= _MAX_REPLICAS:
                raise Refused(f"the hosts of {_MAX_REPLICAS} replicas meet here: end one before {replica}")
            meeting = Meeting(lambda nodes: self._note(job, replica, nodes), lambda: self._end(job, replica))
            self._meetings[job, replica] = meeting
        # The hosts of a job that has not begun may all wait for one that never comes.
        self._jobs.find_or_make(job).connections.launchers[replica] = meeting.nodes
        return meeting

    def _end(self, job: str, replica: str) -> None:
        """Forget the hosts of a replica whose launchers have all left."""
        shell = self._jobs.by_name.get(job)
        if shell is not None and shell.connections.launchers.pop(replica, None) is not None:
            self._jobs.release(shell)

    def _note(self, job: str, replica: str, nodes: ReplicaNodes) -> None:
        """Record in the job's events that an attempt begins, or why it fails."""
        number, words, launchers = nodes.attempt
        for (of_job, other), meeting in self._meetings.items():
            if of_job == job and other != replica:
                for launcher in launchers:
                    meeting.nodes.launchers.pop(launcher, None)  # the spare host is this replica's now
        job_shell = self._jobs.by_name.get(job)
        _, why, is_over = nodes.stage
        if job_shell is None or is_over:
            return
        changed = [text for node, text in words.items() if node < 8 or " in the place of " in text]
        text = why or f"attempt {number}: {', '.join(changed[:16])}"
        job_shell.note("nodes fail" if why else "nodes start", replica, text)
        if nodes.is_elsewhere and not why:
            job_shell.host_replaced(replica)
