"""Orders over HTTP: operator commands, and the drill of a running job.

Each command names its author and reason, and is safe to repeat.

An impossible command is refused and changes nothing; the core's ``objection`` says why. Drain and evict are
answered with 202 when the leader has accepted them. Pause, resume, scale and admit stay in force until
another command ends them, and are answered when the store has them. End is for good. Retry lasts while this
lighthouse leads.
"""

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, Any, TypeVar

import msgspec
from aiohttp import web

from fabric.errors import ProtocolError, Refused, StoreUnavailable, Unauthorized
from fabric.lighthouse.connections.validation import check_name, cleaned
from fabric.lighthouse.http.tokens import DRILL_PATH, NO_RIGHT, Tokens
from fabric.lighthouse.jobs.drills import MOST_SECONDS, Drills, InjectorRequest, Name, ShortText
from fabric.lighthouse.jobs.job import Job
from fabric.lighthouse.jobs.jobs import Jobs
from fabric.model import counted
from fabric.protocol.leader.adaptations import OFF
from fabric.protocol.messages import leader_events as io
from fabric.runtime.config import ADAPT_MODES
from fabric.runtime.drill_orders import proof_of
from fabric.runtime.http.http_service import read_body

KEPT_WITHIN_S = 4.0
_MAX_TEXT = 300


_WHO = '"who": "me", "why": "its host is hot"}'
_EXAMPLES = {
    **dict.fromkeys(("drain", "evict"), f'{{"replica": "r1", {_WHO}'),
    **dict.fromkeys(("pause", "resume", "scale", "admit", "retry", "end"), f"{{{_WHO}"),
    "adapt": f'{{"mode": "act", {_WHO}',
}


def add_commands(app: web.Application, jobs: Jobs) -> None:
    """``POST /v1/jobs/{job}/drain`` and the others."""
    for action in _EXAMPLES:
        app.router.add_post(f"/v1/jobs/{{job}}/{action}", partial(_command, action, jobs))


def find_job(jobs: Jobs, request: web.Request) -> Job:
    """Return the job that the path names. Answers 404 where there is none."""
    name = request.match_info["job"]
    if (job := jobs.find(name)) is None:
        raise web.HTTPNotFound(
            text=f"there is no job {name}: /v1/jobs and `fabric status` list those that are known"
        )
    return job


async def _command(action: str, jobs: Jobs, request: web.Request) -> web.StreamResponse:
    body = await body_of(request, _EXAMPLES[action])
    job = find_job(jobs, request)
    orders = list(_orders(action, body, job.max_replicas))
    for order in orders:
        _check(job, order)
    for order in orders:
        job.operate(order)
    is_about_replica = action in ("drain", "evict")
    if not is_about_replica or orders[0].host_is_gone:
        await job.overrides_stored(KEPT_WITHIN_S)
    if not job.is_running:
        raise StoreUnavailable("the leader may not have received this command: send it again in a moment")
    answer: dict[str, Any] = {"ok": True, "job": job.name}
    if is_about_replica:
        return web.json_response({**answer, action: orders[0].replica}, status=202)
    overrides = job.core.limits.overrides
    if action == "adapt":
        answer |= {"mode": job.core.adaptations.mode or OFF, "vetoed": list(overrides.vetoed)}
        return web.json_response(answer)
    answer |= {"paused": overrides.paused, "min": overrides.min_replicas, "max": overrides.max_replicas}
    note = _note(job, action)
    return web.json_response({**answer, "note": note} if note else answer)


def _orders(action: str, body: dict[str, Any], most_replicas: int) -> Iterator[io.Operator]:
    """The orders of one request; for adapt a mode, a veto, the end of a veto. Raises ProtocolError."""
    who, why = text_of(body, "who"), text_of(body, "why")
    if action in ("drain", "evict"):
        replica = check_name("replica", text_of(body, "replica"))
        gone = action == "evict" and body.get("host_is_gone") is True
        yield io.Operator(action, replica, who, why, host_is_gone=gone)
    elif action != "adapt":
        about = text_of(body, "about") if action == "admit" else ""
        least, most = (_count(body, name, most_replicas) for name in ("min", "max"))
        yield io.Operator(action, about, who, why, least, most)
    elif not body.keys() & {"mode", "veto", "allow"}:
        raise ProtocolError('give "mode", "veto" (a replica) or "allow" (a replica)')
    else:
        if "mode" in body:
            if body["mode"] not in ADAPT_MODES:
                raise ProtocolError('"mode" must be "off", "advise" or "act"')
            yield io.Operator("adapt", "", who, why, mode=body["mode"])
        for name in ("veto", "allow"):
            if name in body:
                yield io.Operator(name, check_name("replica", text_of(body, name)), who, why)
        if "veto" in body and body["veto"] == body.get("allow"):
            raise ProtocolError(
                f"a veto for {body['veto']} and its end contradict each other: give one of them"
            )


def _check(job: Job, asked: io.Operator) -> None:
    """Raise Refused or ProtocolError for an impossible command, 404 for one about a stranger."""
    record, peers = job.core.state.record, job.core.state.liveness.peers
    is_stranger = asked.replica not in peers and (record is None or record.member(asked.replica) is None)
    if asked.action in ("drain", "evict", "veto") and is_stranger:
        raise web.HTTPNotFound(text=f"job {job.name} knows no replica {asked.replica}: look at its members")
    if asked.action == "admit" and not job.core.evidence.knows_of(asked.replica):
        raise web.HTTPNotFound(
            text=f"job {job.name} knows no replica or host {asked.replica}: `fabric status` shows who is "
            "kept out"
        )
    if objection := job.core.orders.objection(asked):
        raise Refused(objection)
    if asked.action != "scale":
        return
    overrides, policy = job.core.limits.overrides, job.core.state.config.policy
    if asked.min_replicas is None and asked.max_replicas is None:
        raise ProtocolError('give "min", "max" or both: counts of replicas, 0 for what the replicas ask for')
    least = overrides.min_replicas if asked.min_replicas is None else asked.min_replicas
    most = overrides.max_replicas if asked.max_replicas is None else asked.max_replicas
    # A minimum above the maximum of the replicas' policy raises that maximum, too. A minimum above the
    # maximum that an operator ordered is refused.
    if most and (least or policy.min_replicas) > most:
        both = asked.min_replicas is not None and asked.max_replicas is not None
        advice = "the first must not be above the second" if both else "give both"
        raise Refused(
            f"at least {least or policy.min_replicas} and at most {most} replicas cannot be: {advice}"
        )


def _note(job: Job, action: str) -> str:
    """Return a consequence that the operator may not expect, or an empty string."""
    core, record = job.core, job.core.state.record
    if action == "retry":
        return "It begins again when its replicas are started."
    if record is not None and record.failed:
        return "The job has failed: this holds when it is started again."
    if action == "scale" and record is not None and len(record.roster) < core.limits.least:
        count = counted(len(record.roster), "member")
        return f"It has {count}: it stands still until it has {core.limits.least}."
    return ""


async def body_of(request: web.Request, example: str) -> dict[str, Any]:
    """Read the JSON object of a command. Raises ProtocolError."""
    try:
        body = json.loads(await read_body(request))
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise ProtocolError(f"send a JSON object such as {example}")
    return body


def text_of(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= _MAX_TEXT or not value.isprintable():
        raise ProtocolError(f'"{name}" must be a text of 1 to {_MAX_TEXT} printable characters')
    return value


def _count(body: dict[str, Any], name: str, most: int) -> int | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
        raise ProtocolError(
            f'"{name}" must be a count of replicas from 0 to {most}, this lighthouse\'s max-replicas'
        )
    return value


# The drill of a running job over HTTP: operators order faults, and the trainers' injectors ask for them.
#
# An operator needs the token with the right to drill. An injector shows its job's token, as its trainer
# does.


B = TypeVar("B", bound=msgspec.Struct)
Action = Callable[[Drills, Any], object]


class _FaultRequest(msgspec.Struct):
    drill: Name
    fault: Name
    replica: Name
    seconds: Annotated[float, msgspec.Meta(ge=0, le=MOST_SECONDS)] = 0.0
    point: ShortText = ""


class _DrillRequest(msgspec.Struct):
    drill: Name


def add_drills(app: web.Application, jobs: Jobs, tokens: Tokens) -> None:
    """``/v1/jobs/{job}/drill`` and the paths below it, and ``/v1/jobs/{job}/injector``."""
    orders: dict[str, tuple[type[msgspec.Struct], Action]] = {
        "renew": (_DrillRequest, lambda drills, asked: drills.renew(asked.drill)),
        "fault": (
            _FaultRequest,
            lambda drills, x: drills.inject(
                x.drill, cleaned(x.fault), check_name("replica", x.replica), x.seconds, cleaned(x.point)
            ),
        ),
        "end": (_DrillRequest, lambda drills, asked: drills.end(asked.drill)),
    }
    app.router.add_get(DRILL_PATH, partial(_show, jobs))
    app.router.add_post(DRILL_PATH, partial(_begin, jobs, tokens))
    for name, (kind, action) in orders.items():
        app.router.add_post(f"{DRILL_PATH}/{name}", partial(_drill_order, jobs, tokens, kind, action))
    app.router.add_post("/v1/jobs/{job}/injector", partial(_injector, jobs, tokens))


async def _show(jobs: Jobs, request: web.Request) -> web.StreamResponse:
    return web.json_response(find_job(jobs, request).drills.as_json())


async def _begin(jobs: Jobs, tokens: Tokens, request: web.Request) -> web.StreamResponse:
    await _check_right(request, tokens)
    body = await body_of(request, '{"who": "me", "why": "weekly"}')
    who, why, may_lose = text_of(body, "who"), text_of(body, "why"), body.get("yes_lose_it", False)
    job = find_job(jobs, request)
    record = job.core.state.record
    job.drills.begin(who, why, len(record.roster) if record else 0, may_lose=may_lose is True)
    return web.json_response(job.drills.as_json())


async def _drill_order(
    jobs: Jobs, tokens: Tokens, kind: type[msgspec.Struct], action: Action, request: web.Request
) -> web.StreamResponse:
    await _check_right(request, tokens)
    asked = _decoded(await read_body(request), kind)
    job = find_job(jobs, request)
    action(job.drills, asked)
    return web.json_response(job.drills.as_json())


async def _injector(jobs: Jobs, tokens: Tokens, request: web.Request) -> web.StreamResponse:
    asked = _decoded(await read_body(request), InjectorRequest)
    check_name("replica", asked.replica)
    drills = find_job(jobs, request).drills
    answer = drills.ask(asked)
    if asked.wait_s and not answer["faults"]:
        await drills.wait_changed(asked.wait_s)
        answer = drills.ask(asked)
    proofs = [proof_of(key, asked.nonce, answer) for key in tokens.order_keys(request.match_info["job"])]
    return web.json_response({**answer, "proofs": proofs})


async def _check_right(request: web.Request, tokens: Tokens) -> None:
    if not await tokens.may_drill(request):
        raise Unauthorized(NO_RIGHT)


def _decoded(data: bytes, kind: type[B]) -> B:
    try:
        return msgspec.json.decode(data, type=kind)
    except (ValueError, RecursionError) as error:  # of msgspec too, and bytes that are not UTF-8
        raise ProtocolError(
            f"this request of a drill cannot be read ({error}): use a drill of this version"
        ) from error
