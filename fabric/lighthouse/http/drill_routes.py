"""The drill of a running job over HTTP: operators order faults, and the trainers' injectors ask for them.

An operator needs the token with the right to drill. An injector shows its job's token, as its trainer does.
"""

from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web

from fabric.errors import ProtocolError, Unauthorized
from fabric.lighthouse.connections.validation import check_name
from fabric.lighthouse.http.operator_routes import body_of, find_job, text_of
from fabric.lighthouse.http.tokens import DRILL_PATH, Tokens
from fabric.lighthouse.jobs.drills import MOST_SECONDS, AskingInjector, Drills
from fabric.lighthouse.jobs.job import Job
from fabric.lighthouse.jobs.jobs import Jobs
from fabric.model import printable
from fabric.runtime.drill_orders import proof_of
from fabric.runtime.http.http_service import Handler, bearer_of, read_body

# An injector's request is kept open at most for this time.
_MOST_WAIT_S = 10.0

ShortText = Annotated[str, msgspec.Meta(max_length=500)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]
B = TypeVar("B", bound=msgspec.Struct)
Action = Callable[[Drills, Any], object]


class _InjectorRequest(msgspec.Struct):
    replica: Name
    id: Name
    pid: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    host: ShortText
    restarts: bool
    gone: bool = False
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=_MOST_WAIT_S)] = 0.0
    drill: ShortText = ""
    nonce: ShortText = ""  # the answer proves that its writer has heard it
    reports: Annotated[dict[str, dict[str, ShortText]], msgspec.Meta(max_length=1000)] = {}


class _FaultRequest(msgspec.Struct):
    drill: Name
    fault: Name
    replica: Name
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)] = 0.0
    point: ShortText = ""


class _EndRequest(msgspec.Struct):
    drill: Name
    number: Annotated[int, msgspec.Meta(ge=1)]


class _DrillRequest(msgspec.Struct):
    drill: Name


def add_drills(app: web.Application, jobs: Callable[[], Jobs], tokens: Tokens) -> None:
    """``/v1/jobs/{job}/drill`` and the paths below it, and ``/v1/jobs/{job}/injector``."""
    orders: dict[str, tuple[type[msgspec.Struct], Action]] = {
        "renew": (_DrillRequest, lambda drills, asked: drills.renew(asked.drill)),
        "fault": (
            _FaultRequest,
            lambda drills, x: drills.inject(
                x.drill, printable(x.fault), check_name("replica", x.replica), x.seconds, printable(x.point)
            ),
        ),
        "end-fault": (_EndRequest, lambda drills, asked: drills.end_fault(asked.drill, asked.number)),
        "end": (_DrillRequest, lambda drills, asked: drills.end(asked.drill)),
    }
    app.router.add_get(DRILL_PATH, _show(jobs))
    app.router.add_post(DRILL_PATH, _begin(jobs, tokens))
    for name, (kind, action) in orders.items():
        app.router.add_post(f"{DRILL_PATH}/{name}", _order(jobs, tokens, kind, action))
    app.router.add_post("/v1/jobs/{job}/injector", _injector(jobs, tokens))


def _show(jobs: Callable[[], Jobs]) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response(find_job(jobs(), request).drills.as_json())

    return handle


def _begin(jobs: Callable[[], Jobs], tokens: Tokens) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        _check_right(request, tokens)
        body = await body_of(request, '{"who": "me", "why": "weekly"}')
        who, why, may_lose = text_of(body, "who"), text_of(body, "why"), body.get("yes_lose_it", False)
        job = find_job(jobs(), request)
        job.drills.begin(who, why, _members(job), may_lose=may_lose is True)
        return web.json_response(job.drills.as_json())

    return handle


def _order(jobs: Callable[[], Jobs], tokens: Tokens, kind: type[msgspec.Struct], action: Action) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        _check_right(request, tokens)
        asked = _decoded(await read_body(request), kind)
        job = find_job(jobs(), request)
        action(job.drills, asked)
        return web.json_response(job.drills.as_json())

    return handle


def _injector(jobs: Callable[[], Jobs], tokens: Tokens) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        asked = _decoded(await read_body(request), _InjectorRequest)
        job = find_job(jobs(), request)
        drills = job.drills
        reports = {
            int(number): {name: printable(text) for name, text in report.items()}
            for number, report in asked.reports.items()
            if number.isdecimal() and len(number) < 10
        }

        def ask() -> dict[str, Any]:
            injector = AskingInjector(
                check_name("replica", asked.replica),
                printable(asked.id),
                asked.pid,
                printable(asked.host),
                asked.restarts,
                job.now,
            )
            return drills.ask(injector, asked.drill, reports, is_gone=asked.gone)

        answer = ask()
        if asked.wait_s and not answer["faults"]:
            await drills.wait_changed(asked.wait_s)
            answer = ask()
        proofs = [proof_of(key, asked.nonce, answer) for key in tokens.order_keys(request.match_info["job"])]
        return web.json_response({**answer, "proofs": proofs})

    return handle


def _check_right(request: web.Request, tokens: Tokens) -> None:
    if not tokens.may_drill(bearer_of(request.headers.get("Authorization", ""))):
        raise Unauthorized(
            "this token has no right to drill: use the token of the lighthouse's --drill-token-file"
        )


def _members(job: Job) -> int:
    record = job.core.state.record
    return len(record.roster) if record is not None else 0


def _decoded(data: bytes, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # of msgspec too, and bytes that are not UTF-8
        raise ProtocolError(
            f"this request of a drill cannot be read ({error}): use a drill of this version"
        ) from error
