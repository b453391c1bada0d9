"""The status of each job at the end of this lighthouse's term, for people while no lighthouse leads."""

import asyncio
import time
from dataclasses import asdict
from typing import Any

from aiohttp import web

from fabric.lighthouse.election.election import Election
from fabric.lighthouse.http.job_status import job_line, job_text
from fabric.lighthouse.http.tokens import is_in_scope
from fabric.lighthouse.jobs.job import Job
from fabric.lighthouse.jobs.jobs import Jobs
from fabric.runtime.http.http_service import json_error


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
        term = election.term
        where = {
            "lighthouse": {**asdict(election.me), "term": term.revision if term else 0},
            "store": {"id": term.store_id if term else "", "election_key": election.prefix},
            "token_for_servers": False,
        }
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
