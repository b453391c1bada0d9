"""Gets the recordings of living processes from their checkpoint servers, twice: a healthy job is in another
collective the second time, and a hanging job is in the same."""

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp

from fabric.cli.collectives.recorded_files import ReadRecordings
from fabric.collectives.plain_pickle import BadRecording
from fabric.collectives.recording import MAX_BYTES, Process, parse_recording, read_recording
from fabric.errors import Unreachable
from fabric.runtime.http.dial_errors import describe
from fabric.runtime.http.tls import Tls

_ASK_S = 5.0
_AT_ONCE = 16
_MAX_FRAMES = 20
_TORCH, _OWN, _STACKS, _STATE = "flight", "exchange", "stacks", "state"


@dataclass(frozen=True, slots=True)
class ServerTarget:
    """One process, and the base URL of its checkpoint server."""

    process: Process
    url: str


@dataclass(frozen=True, slots=True)
class JobReader:
    """Asks checkpoint servers, with ``token``."""

    token: str
    tls: Tls

    def look(self, targets: Sequence[ServerTarget]) -> "Look":
        """Ask for both recordings and the stacks of every process."""
        return asyncio.run(self._look(targets))

    def name(self, urls: Sequence[str]) -> list[ServerTarget]:
        """The processes whose checkpoint servers have these URLs. Raises Unreachable."""
        return asyncio.run(self._name(urls))

    async def _name(self, urls: Sequence[str]) -> list[ServerTarget]:
        async with self._session() as client:
            states = await asyncio.gather(*(self._get(client, url, _STATE) for url in urls))
        targets = []
        for url, (body, problem) in zip(urls, states, strict=True):
            state = _json(body)
            if problem or not isinstance(state.get("replica"), str):
                raise Unreachable(
                    f"{url} is no checkpoint server that answers ({problem or 'it names no replica'}): give"
                    " its base URL, as the job's status shows it"
                )
            _, _, fragment = url.partition("#")
            rank = int(fragment) if fragment.isascii() and fragment.isdecimal() and len(fragment) < 7 else 0
            targets.append(ServerTarget(Process(state["replica"], rank), url))
        return targets

    async def _look(self, targets: Sequence[ServerTarget]) -> "Look":
        look = Look()
        limit = asyncio.Semaphore(_AT_ONCE)

        async def one_process(target: ServerTarget) -> None:
            async with limit:
                answers = await asyncio.gather(
                    *(self._get(client, target.url, what) for what in (_TORCH, _OWN, _STACKS))
                )
            look.add(target, dict(zip((_TORCH, _OWN, _STACKS), answers, strict=True)))

        async with self._session() as client:
            await asyncio.gather(*map(one_process, targets))
        return look

    def _session(self) -> aiohttp.ClientSession:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        connector = aiohttp.TCPConnector(ssl=self.tls.client_context() or True)
        timeout = aiohttp.ClientTimeout(total=_ASK_S)
        jar = aiohttp.DummyCookieJar()
        return aiohttp.ClientSession(headers=headers, connector=connector, timeout=timeout, cookie_jar=jar)

    async def _get(self, client: aiohttp.ClientSession, url: str, what: str) -> tuple[bytes, str]:
        """The answer, or why it is missing."""
        base = url.partition("#")[0].rstrip("/")
        try:
            async with client.get(f"{base}/debug/{what}", allow_redirects=False) as answer:
                data = bytearray()
                while len(data) <= MAX_BYTES and (more := await answer.content.read(1 << 20)):
                    data += more
                if answer.status == 200:
                    return bytes(data), ""
                return b"", str(_json(bytes(data)).get("error", f"HTTP {answer.status}"))[:300]
        except TimeoutError:
            return b"", f"its checkpoint server did not answer within {_ASK_S:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return b"", f"its checkpoint server gave no answer: {describe(error, base, self.tls)}"


@dataclass(slots=True)
class Look:
    """The recordings of all processes from one look. ``dumps``: the answers, by process and recorder."""

    read: ReadRecordings = field(default_factory=ReadRecordings)
    dumps: dict[tuple[Process, str], bytes] = field(default_factory=dict)

    def add(self, target: ServerTarget, answers: Mapping[str, tuple[bytes, str]]) -> None:
        """Take the answers of one process's checkpoint server."""
        process, reasons = target.process, []
        main, state = _main_thread(_json(answers[_STACKS][0]))
        for what in (_TORCH, _OWN):
            body, problem = answers[what]
            if problem:
                reasons.append(problem)
                continue
            try:
                recording = read_recording(body, process, f"{target.url} ({what})")
            except BadRecording as error:
                reasons.append(str(error))
                continue
            self.dumps[process, "torch" if what == _TORCH else what] = body
            # The server's address identifies the process; the name in the recording is not trusted.
            self.read.recordings.append(replace(recording, process=process, main=main, process_state=state))
        if len(reasons) == 2:
            self.read.unread[process] = reasons[-1]
            if main:
                # Without a recording, the stack still shows where the process is.
                empty = parse_recording({"entries": []}, process, target.url)
                self.read.recordings.append(replace(empty, main=main, process_state=state))


def job_targets(status: Mapping[str, Any]) -> list[ServerTarget]:
    """The checkpoint servers of all ranks of a job's members, from the job's status."""
    targets = []
    for member in status["members"]:
        addresses = [member["ckpt"], *(rank["ckpt"] for rank in member["ranks"])]
        targets += [
            ServerTarget(Process(str(member["replica"]), rank), str(url))
            for rank, url in enumerate(addresses)
            if str(url).startswith(("http://", "https://"))
        ]
    return targets


def _main_thread(stacks: Mapping[str, Any]) -> tuple[tuple[str, ...], str]:
    """The main thread's stack, and whether the kernel says that the process is stopped."""
    kernel = stacks.get("kernel")
    first = kernel[0] if isinstance(kernel, list) and kernel and isinstance(kernel[0], dict) else {}
    state = "stopped" if first.get("state") in ("T", "t") else ""
    threads = stacks.get("threads")
    frames = [t.get("stack") for t in threads if isinstance(t, dict)] if isinstance(threads, list) else []
    stacks_of_text = [x for x in frames if isinstance(x, list) and all(isinstance(line, str) for line in x)]
    if not stacks_of_text:
        return (), state
    # The interpreter lists the main thread first; a dump by signal lists it last.
    main = stacks_of_text[0] if stacks.get("how") == "interpreter" else stacks_of_text[-1]
    return tuple(line[:300] for line in main[:_MAX_FRAMES]), state


def _json(data: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(data) if data and len(data) <= MAX_BYTES else {}
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}
