"""Asks the ranks concerned what they are doing, at their checkpoint servers, within a bound that nobody
waits for.

What a server answers is another process's word: bounded in size, and every field is taken for what it is. A
rank that does not answer in time is told of as such.
"""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from fabric.lighthouse.diagnosis import Seen
from fabric.runtime.tls import Tls

# A trainer that holds the interpreter's lock is asked for a second, then its stacks are had by a signal.
ASK_S = 3.0
MAX_RANKS = 16
MAX_ANSWER_BYTES = 4 << 20
_LAST_COLLECTIVES = 200
# Longer answers are parsed beside the loop.
_SHORT_BYTES = 64 * 1024
_MAX_FRAMES = 50


@dataclass(frozen=True, slots=True)
class Where:
    """One rank, and the base URL of its checkpoint server."""

    replica: str
    rank: int
    url: str


@dataclass(frozen=True, slots=True)
class Access:
    """What checkpoint servers want to see: the job's token, and certificates where TLS is configured."""

    token: str | None = None
    tls: Tls = field(default_factory=Tls)


async def ask(places: Sequence[Where], access: Access, ask_s: float = ASK_S) -> list[Seen]:
    """Every rank as it is now; at most MAX_RANKS of them, in ``ask_s`` seconds."""
    headers = {} if access.token is None else {"Authorization": f"Bearer {access.token}"}
    connector = aiohttp.TCPConnector(ssl=access.tls.client_context() or True)
    jar = aiohttp.DummyCookieJar()
    async with aiohttp.ClientSession(headers=headers, cookie_jar=jar, connector=connector) as client:
        return list(await asyncio.gather(*(_rank(client, place, ask_s) for place in places[:MAX_RANKS])))


async def _rank(client: aiohttp.ClientSession, where: Where, ask_s: float) -> Seen:
    base = where.url.partition("#")[0].rstrip("/")
    state, stacks, flight = await asyncio.gather(
        *(_get(client, f"{base}/debug/{what}", ask_s) for what in ("state", "stacks", "flight"))
    )
    trainer = _mapping(state.get("trainer"))
    how, main, kernel = _main_thread(stacks)
    pid = trainer.get("pid")
    problems = [str(x["error"]) for x in (state, stacks) if "error" in x]
    silent = trainer.get("silent")
    if not problems and isinstance(silent, str) and silent:
        problems = [silent]
    return Seen(
        replica=where.replica,
        rank=where.rank,
        process=str(trainer.get("state", "unknown"))[:20],
        pid=pid if isinstance(pid, int) else 0,
        says=_mapping(trainer.get("says")) or None,
        how=how,
        main=main,
        kernel=kernel,
        flight=_entries(flight),
        problem="; ".join(dict.fromkeys(problems)),
    )


async def _get(client: aiohttp.ClientSession, url: str, ask_s: float) -> Mapping[str, Any]:
    """The JSON object that is there; under ``error`` why there is none."""
    try:
        async with asyncio.timeout(ask_s), client.get(url, allow_redirects=False) as answer:
            data = await answer.content.read(MAX_ANSWER_BYTES + 1)
            while len(data) <= MAX_ANSWER_BYTES and not answer.content.at_eof():
                data += await answer.content.read(MAX_ANSWER_BYTES + 1 - len(data))
        if len(data) > MAX_ANSWER_BYTES:
            return {"error": f"it answered with more than {MAX_ANSWER_BYTES} bytes"}
        body = json.loads(data) if len(data) <= _SHORT_BYTES else await asyncio.to_thread(json.loads, data)
    except TimeoutError:
        return {"error": f"its checkpoint server did not answer within {ask_s:g} s"}
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
        return {"error": f"its checkpoint server gave no answer ({type(error).__name__})"}
    return (
        body if isinstance(body, dict) else {"error": "its checkpoint server did not answer with an object"}
    )


def _main_thread(stacks: Mapping[str, Any]) -> tuple[str, tuple[str, ...], str]:
    """How the stacks were had, the main thread's, and what the kernel says it sleeps in."""
    threads, kernel = stacks.get("threads"), stacks.get("kernel")
    first = _mapping(kernel[0]) if isinstance(kernel, list) and kernel else {}
    sleeps = " ".join(str(first.get(name, "")) for name in ("state", "wchan") if first.get(name))
    how = str(stacks.get("how", ""))[:20]
    found: tuple[str, ...] = ()
    for thread in threads if isinstance(threads, list) else ():
        frames = _mapping(thread).get("stack")
        if isinstance(frames, list):
            # By word of the interpreter the main thread comes first, in what a signal wrote it comes last.
            if how == "interpreter" and found:
                break
            found = tuple(str(frame) for frame in frames[:_MAX_FRAMES])
    return how, found, sleeps


def _entries(flight: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    entries = flight.get("entries")
    if not isinstance(entries, list):
        return ()
    return tuple(entry for entry in entries[-_LAST_COLLECTIVES:] if isinstance(entry, dict))


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
