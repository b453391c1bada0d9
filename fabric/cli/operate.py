"""``fabric drain`` and ``fabric evict``: what a person decides about a replica, with who and why."""

import getpass
import socket
from collections.abc import Callable
from pathlib import Path

import click

from fabric.cli.asking import Lighthouses, lighthouse_options


def _command(action: str, help_text: str, done: str) -> Callable[..., None]:
    @click.command(action, help=help_text)
    @click.argument("replica")
    @lighthouse_options
    @click.option("--why", required=True, help="The reason, for the record.")
    @click.option("--who", default="", help="Who decides; by default this user at this host.")
    def run(lighthouse: str, job: str, token_file: Path | None, replica: str, why: str, who: str) -> None:
        found = Lighthouses.of(lighthouse, job, token_file, needs_job=True)
        body = {"replica": replica, "who": who or _me(), "why": why}
        found.ask(found.path(action), body)
        click.echo(f"{replica} of job {found.job} {done}")

    return run


def _me() -> str:
    return f"{getpass.getuser()}@{socket.gethostname()}"


drain = _command(
    "drain",
    "Let REPLICA leave its job at the next step boundary; nobody waits, nothing is lost.",
    "leaves at the next step boundary; its process ends with exit code 0",
)
evict = _command(
    "evict",
    "Leave REPLICA out of its job at once, as if it had died; the others redo its part of the step.",
    "is being evicted; it may come back, as after a death",
)
