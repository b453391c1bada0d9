"""``fabric status`` and ``fabric top``: show the lighthouse's view of jobs, once or live, as text or JSON."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import click
from msgspec.structs import replace
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fabric.cli.lighthouse_options import json_option, lighthouse_options, lighthouses_of
from fabric.cli.terminal_text import all_printable, plain_console
from fabric.errors import FabricError, Unreachable
from fabric.model import counted, first_of, printable
from fabric.runtime.http.lighthouse_client import Lighthouses, understood

_SPENT = ("training", "degraded", "recovering", "stalled")
# In a narrower terminal the table has only columns that show trouble, and addresses stand below the table.
_WIDE = 120
# The columns that a table without room for its words leaves out, the first one first.
_LEAST_NEEDED = ("checkpoint server", "status", "share", "session", "trainer", "host", "s/step", "speed")
_LONGEST_WORD = 30
# A table with more rows than this does not fit on a screen.
_LONG = 20
# The first line of a job that is as it should be; the lighthouse's page has the same pattern.
WHOLE = re.compile(r"complete: .*|(\d+) of \1 replicas?")
# The first line tells a longer verdict, and the table does not repeat it.
_LONGEST_VERDICT = 60
# The most failed hosts that the output names.
_HOSTS = 5


@click.command()
@lighthouse_options
@json_option
def status(lighthouse: str, job: str, token_file: Path | None, as_json: bool) -> None:
    """Show the jobs of a lighthouse, or one of them."""
    lighthouses = lighthouses_of(lighthouse, job, token_file, needs_job=False)
    try:
        body = lighthouses.ask(lighthouses.path())
    except Unreachable:
        _print_last(lighthouses, as_json)
        raise
    if as_json:
        click.echo(json.dumps(body, indent=2))
        return
    console = plain_console()
    console.print(_picture(lighthouses, body, console.width), *map(Text, _silent(lighthouses)), sep="\n")


@click.command()
@lighthouse_options
@click.option("--every-s", default=1.0, show_default=True, help="How often to look.")
def top(lighthouse: str, job: str, token_file: Path | None, every_s: float) -> None:
    """Show the jobs of a lighthouse, or one of them, live, until Ctrl-C."""
    lighthouses = lighthouses_of(lighthouse, job, token_file, needs_job=False)
    console = plain_console()
    if not console.is_terminal:
        _print_again_and_again(lighthouses, console, every_s)
        return
    shown = _picture(lighthouses, None, console.width)
    with Live(shown, console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(max(0.1, every_s))
                try:
                    shown = _picture(lighthouses, None, console.width)
                    live.update(shown, refresh=True)
                except Unreachable as error:
                    # During a fail-over the last output stays, with a note that it is old.
                    live.update(Group(shown, Text(f"not up to date: {error}", style="bold")), refresh=True)
        except KeyboardInterrupt:
            pass
        except FabricError:
            live.stop()
            raise


def _print_last(lighthouses: Lighthouses, as_json: bool) -> None:
    """Print the picture that the last leader has kept, if it answers."""
    console = plain_console()
    with contextlib.suppress(FabricError):
        body = lighthouses.ask(f"{lighthouses.path()}?last=1")
        if as_json:
            click.echo(json.dumps(body, indent=2))
        else:
            console.print(_picture(lighthouses, body, console.width))


def _silent(lighthouses: Lighthouses) -> list[str]:
    """Return a sentence for each of several lighthouses that does not answer, such as a dead standby."""
    lines = []
    for url in lighthouses.urls if len(lighthouses.urls) > 1 else ():
        try:
            replace(lighthouses, urls=(url,)).ask("/livez")
        except FabricError as error:
            lines.append(f"a lighthouse is missing: {error}")
    return lines


def _print_again_and_again(lighthouses: Lighthouses, console: Console, every_s: float) -> None:
    """Print the status again and again, into a file or a pipe."""
    try:
        while True:
            try:
                console.print(_picture(lighthouses, None, console.width), "")
            except Unreachable as error:
                console.print(f"no picture: {error}", "", markup=False)
            console.file.flush()
            time.sleep(max(0.1, every_s))
    except KeyboardInterrupt:
        return


def _picture(lighthouses: Lighthouses, answer: Any, width: int) -> RenderableType:
    """Show the answer to ``status``; None: ask for it first."""
    if answer is None:
        answer = lighthouses.ask(lighthouses.path())
    with understood("the lighthouse"):
        body = all_printable(answer)
        return _job(body, width) if lighthouses.job else _jobs(body)


def _jobs(jobs: list[dict[str, Any]]) -> RenderableType:
    table = Table("job", "epoch", "step", "loss", "sessions", "replicas", "waiting for")
    for job in jobs:
        if "error" in job:
            table.add_row(*_cells(job["job"], "", "", "", "", "", job["error"]))
        else:
            names = ("job", "epoch", "step", "loss", "sessions", "headline", "waiting_for")
            table.add_row(*_cells(*(job.get(name, "") for name in names)))
    if jobs and "as_of" in jobs[0]:
        return Group(Text(f"as of {_dated(jobs[0])}", style="bold yellow"), table)
    return table if jobs else Text("This lighthouse knows no job.")


def _dated(picture: dict[str, Any]) -> str:
    """Return when a lighthouse led for the last time, and why it led no more."""
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(picture["as_of"]))
    return f"{at}, when the lighthouse led no more ({picture['not_led_because']})"


def _job(job: dict[str, Any], width: int) -> RenderableType:
    record = job["record"] or {}
    title = f"job {job['job']}: generation {job['generation']}, epoch {job['epoch']}, step {job['step']}"
    title += f", loss {job['loss']}" if job.get("loss") else ""
    first = job.get("headline", "")
    because = f" ({record['reason']})" if record.get("reason", first) not in first else ""
    rows = []
    for member in job["members"]:
        role = "leaving" if member["leaving"] else "new member" if member["joining"] else "member"
        ranks = 1 + len(member.get("ranks", ()))
        rows.append((member, f"{role}, {ranks} ranks" if ranks > 1 else role))
    rows += [(joiner, "spare" if joiner.get("spare") else "outside") for joiner in job["joiners"]]
    shown = {entry["replica"] for entry, _ in rows}
    absent = job.get("absent", ())  # a lighthouse of an older release has none
    rows += [(_absent(x), x["state"]) for x in absent if x["replica"] not in shown]
    trouble = _trouble(job, rows)
    rows = _with_hosts(_shortened(rows, first), job.get("nodes", ()))
    wide = width >= _WIDE
    speeds = _speeds(job)
    columns = ["replica", "role", "host", "phase", "step", *(["s/step", "speed", "share"] if speeds else [])]
    columns += ["session", "trainer", "verdict", *(["status", "checkpoint server"] if wide else [])]
    table = _table(columns, [_row(entry, role, speeds, wide) for entry, role in rows], width)
    lighthouse, store = job["lighthouse"], job["store"]
    ledger = job.get("ledger") or {}
    led = [Text(f"led by {lighthouse['url']} over store {store['id']}", style="dim")]
    lines = [title + because]
    if not job["complete"]:
        waits = (
            []
            if absent and job["waiting_for"].startswith("nothing")
            else [f"waiting for {job['waiting_for']}"]
        )
        lines += [*waits, f"recoverable: {recoverable(job['recoverable'])}"]
    if job.get("durable"):
        newest = job["durable"]
        behind = counted(newest["steps_behind"], "step")
        lines.append(f"durable: step {newest['step']} of generation {newest['generation']}, {behind} behind")
    lines += _shards(job.get("data_shards"))
    lines += _orders(job, record)
    lines += trouble
    lines += _slow(job.get("health")) + _slowest(job.get("health") or {})
    if ledger.get("goodput") is not None:
        spent = ", ".join(f"{name} {ledger[name]:.0f} s" for name in _SPENT)
        lines.append(f"goodput {100 * ledger['goodput']:.1f} %: {spent}")
    # Addresses are not wrapped, so that people can copy them.
    has_addresses = any(column.header == "checkpoint server" for column in table.columns)
    below = [] if has_addresses else [_address(entry) for entry, _ in rows if entry["ckpt"]]
    addresses = (Text(line, no_wrap=True, overflow="ignore") for line in below)
    return Group(*_head(job), *map(Text, lines), table, *addresses, *([] if "as_of" in job else led))


def _head(job: dict[str, Any]) -> list[Text]:
    """Return the first lines: whether all replicas run, or who is gone, and checkpoints that fail."""
    first = job.get("headline", "")
    head = [Text(first, style="bold green" if WHOLE.fullmatch(first) else "bold red")] if first else []
    if "as_of" in job:
        head = [Text(f"as of {_dated(job)}: {first}", style="bold yellow")]
    return head + [
        Text(f"durable checkpoints of {replica} fail: {why}", style="bold red")
        for replica, why in job.get("durable_failing", {}).items()
    ]


def _shortened(rows: list[tuple[dict[str, Any], str]], headline: str) -> list[tuple[dict[str, Any], str]]:
    """Return the rows without long verdicts that the first line says already."""
    long = {entry["verdict"] for entry, _ in rows if len(entry["verdict"]) > _LONGEST_VERDICT}
    repeated = {verdict for verdict in long if verdict.partition(", since ")[0] in headline}
    return [({**x, "verdict": "see above"} if x["verdict"] in repeated else x, role) for x, role in rows]


def _table(columns: list[str], rows: list[list[Text]], width: int) -> Table:
    """Return a table that wraps at words. Without room it leaves the least needed columns out."""
    cells = [[name, *(row[i].plain for row in rows)] for i, name in enumerate(columns)]
    least = [
        min(_LONGEST_WORD, max(len(word) for cell in column for word in cell.split())) for column in cells
    ]
    kept = list(range(len(columns)))
    for name in _LEAST_NEEDED:
        if sum(least[i] + 3 for i in kept) < width:
            break
        kept = [i for i in kept if columns[i] != name]
    left, table = width - 1 - sum(least[i] + 3 for i in kept), Table()
    widths = dict[int, int]()
    for i in sorted(kept, key=lambda i: max(map(len, cells[i])) - least[i]):
        more = max(0, min(left, max(map(len, cells[i])) - least[i]))
        left, widths[i] = left - more, least[i] + more
    for i in kept:
        # A longer word is folded: a shortened name could fit several replicas.
        table.add_column(columns[i], overflow="fold", width=widths[i])
    for row in rows:
        table.add_row(*(row[i] for i in kept))
    return table


def _absent(absence: dict[str, Any]) -> dict[str, Any]:
    """Return the row of a replica without a session."""
    since = time.strftime("%H:%M:%S", time.gmtime(absence["since"]))
    verdict = f"{absence['why']}, since {since} UTC"
    nothing = {"phase": "", "step": None, "session_age_s": None, "connected": True, "trainer_status": None}
    return {"replica": absence["replica"], "host": absence["host"], **nothing, "verdict": verdict, "ckpt": ""}


def _with_hosts(
    rows: list[tuple[dict[str, Any], str]], hosts: Sequence[dict[str, Any]]
) -> list[tuple[dict[str, Any], str]]:
    """Return the rows with each replica's hosts below it; where hosts are many, the members are left out."""
    below: dict[str, list[tuple[dict[str, Any], str]]] = {}
    for host in (x for x in hosts if len(hosts) <= _LONG or x["state"] != "member"):
        replica = host["replica"] if host["node"] >= 0 else ""
        where = f"{host['host']} (rack {host['rack']})" if host["rack"] else host["host"]
        row = _absent({**host, "replica": replica and f"{replica} node {host['node']}", "host": where})
        is_plain = host["state"] == "member" and not host["why"]
        row["verdict"] = "alive" if is_plain else row["verdict"].removeprefix(", ")
        below.setdefault(replica, []).append((row, host["state"]))
    placed = [x for row in rows for x in (row, *below.pop(row[0]["replica"], ()))]
    return placed + [x for others in below.values() for x in others]


def recoverable(state: dict[str, Any] | None) -> str:
    """Describe the state that survives if all trainers die now."""
    if state is None:
        return "nothing: no replica holds a whole snapshot"
    behind, age_s = state["steps_behind"], state["age_s"]
    parts = [f"step {state['step']} of generation {state['generation']}"]
    parts += [f"{age_s:.1f} s old"] if age_s is not None else []
    parts += [f"{counted(behind, 'step')} behind"] if behind is not None else []
    return ", ".join(parts)


def _shards(state: dict[str, Any] | None) -> list[str]:
    """Describe the shards that each replica reads and computes, where only some replicas can read each."""
    if state is None:
        return []
    lines = [
        f"data shards: {state['shards']}, redundancy {state['redundancy']}, stack depth {state['depth']}, "
        f"on_loss={state['on_loss']}"
    ]
    for member in state["members"][:_LONG]:
        rack = f" in rack {member['rack']}" if member["rack"] else ""
        computed = _numbers(member["computes"]) or "none"
        lines.append(
            f"  {member['replica']}{rack} reads {_numbers(member['reads']) or 'none'}, computes {computed}"
        )
    more = len(state["members"]) - _LONG
    lines += [f"  and {counted(more, 'more member')}: see --json"] if more > 0 else []
    lines += [f"shard {_numbers(state['lost'])}: no member can read it"] if state["lost"] else []
    return lines + ([state["warning"]] if state["warning"] else [])


def _numbers(values: Sequence[int]) -> str:
    return ", ".join(str(value) for value in values)


def _orders(job: dict[str, Any], record: dict[str, Any]) -> list[str]:
    """Describe the operator overrides, and the replicas and hosts that failed."""
    overrides, lines = record.get("overrides", {}), []
    if overrides.get("paused"):
        lines.append(f"joins are paused {overrides['paused']}")
    if overrides.get("scaled"):
        policy, scaled = job["policy"], overrides["scaled"]
        lines.append(f"needs {policy['min_replicas']}, may have {policy['max_replicas']} replicas: {scaled}")
    for penalty in job.get("penalties", ()):
        until = time.strftime("%H:%M:%S", time.localtime(penalty["until"]))
        lines.append(
            f"{penalty['kind']} {penalty['about']} failed {penalty['times']} times, last: {penalty['why']}; "
            f"kept out until {until}"
        )
    hosts = job.get("hosts", ())  # those that failed in the last days, the most suspect first
    lines += [
        f"host {x['host']} failed {counted(x['times'], 'time')}"
        + (f" (lately {', '.join(x['failed'])})" if x.get("failed") else "")
        + f", last {time.strftime('%d %b %H:%M', time.localtime(x['at']))}: {x['why']}"
        + ("; suspect: who comes back there stands by while the job has its members" if x["suspect"] else "")
        for x in hosts[:_HOSTS]
    ]
    return lines + ([f"and {len(hosts) - _HOSTS} more hosts that failed"] if len(hosts) > _HOSTS else [])


def _trouble(job: dict[str, Any], rows: list[tuple[dict[str, Any], str]]) -> list[str]:
    """List the members that are not alive, where the table is too long to see them."""
    suspects = [
        f"{x['replica']} ({x['verdict']})" for x, role in rows if role != "spare" and x["verdict"] != "alive"
    ]
    if len(rows) <= _LONG or job["complete"] or not suspects:
        return []
    return [f"not as they should be: {first_of(suspects, _LONG)}"]


def _slow(health: dict[str, Any] | None) -> list[str]:
    """The slow replicas, with the evidence, and the shares that would help."""
    if not health:
        return []
    lines = [f"slow: {x['evidence']}" for x in health["slow"]]
    if advice := health["advice"]:
        shares = ", ".join(f"{replica} {count}" for replica, count in advice["micro_batches"].items())
        lines.append(
            f"advice: {advice['reason']} (micro-batches: {shares}; throughput +{advice['gain']:.0%})"
            + (f"; not followed: {advice['held']}" if advice.get("held") else "")
        )
    if in_force := health.get("shares"):
        shares = ", ".join(f"{replica} {count}" for replica, count in in_force["micro_batches"].items())
        lines.append(f"shares by speed: {in_force['reason']} (micro-batches: {shares})")
    if layout := health.get("layout_advice"):
        where = f"in the layout {layout['layout']}" if layout["layout"] else "drained for a spare"
        lines.append(
            f"advice: {layout['replica']} {where}: {layout['reason']} (throughput +{layout['gain']:.0%})"
            + (f"; not followed: {layout['held']}" if layout["held"] else "")
        )
    lines += [
        f"layout of {x['replica']}: {x['layout']}, usually {x['usual']}: {x['reason']}"
        for x in health.get("layouts", ())
    ]
    if health.get("vetoed"):
        lines.append(f"vetoed: the shares of {', '.join(health['vetoed'])} are never lowered")
    return lines


def _slowest(health: dict[str, Any]) -> list[str]:
    """Name the slowest rank over several steps, and the median speed; empty while none is known."""
    rows = health["by_step"]["rows"] if "by_step" in health and health["mode"] != "off" else ()
    # The newest step alone would contradict the table of replicas: one very short step shows anything.
    speeds = sorted(
        (row["speed"], row["replica"], row["rank"]) for row in rows if row.get("speed") is not None
    )
    if not speeds:
        return []
    speed, replica, rank = speeds[0]
    middle = speeds[len(speeds) // 2][0]
    return [
        f"speed: {replica} rank {rank} is slowest at {speed:.2f}, the median of "
        f"{counted(len(speeds), 'rank')} is {middle:.2f}"
    ]


def _speeds(job: dict[str, Any]) -> dict[str, list[str]]:
    """Each replica's seconds per step, its speed relative to its equals, and its share; empty at first."""
    replicas = (job.get("health") or {}).get("replicas", {})
    if all(x["speed"] is None for x in replicas.values()):
        return {}
    total = sum(member["shares"] for member in job["members"])
    cells = {}
    for member in job["members"]:
        figures = replicas.get(member["replica"], {})
        speed, seconds = figures.get("speed"), figures.get("seconds")
        share = f"{member['shares'] / total:.0%}" if total else ""
        cells[member["replica"]] = [
            "" if seconds is None else f"{seconds:.3g}",
            "" if speed is None else f"{speed:.2f}",
            share,
        ]
    return cells


def _row(entry: dict[str, Any], role: str, speeds: dict[str, list[str]], wide: bool) -> list[Text]:
    status = entry["trainer_status"] or {}
    phase = f"busy: {entry['busy']}" if entry.get("busy") else entry["phase"]
    session = _age(entry["session_age_s"]) + ("" if entry["connected"] else " (away)")
    step = "" if entry["step"] is None else entry["step"]
    pace = speeds.get(entry["replica"], [""] * 3) if speeds else []
    trainer = status.get("trainer", "")
    cells = _cells(
        entry["replica"], role, entry.get("host", ""), phase, step, *pace, session, trainer, entry["verdict"]
    )
    return cells + (_cells(_age(status.get("age_s")), entry["ckpt"]) if wide else [])


def _address(entry: dict[str, Any]) -> str:
    age = _age((entry["trainer_status"] or {}).get("age_s"))
    return f"{entry['replica']}: checkpoint server {entry['ckpt']}" + (f", status {age}" if age else "")


def _age(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds:.1f} s"


def _cells(*values: object) -> list[Text]:
    # Use Text objects: rich takes brackets in other processes' texts for markup.
    return [Text(str(value)) for value in values]


# ``fabric events``: shows the events of a job, and with ``--follow`` new events as they come.


_PAUSE_S = 0.5


@click.command()
@lighthouse_options
@click.option("--follow", "-f", is_flag=True, help="Go on as things happen, until Ctrl-C.")
@click.option("--after", default=0, help="Only events with a greater id.")
@json_option
def events(
    lighthouse: str, job: str, token_file: Path | None, follow: bool, after: int, as_json: bool
) -> None:
    """Show what happened to a job, oldest first."""
    lighthouses = lighthouses_of(lighthouse, job, token_file, needs_job=True)
    if follow:
        try:
            asyncio.run(_follow(lighthouses, after, as_json))
        except KeyboardInterrupt:
            return
    with understood("the lighthouse"):
        for event in lighthouses.ask(f"{lighthouses.path('events')}?after={after}") if not follow else ():
            _print(event, as_json)


async def _follow(lighthouses: Lighthouses, last: int, as_json: bool) -> None:
    """Print events as they come. After a fail-over go on at the next leader, after the last printed event."""
    is_waiting = False
    while True:
        try:
            path = f"{lighthouses.path('events')}?follow=1&after={last}"
            async with lighthouses.open(path, total_s=None) as answer:
                is_waiting = False
                async for line in answer.content:
                    with understood("the lighthouse"):
                        event = json.loads(line)
                        _print(event, as_json)
                        last = max(last, int(event["id"]))
        except BrokenPipeError:
            raise  # the program that reads standard output has ended
        except (Unreachable, aiohttp.ClientError, OSError, TimeoutError) as error:
            if last == 0:
                raise Unreachable(f"the events end here: {error}") from error
            if not is_waiting:
                click.echo(f"waiting for a lighthouse: {error}", err=True)
            is_waiting = True
        await asyncio.sleep(_PAUSE_S)


def _print(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(event))
        return
    when = datetime.fromtimestamp(float(event["t"])).astimezone().strftime("%Y-%m-%d %H:%M:%S.%f")[:-3]
    incident_id = f"[{event['incident_id']}]" if event.get("incident_id") else ""
    words = [
        when,
        f"epoch {event['epoch']}",
        incident_id,
        str(event["kind"]),
        str(event["about"]),
        str(event["why"]),
    ]
    # Other processes wrote some of the words: a word must not control the terminal.
    click.echo(printable("  ".join(word for word in words if word)))
