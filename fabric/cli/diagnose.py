"""``fabric diagnose``: finds from the recorded collectives of all processes what holds a job up."""

import asyncio
import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import click
from msgspec import Struct, field
from msgspec.structs import replace

from fabric.cli.lighthouse_options import current_tls, json_option, lighthouse_options, lighthouses_of
from fabric.cli.terminal_text import all_printable
from fabric.collectives.calls import side_by_side
from fabric.collectives.hangs import waits
from fabric.collectives.plain_pickle import BadRecording
from fabric.collectives.recording import MAX_BYTES, Process, Recording, parse_recording, read_recording
from fabric.collectives.report import CollectiveReport, explain
from fabric.errors import ConfigError, Unreachable
from fabric.lighthouse.diagnosis.rank_probe import main_thread
from fabric.model import Value
from fabric.runtime.http.lighthouse_client import describe, read_bounded, understood
from fabric.runtime.http.tls import Tls
from fabric.runtime.http.token_file import read_token

# The rank is the last number in the file's name: ``nccl_trace_rank_3``, ``rank3.json``, ``rank3.torch.json``.
_RANK = re.compile(r"(\d{1,6})(?:\.[A-Za-z]\w*)*$", re.ASCII)
_OTHER_FILES = frozenset((".log", ".txt", ".out", ".err", ".gz", ".zip", ".py"))


class ReadRecordings(Struct):
    """The recordings that could be read. ``unread``: why the recording of a process is missing."""

    recordings: list[Recording] = field(default_factory=list)
    unread: dict[Process, str] = field(default_factory=dict)


def read_files(names: Iterable[str]) -> ReadRecordings:
    """Read files and folders. Raises ConfigError for a name that is neither."""
    result = ReadRecordings()
    for path, process in [file for name in names for file in _files(name)]:
        try:
            with path.open("rb") as file:
                recording = read_recording(file.read(MAX_BYTES + 1), process, str(path))
        except OSError as error:
            result.unread[process] = f"{path}: it cannot be read: {error.strerror or error}"
            continue
        except BadRecording as error:
            result.unread[process] = str(error)
            continue
        identity = recording.process, recording.is_own
        twin = next((x for x in result.recordings if (x.process, x.is_own) == identity), None)
        if twin is not None:
            raise ConfigError(
                f"{twin.source} and {recording.source} are both recordings of {recording.process.name}: give"
                " one of them, or RANK=FILE"
            )
        result.recordings.append(recording)
    for recording in result.recordings:
        result.unread.pop(recording.process, None)
    return result


def _files(name: str) -> Iterator[tuple[Path, Process]]:
    number, mark, rest = name.partition("=")
    is_numbered = bool(mark) and number.isascii() and number.isdecimal() and len(number) < 7
    path = Path(rest if is_numbered else name)
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give dumps of torch's Flight Recorder, a folder, or a URL")
    if not path.is_dir():
        rank = int(number) if is_numbered else rank_of(path)
        if rank is None:
            raise ConfigError(f"the name of {path} has no rank: write RANK={path}")
        yield path, Process("", rank)
        return
    if is_numbered:
        raise ConfigError(f"{path} is a folder: write RANK=FILE for one of its files")
    dumps = list(_in_folder(path))
    if not dumps:
        raise ConfigError(f"{path} has no file whose name ends with a rank, such as nccl_trace_rank_0")
    yield from dumps


def _in_folder(path: Path) -> Iterator[tuple[Path, Process]]:
    """The dumps in a folder; each folder in it belongs to one replica."""
    for entry in sorted(path.iterdir()):
        inside = sorted(entry.iterdir()) if entry.is_dir() else [entry]
        for file in inside:
            rank = rank_of(file)
            if file.is_file() and rank is not None and file.suffix not in _OTHER_FILES:
                yield file, Process(entry.name if entry.is_dir() else "", rank)


def rank_of(path: Path) -> int | None:
    match = _RANK.search(path.name)
    return int(match[1]) if match else None


_ASK_S = 5.0
_AT_ONCE = 16
_MAX_FRAMES = 20
_TORCH, _OWN, _STACKS, _STATE = "flight", "exchange", "stacks", "state"


class ServerTarget(Value):
    """One process, and the base URL of its checkpoint server."""

    process: Process
    url: str


class JobReader(Value):
    """Asks checkpoint servers, with ``token``.

    It asks twice: a healthy job is in another collective the second time, and a hanging job is in the same.
    """

    token: str
    tls: Tls

    def look(self, targets: Sequence[ServerTarget]) -> "Look":
        """Ask for both recordings and the stacks of every process."""
        look, kinds = Look(), (_TORCH, _OWN, _STACKS)
        answers = asyncio.run(self._ask([target.url for target in targets], kinds))
        for target, given in zip(targets, answers, strict=True):
            look.add(target, dict(zip(kinds, given, strict=True)))
        return look

    def name(self, urls: Sequence[str]) -> list[ServerTarget]:
        """The processes whose checkpoint servers have these URLs. Raises Unreachable."""
        targets = []
        for url, [(body, problem)] in zip(urls, asyncio.run(self._ask(urls, [_STATE])), strict=True):
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

    async def _ask(self, urls: Sequence[str], kinds: Sequence[str]) -> list[list[tuple[bytes, str]]]:
        """Return, of each checkpoint server, the body or the problem of each kind of answer."""
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        limit = asyncio.Semaphore(_AT_ONCE)
        async with aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(ssl=self.tls.client_context() or True),
            timeout=aiohttp.ClientTimeout(total=_ASK_S),
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as client:

            async def ask(url: str) -> list[tuple[bytes, str]]:
                async with limit:
                    return await asyncio.gather(*(self._get(client, url, kind) for kind in kinds))

            return await asyncio.gather(*map(ask, urls))

    async def _get(self, client: aiohttp.ClientSession, url: str, what: str) -> tuple[bytes, str]:
        base = url.partition("#")[0].rstrip("/")
        try:
            async with client.get(f"{base}/debug/{what}", allow_redirects=False) as answer:
                data = await read_bounded(answer, MAX_BYTES + 1)
                if answer.status == 200:
                    return data, ""
                return b"", str(_json(data).get("error", f"HTTP {answer.status}"))[:300]
        except TimeoutError:
            return b"", f"its checkpoint server did not answer within {_ASK_S:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return b"", f"its checkpoint server gave no answer: {describe(error, base, self.tls)}"


class Look(ReadRecordings):
    """The recordings of all processes from one look. ``dumps``: the answers, by process and recorder."""

    dumps: dict[tuple[Process, str], bytes] = field(default_factory=dict)

    def add(self, target: ServerTarget, answers: Mapping[str, tuple[bytes, str]]) -> None:
        """Take the answers of one process's checkpoint server."""
        process, reasons = target.process, []
        _, frames, sleeps = main_thread(_json(answers[_STACKS][0]))
        main = tuple(line[:300] for line in frames[:_MAX_FRAMES])
        state = "stopped" if sleeps.split(" ")[0] in ("T", "t") else ""
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
            self.recordings.append(replace(recording, process=process, main=main, process_state=state))
        if len(reasons) == 2:
            self.unread[process] = reasons[-1]
            if main:
                # Without a recording, the stack still shows where the process is.
                empty = parse_recording({"entries": []}, process, target.url)
                self.recordings.append(replace(empty, main=main, process_state=state))


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


def _json(data: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(data) if data and len(data) <= MAX_BYTES else {}
    except (ValueError, RecursionError):
        return {}
    return body if isinstance(body, dict) else {}


@click.command()
@click.argument("sources", nargs=-1, metavar="[FILE|FOLDER|URL]...")
@lighthouse_options
@click.option(
    "--server-token-file",
    type=click.Path(path_type=Path),
    help="The token for checkpoint servers, if it is another one.",
)
@click.option("--settle-s", default=3.0, show_default=True, help="Seconds between two looks at a living job.")
@click.option("--save", type=click.Path(path_type=Path), help="Keep what a living job has recorded here.")
@json_option
def diagnose(
    sources: tuple[str, ...],
    settle_s: float,
    save: Path | None,
    as_json: bool,
    server_token_file: Path | None,
    **lighthouse: Any,
) -> None:
    """Say what holds a job up: deadlock, absent rank, mismatch, straggler.

    Compare the collectives that all processes have recorded. FILE is a dump of torch's Flight Recorder, JSON
    or pickle, of gloo or NCCL; its name ends with the rank, or write RANK=FILE. FOLDER has the dumps of all
    ranks, or one folder for each replica. URL is a checkpoint server. Without any, the living job of --job is
    asked. Nothing in a dump is executed.
    """
    urls = [source for source in sources if source.startswith(("http://", "https://"))]
    files = [source for source in sources if source not in urls]
    if urls and files:
        raise ConfigError(
            "files and URLs are given: compare recordings of one moment, files or living processes"
        )
    if files:
        if save is not None:
            raise ConfigError("--save keeps the recordings of a living job, and these are files already")
        read = read_files(files)
        if not read.recordings:
            raise ConfigError("no recording could be read: " + "; ".join(list(read.unread.values())[:3]))
        report = explain(read.recordings, read.unread)
    else:
        report = _living(urls, settle_s, save, server_token_file, lighthouse)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
        return
    for line in _lines(all_printable(report.to_json())):
        click.echo(line)


def _living(
    urls: list[str],
    settle_s: float,
    save: Path | None,
    server_token_file: Path | None,
    lighthouse: dict[str, Any],
) -> CollectiveReport:
    token_file = server_token_file or lighthouse["token_file"]
    reader = JobReader(read_token(token_file) if token_file is not None else "", current_tls())
    if urls:
        targets = reader.name(urls)
    else:
        if not lighthouse["lighthouse"]:
            raise ConfigError(
                "there is nothing to diagnose: give dumps, a folder or the URL of a checkpoint server, or"
                " --lighthouse and --job"
            )
        lighthouses = lighthouses_of(**lighthouse, needs_job=True)
        status = lighthouses.ask(lighthouses.path())
        with understood("the lighthouse"):
            targets = job_targets(status)
            is_for_servers = status.get("token_for_servers") is True
        if reader.token and server_token_file is None and not is_for_servers:
            raise ConfigError(
                f"job {lighthouses.job} has a token of its own, and the one given opens every job, so it is"
                " shown to no checkpoint server: give the job's with --server-token-file"
            )
        if not targets:
            raise ConfigError(
                f"job {lighthouses.job} has no member whose checkpoint server is known: look at `fabric"
                " status`"
            )
    first = reader.look(targets)
    time.sleep(max(0.0, settle_s))
    second = reader.look(targets)
    if not second.recordings:
        raise ConfigError("no recording could be read: " + "; ".join(list(second.unread.values())[:3]))
    if save is not None:
        _keep(second, targets, save)
    earlier = waits(side_by_side(first.recordings, first.unread))
    return explain(second.recordings, second.unread, earlier=earlier, now_ns=time.time_ns())


def _keep(look: Look, targets: list[ServerTarget], folder: Path) -> None:
    """Write REPLICA/rankK.torch.json and REPLICA/rankK.exchange.json into ``folder``."""
    for target in targets:
        replica = "".join(c if c.isalnum() or c in "-_" else "_" for c in target.process.replica)
        for recorder in ("torch", "exchange"):
            body = look.dumps.get((target.process, recorder))
            if body is None:
                continue
            try:
                (folder / replica).mkdir(parents=True, exist_ok=True)
                (folder / replica / f"rank{target.process.rank}.{recorder}.json").write_bytes(body)
            except OSError as error:
                raise ConfigError(f"{folder} cannot be written: {error.strerror or error}") from error
    click.echo(f"the recordings are in {folder}", err=True)


def _lines(report: dict[str, Any]) -> list[str]:
    lines: list[str] = []
    for conclusion in report["conclusions"]:
        lines.append(f"{conclusion['verdict']}: {conclusion['why']}")
        lines += [f"    {line}" for line in conclusion["evidence"]]
    lines += [f"not read: {process}: {why}" for process, why in report["unread"].items()]
    calls = sum(x["collectives"] for x in report["processes"])
    processes = len({x["process"] for x in report["processes"]})
    lines.append(f"({calls} calls of {processes} processes were read)")
    overwritten = sorted({x["process"] for x in report["processes"] if x["overwritten"]})
    if overwritten:
        lines.append(
            f"(older calls of {', '.join(overwritten[:8])} were overwritten: raise TORCH_FR_BUFFER_SIZE)"
        )
    return lines
