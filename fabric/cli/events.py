"""``fabric events``: shows the events of a job, and with ``--follow`` new events as they come."""

import asyncio
import json
from datetime import datetime
from pathlib import Path
from typing import Any

import aiohttp
import click

from fabric.cli.lighthouse_options import lighthouse_options, lighthouses_of
from fabric.errors import Unreachable
from fabric.model import printable
from fabric.runtime.http.lighthouse_client import Lighthouses, understood

_PAUSE_S = 0.5


@click.command()
@lighthouse_options
@click.option("--follow", "-f", is_flag=True, help="Go on as things happen, until Ctrl-C.")
@click.option("--after", default=0, help="Only events with a greater id.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object per line.")
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
