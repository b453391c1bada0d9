"""The lighthouse's HTTP: JSON for people with `curl`, two WebSockets for members, metrics.

Only the leader knows the jobs, so a follower redirects to it with 307. While no lighthouse leads the answer
is 503 with the time to come back. Every instance has its own ``/healthz`` and ``/metrics``.
"""

import asyncio
import json
import signal
import time
from collections.abc import Iterable
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec import field, to_builtins

from fabric.errors import ProtocolError
from fabric.lighthouse.connections.connection import AdmissionQueue
from fabric.lighthouse.connections.validation import check_name
from fabric.lighthouse.election import Election, StoreProbe
from fabric.lighthouse.history.recovery import LaunchReport, RecoveryRecord
from fabric.lighthouse.history.slowdowns import SlowdownRecord
from fabric.lighthouse.http import dashboard
from fabric.lighthouse.http.job_status import StatusCache, job_line, job_text
from fabric.lighthouse.http.node_meeting import NodeMeetings
from fabric.lighthouse.http.operator_routes import add_commands, add_drills, body_of, find_job, text_of
from fabric.lighthouse.http.tokens import Tokens, TokenTries, is_in_scope, token_required
from fabric.lighthouse.http.websockets import SessionSocket, StatusSocket
from fabric.lighthouse.jobs.job import Job
from fabric.lighthouse.jobs.job_history import PIECE, JobEvent
from fabric.lighthouse.jobs.jobs import Jobs
from fabric.lighthouse.telemetry import CONTENT_TYPE, LighthouseMetrics
from fabric.model import Value
from fabric.runtime.http.http_service import (
    Handler,
    errors_as_json,
    json_error,
    pages_kept_out,
    query_integer,
)

# The status of each job at the end of this lighthouse's term, for people while no lighthouse leads.


class LastPicture:
    """Each answer has its time in ``as_of`` and why the term ended in ``not_led_because``."""

    def __init__(self) -> None:
        self._lines: dict[str, dict[str, Any]] = {}
        self._views: dict[str, str] = {}
        self._task: asyncio.Task[None] | None = None

    def take(self, jobs: Jobs, election: Election, reason: str) -> None:
        """Keep the status of all jobs; the term ends for ``reason``.

        Only the lines are made at once: the lease is given back and the members leave in the same turns.
        """
        if not jobs.by_name:
            return
        date = {"as_of": time.time(), "not_led_because": reason}
        where = {**_answered_by(election), "token_for_servers": False}
        self._lines = {name: job_line(job) | date for name, job in jobs.by_name.items()}
        self._views = {}
        self._task = asyncio.get_running_loop().create_task(self._describe(dict(jobs.by_name), where))

    async def _describe(self, jobs: dict[str, Job], where: dict[str, Any]) -> None:
        views, lines = self._views, self._lines
        for name, job in jobs.items():
            views[name] = await job_text(job, lines[name] | where)

    def answer(self, request: web.Request) -> web.Response | None:
        """Answer the request for the last picture of one job or all; None: there is no such picture."""
        if request.method != "GET" or "last" not in request.query or not self._lines:
            return None
        if request.path == "/v1/jobs":
            return web.json_response([x for name, x in self._lines.items() if is_in_scope(request, name)])
        name = request.match_info.get("job", "")
        if request.path != f"/v1/jobs/{name}":
            return None
        view = self._views.get(name)
        if view is None and name in self._lines:
            return None
        return web.json_response(text=view) if view else json_error(404, f"there was no job {name}")


def _answered_by(election: Election) -> dict[str, Any]:
    """Return which lighthouse answers, over which store."""
    term = election.term
    revision, store_id = (term.revision, term.store_id) if term is not None else (0, "")
    return {"lighthouse": {**to_builtins(election.me), "term": revision}, "store": {"id": store_id}}


# Every lighthouse, leader or not, answers these paths without a token: the answers reveal nothing of a job.
OPEN_PATHS = frozenset({"/livez", "/readyz", "/healthz", "/metrics"}) | dashboard.OPEN_PATHS
MAX_BODY_BYTES = 64 * 1024
# Without a leader a client should ask again after this many seconds; an election takes about one lease.
RETRY_AFTER_S = 1
_MAX_ID = 2**62
_STOPPED_BY = {0, *signal.Signals}


class LighthouseParts(Value):
    """The parts of a lighthouse that routes use."""

    election: Election
    jobs: Jobs
    metrics: LighthouseMetrics
    probe: StoreProbe
    admissions: AdmissionQueue = field(default_factory=AdmissionQueue)
    last: LastPicture = field(default_factory=LastPicture)

    def __post_init__(self) -> None:
        self.admissions.on_overload = self.jobs.overloaded
        self.jobs.on_end = lambda reason: self.last.take(self.jobs, self.election, reason)

    @property
    def leads(self) -> bool:
        term = self.election.term
        return term is not None and term.in_force()

    @property
    def serves(self) -> bool:
        """Whether this instance leads and has read its jobs' records, so that it can answer for them."""
        return self.leads and self.jobs.loaded.is_set()


def make_app(parts: LighthouseParts, tokens: Tokens | None, names: Iterable[str] = ()) -> web.Application:
    """Make the application. All paths except OPEN_PATHS need one of ``tokens`` (None: no path needs a token).

    ``names``: its host names besides loopback.
    """
    tokens, tries = tokens or Tokens(None), TokenTries()
    app = web.Application(
        middlewares=[
            errors_as_json,
            *([pages_kept_out(names)] if tokens.is_open else []),
            token_required(tokens, OPEN_PATHS, dashboard.scope_of_login, tries, parts.jobs.token_refused),
            _leader_only(parts),
        ],
        client_max_size=MAX_BODY_BYTES,
    )
    routes = LighthouseRoutes(parts)
    add = app.router.add_get
    app.on_response_prepare.append(_keep_no_answer)
    add("/livez", routes.alive)
    add("/readyz", routes.ready)
    add("/healthz", routes.health)
    add("/metrics", routes.scrape)
    add("/v1/jobs", routes.list_jobs)
    add("/v1/jobs/{job}", routes.show_job)
    add("/v1/jobs/{job}/events", routes.events)
    add("/v1/jobs/{job}/recoveries", routes.recoveries)
    add("/v1/jobs/{job}/slowdowns", routes.slowdowns)
    add("/v1/jobs/{job}/hosts", routes.hosts)
    add("/v1/jobs/{job}/live", routes.live)
    add("/v1/jobs/{job}/session", routes.session)
    add("/v1/jobs/{job}/trainer-status", routes.trainer_status)
    app.router.add_post("/v1/jobs/{job}/launcher", routes.launcher)
    app.router.add_post("/v1/jobs/{job}/nodes", NodeMeetings(parts.jobs, lambda: parts.election.term).answer)
    dashboard.add_routes(app, tokens, tries)
    add_commands(app, parts.jobs)
    add_drills(app, parts.jobs, tokens)
    return app


async def _keep_no_answer(request: web.Request, response: web.StreamResponse) -> None:
    """Forbid proxies to cache answers that need a token."""
    if request.path.startswith("/v1/"):
        response.headers.setdefault("Cache-Control", "no-store")


def _leader_only(parts: LighthouseParts) -> Middleware:
    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path in OPEN_PATHS or parts.serves:
            return await handler(request)
        other = None if parts.leads else parts.election.other
        if other is not None:
            target = other.url.rstrip("/") + request.rel_url.raw_path_qs
            sentence = f"the lighthouse at {other.url} leads: ask there"
            return json_error(307, sentence, headers={"Location": target}, details={"leader": other.url})
        if not parts.leads and (picture := parts.last.answer(request)) is not None:
            return picture
        sentence = "this lighthouse has just been elected and reads the jobs' records: try again in a moment"
        if not parts.leads:
            store = f"the store {parts.probe.name}".rstrip()
            sentence = (
                f"no lighthouse leads at the moment: try again soon, and look at {store} if this stays so"
            )
            if not await parts.probe.ask():
                sentence = (
                    f"no lighthouse leads, because {store} does not answer: start it, or mend its network"
                )
        return json_error(503, sentence, headers={"Retry-After": str(RETRY_AFTER_S)})

    return check


async def _write_list(response: web.StreamResponse, events: list[JobEvent]) -> None:
    """Write a JSON list in several turns of the loop."""
    for begin in range(0, len(events), PIECE):
        piece = json.dumps(to_builtins(events[begin : begin + PIECE]))
        await response.write(f", {piece[1:-1]}".encode() if begin else piece[:-1].encode())
        await asyncio.sleep(0)
    await response.write(b"]" if events else b"[]")


async def _lines(
    request: web.Request, records: Iterable[RecoveryRecord | SlowdownRecord]
) -> web.StreamResponse:
    """Answer with a line for each record, and a turn of the loop for each."""
    response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
    await response.prepare(request)
    for record in tuple(records):
        await response.write(f"{json.dumps(record.to_json())}\n".encode())
        await asyncio.sleep(0)
    await response.write_eof()
    return response


class LighthouseRoutes:
    """One handler per path."""

    def __init__(self, parts: LighthouseParts) -> None:
        self._parts = parts
        self._looks = StatusCache()

    async def alive(self, request: web.Request) -> web.Response:
        """Answer 200 while the process runs, even without the store: a restart would not mend the store."""
        return web.json_response({"ok": True})

    async def ready(self, request: web.Request) -> web.Response:
        """Answer 200 if this instance can do its work, else 503."""
        health = await self._health()
        return web.json_response(health, status=200 if health["ok"] else 503)

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200; ``ok`` says whether this instance can answer for the jobs, or redirect to the
        leader."""
        return web.json_response(await self._health())

    async def _health(self) -> dict[str, object]:
        parts, election = self._parts, self._parts.election
        reachable = await parts.probe.ask()
        leader = election.me if parts.leads else election.other
        return {
            "ok": reachable
            and not parts.probe.refusal
            and (parts.serves if parts.leads else leader is not None),
            "is_leader": parts.leads,
            "leader": leader.url if leader else None,
            "store_reachable": reachable,
            "store_takes_writes": not parts.probe.refusal,
            "id": election.me.id,
        }

    async def scrape(self, request: web.Request) -> web.Response:
        """Answer in Prometheus' text format."""
        return web.Response(body=self._parts.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def list_jobs(self, request: web.Request) -> web.Response:
        """List the jobs, one line each; the line of a job with an unreadable record says so."""
        jobs = self._parts.jobs
        lines = [job_line(job) for name, job in sorted(jobs.by_name.items()) if is_in_scope(request, name)]
        broken = [
            {"job": name, "error": why}
            for name, why in sorted(jobs.unreadable.items())
            if is_in_scope(request, name)
        ]
        return web.json_response(lines + broken)

    async def show_job(self, request: web.Request) -> web.Response:
        """Show the status of one job, and which lighthouse answers."""
        job = self._job(request)
        may_reach_servers = request.get("may_reach_servers", True)
        more = {**_answered_by(self._parts.election), "token_for_servers": may_reach_servers}
        return web.json_response(text=await job_text(job, more))

    async def events(self, request: web.Request) -> web.StreamResponse:
        """List the job's events after an id: JSON, or with ``follow=1`` JSON lines as they come."""
        job = self._job(request)
        last = query_integer(request, "after", low=0, high=_MAX_ID) or 0
        follows = bool(query_integer(request, "follow", low=0, high=1))
        kind = "application/x-ndjson" if follows else "application/json; charset=utf-8"
        response = web.StreamResponse(headers={"Content-Type": kind})
        await response.prepare(request)
        if follows:
            async for batch in job.events.follow(last):
                text = "".join(json.dumps(event) + "\n" for event in to_builtins(batch))
                await response.write(text.encode())
                await asyncio.sleep(0)
        else:
            await _write_list(response, job.events.after(last))
        await response.write_eof()
        return response

    async def recoveries(self, request: web.Request) -> web.StreamResponse:
        """List the recovery records, one JSON object per line, oldest first."""
        return await _lines(request, self._job(request).history.recoveries.kept)

    async def slowdowns(self, request: web.Request) -> web.StreamResponse:
        """List the slowdown records, one JSON object per line, oldest first."""
        return await _lines(request, self._job(request).history.slowdowns.kept)

    async def hosts(self, request: web.Request) -> web.Response:
        """List the hosts on which replicas failed in the last days, the most suspect first."""
        return web.json_response(self._job(request).core.evidence.hosts_that_failed())

    async def live(self, request: web.Request) -> web.StreamResponse:
        """Stream server-sent events for the page: see ``dashboard.stream``."""
        return await dashboard.stream(request, self._job(request), self._looks, lambda: self._parts.leads)

    async def launcher(self, request: web.Request) -> web.Response:
        """Take a launcher's report of an attempt that failed."""
        body = await body_of(request, '{"replica": "r1", "host": "node-7", "attempt": 1, "why": "it died"}')
        replica, host = check_name("replica", text_of(body, "replica")), text_of(body, "host")
        attempt, *flags = (body.get(name, 0) for name in ("attempt", "gave_up", "spare", "stopped"))
        if (
            not all(isinstance(x, int) and 0 <= x < _MAX_ID for x in (attempt, *flags))
            or flags[2] not in _STOPPED_BY
        ):
            raise ProtocolError(
                '"attempt" must be a count, "gave_up" and "spare" true or false, "stopped" a signal or 0'
            )
        gave_up, spare, stopped = bool(flags[0]), bool(flags[1]), int(flags[2])
        last_line = text_of(body, "last_line") if body.get("last_line") else ""
        why = text_of(body, "why")
        # The replicas of a job that has not begun may all die before they attach.
        job = self._parts.jobs.find_or_make(request.match_info["job"])
        since = job.history.recoveries.launches.since(replica, time.time())
        report = LaunchReport(replica, host, why, gave_up, spare, since, last_line, stopped)
        job.launch_failed(report, attempt)
        return web.json_response({"ok": True, "job": job.name})

    async def session(self, request: web.Request) -> web.StreamResponse:
        """Serve a trainer's WebSocket."""
        return await self._come_again() or await SessionSocket(request, self._parts.jobs).serve()

    async def trainer_status(self, request: web.Request) -> web.StreamResponse:
        """Serve a checkpoint server's WebSocket."""
        return await self._come_again() or await StatusSocket(request, self._parts.jobs).serve()

    async def _come_again(self) -> web.Response | None:
        """Wait until the queue admits this connection; return a refusal, or None when it is admitted."""
        seconds = await self._parts.admissions.admit()
        if not seconds:
            return None
        sentence = (
            f"very many connect at this moment: this one's turn comes within {seconds} s, connect again"
        )
        return json_error(429, sentence, headers={"Retry-After": str(seconds)})

    def _job(self, request: web.Request) -> Job:
        return find_job(self._parts.jobs, request)
