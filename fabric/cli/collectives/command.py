"""``fabric diagnose``: finds from the recorded collectives of all processes what holds a job up."""

import json
import time
from pathlib import Path
from typing import Any

import click

from fabric.cli.collectives.living_job import JobReader, Look, ServerTarget, job_targets
from fabric.cli.collectives.recorded_files import ReadRecordings, read_files
from fabric.cli.lighthouse_options import lighthouse_options, lighthouses_of
from fabric.cli.terminal_text import all_printable
from fabric.cli.tls import current_tls
from fabric.collectives.calls import side_by_side
from fabric.collectives.hangs import waits
from fabric.collectives.report import CollectiveReport, explain
from fabric.errors import ConfigError
from fabric.runtime.http.http_service import read_token
from fabric.runtime.http.lighthouse_client import understood


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
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
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
        report = _explained(read)
    else:
        report = _living(urls, settle_s, save, server_token_file, lighthouse)
    if as_json:
        click.echo(json.dumps(report.to_json(), indent=2))
        return
    for line in _lines(all_printable(report.to_json())):
        click.echo(line)


def _explained(read: ReadRecordings) -> CollectiveReport:
    if not read.recordings:
        raise ConfigError("no recording could be read: " + "; ".join(list(read.unread.values())[:3]))
    return explain(read.recordings, read.unread)


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
    if not second.read.recordings:
        raise ConfigError("no recording could be read: " + "; ".join(list(second.read.unread.values())[:3]))
    if save is not None:
        _keep(second, targets, save)
    earlier = waits(side_by_side(first.read.recordings, first.read.unread))
    return explain(second.read.recordings, second.read.unread, earlier=earlier, now_ns=time.time_ns())


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
    """The report for a person."""
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
