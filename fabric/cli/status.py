"""``fabric status``: what the lighthouse knows, as a table for people or as JSON."""

import asyncio
import json
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import click
from rich.console import Console
from rich.table import Table
from rich.text import Text
from yarl import URL

from fabric.errors import ConfigError, Refused, Unauthorized, Unreachable
from fabric.runtime.web import read_token

_TIMEOUT_S = 5.0
_MAX_ANSWER_BYTES = 64 << 20
_MAX_REDIRECTS = 3


@click.command()
@click.option(
    "--lighthouse",
    envvar="FABRIC_LIGHTHOUSE",
    default="",
    help="URLs, separated by commas; FABRIC_LIGHTHOUSE.",
)
@click.option("--job", envvar="FABRIC_JOB", default="", help="One job instead of the list; FABRIC_JOB.")
@click.option(
    "--token-file",
    envvar="FABRIC_TOKEN_FILE",
    type=click.Path(path_type=Path),
    help="File with the token; FABRIC_TOKEN_FILE.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what the lighthouse answers as it is.")
def status(lighthouse: str, job: str, token_file: Path | None, as_json: bool) -> None:
    """Show the jobs of a lighthouse, or one of them."""
    urls = [part.strip().rstrip("/") for part in lighthouse.split(",") if part.strip()]
    if not urls:
        raise ConfigError(
            "no lighthouse is named: give --lighthouse http://host:port, or set FABRIC_LIGHTHOUSE"
        )
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(
                f'the lighthouse "{url[:200]}" is no URL: give addresses such as http://host:port'
            )
    token = read_token(token_file) if token_file is not None else ""
    path = f"/v1/jobs/{quote(job, safe='')}" if job else "/v1/jobs"
    body = asyncio.run(ask(urls, path, token))
    if as_json:
        click.echo(json.dumps(body, indent=2))
        return
    console = Console()
    if job:
        _show_job(body, console)
    else:
        _show_jobs(body, console)


async def ask(urls: list[str], path: str, token: str) -> Any:
    """The JSON at ``path`` of the first lighthouse that answers. Raises FabricError with all reasons."""
    reasons = []
    timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as client:
        for url in urls:
            try:
                return await _ask_one(client, URL(url + path, encoded=True), token)
            except (aiohttp.ClientError, OSError, TimeoutError, ValueError, Unreachable) as error:
                reasons.append(f"{url}: {_why(error)}")
    raise Unreachable(
        f"no lighthouse answers ({'; '.join(reasons)}): check the address, and that one runs there"
    )


async def _ask_one(client: aiohttp.ClientSession, url: URL, token: str) -> Any:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    for _ in range(_MAX_REDIRECTS):
        # Followed here, for a client drops the token on its way to another address.
        async with client.get(url, headers=headers, allow_redirects=False) as answer:
            if answer.status == 307:
                url = URL(answer.headers.get("Location", ""))
                continue
            data = await answer.content.read(_MAX_ANSWER_BYTES)
            while len(data) < _MAX_ANSWER_BYTES and (more := await answer.content.read(1 << 20)):
                data += more
            if answer.status == 200:
                return json.loads(data)
            raise _refusal(answer.status, data)
    raise Unreachable("the lighthouses redirect in a circle")


def _refusal(status: int, data: bytes) -> Exception:
    try:
        sentence = str(json.loads(data)["error"])
    except (ValueError, TypeError, KeyError):
        return Unreachable(f"HTTP {status}, and not from a lighthouse")
    if status == 401:
        return Unauthorized(f"the lighthouse refused the token: {sentence}")
    return Unreachable(sentence) if status >= 500 else Refused(sentence)


def _why(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {_TIMEOUT_S:g} s"
    if isinstance(error, ConnectionRefusedError) or "Connect call failed" in str(error):
        return "nobody listens there"
    if isinstance(error, aiohttp.ClientConnectorError):
        return error.os_error.strerror or str(error.os_error)
    if isinstance(error, ValueError) and not isinstance(error, aiohttp.ClientError):
        return "what answers there is not a lighthouse"
    return str(error) or type(error).__name__


def _show_jobs(jobs: list[dict[str, Any]], console: Console) -> None:
    table = Table("job", "epoch", "step", "members", "sessions", "waiting for")
    for job in jobs:
        if "error" in job:
            table.add_row(*_cells(job["job"], "", "", "", "", job["error"]))
        else:
            names = ("job", "epoch", "step", "members", "sessions", "waiting_for")
            table.add_row(*_cells(*(job[name] for name in names)))
    console.print(table if jobs else "This lighthouse knows no job.")


def _show_job(job: dict[str, Any], console: Console) -> None:
    record = job["record"] or {}
    console.print(
        Text(
            f"job {job['job']}: generation {job['generation']}, epoch {job['epoch']}, step {job['step']}"
            + (f" ({record['reason']})" if record.get("reason") else "")
        )
    )
    console.print(Text(f"waiting for {job['waiting_for']}"))
    table = Table(
        "replica", "role", "phase", "step", "session", "pulse", "trainer", "checkpoint server", "verdict"
    )
    for member in job["members"]:
        table.add_row(*_row(member, _role(member)))
    for joiner in job["joiners"]:
        table.add_row(*_row(joiner, "outside"))
    console.print(table)
    lighthouse, store = job["lighthouse"], job["store"]
    console.print(Text(f"led by {lighthouse['url']} over store {store['id']}", style="dim"))


def _role(member: dict[str, Any]) -> str:
    if member["leaving"]:
        return "leaving"
    return "new member" if member["fresh"] else "member"


def _row(entry: dict[str, Any], role: str) -> list[Text]:
    pulse = entry["pulse"] or {}
    phase = f"busy: {entry['busy']}" if entry.get("busy") else entry["phase"]
    session = _age(entry["session_age_s"]) + ("" if entry["connected"] else " (away)")
    return _cells(
        *(entry["replica"], role, phase, "" if entry["step"] is None else entry["step"], session),
        *(_age(pulse.get("age_s")), pulse.get("trainer", ""), entry["ckpt"], entry["verdict"]),
    )


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def _cells(*values: object) -> list[Text]:
    # Text, so that brackets in what others wrote are not taken for markup.
    return [Text(str(value)) for value in values]
