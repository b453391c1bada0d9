"""Operator commands, such as drain, evict, scale and end. Each records who orders it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from fabric.cli.lighthouse_options import lighthouse_options, lighthouses_of, operator_name, why_option
from fabric.lighthouse.connections.validation import MOST_REPLICAS
from fabric.model import printable
from fabric.runtime.config import ADAPT_MODES
from fabric.runtime.http.lighthouse_client import understood

# The lighthouse's own limit max-replicas may be lower.
_REPLICAS = click.IntRange(0, MOST_REPLICAS)


def _order(
    action: str, help_text: str, done: str, *more: Callable[..., Any], needed: str = ""
) -> Callable[..., None]:
    """Return the command that orders ``action``.

    ``done`` is what it shows, with fields of the order and of the answer. ``needed`` is what it says to an
    order without any option of ``more``.
    """

    @click.command(action, help=help_text)
    @lighthouse_options
    @why_option(required=True)
    @click.option("--who", default="", help="Who decides; by default this user at this host.")
    def run(lighthouse: str, job: str, token_file: Path | None, why: str, who: str, **options: Any) -> None:
        lighthouses = lighthouses_of(lighthouse, job, token_file, needs_job=True)
        given = {name: value for name, value in options.items() if value is not None}
        if needed and not given:
            raise click.UsageError(needed)
        body = {**given, "who": who or operator_name(), "why": why}
        answer = lighthouses.ask(lighthouses.path(action), body)
        with understood("the lighthouse"):
            facts = {**given, **answer, "job": lighthouses.job}
            for name in ("min", "max"):
                facts[name] = facts.get(name) or "as many as its replicas ask for"
            facts["vetoed"] = ", ".join(map(str, facts.get("vetoed", ()))) or "none"
            words = [done.format(**facts)] + ([str(answer["note"])] if "note" in answer else [])
        for line in words:
            click.echo(printable(line))

    for option in more:
        run = option(run)
    return run


drain = _order(
    "drain",
    "Let REPLICA leave its job at the next step boundary; no member waits, nothing is lost.",
    "{replica} of job {job} leaves at the next step boundary; its process ends with exit code 0",
    click.argument("replica"),
)
evict = _order(
    "evict",
    "Evict REPLICA from its job at once, as if it had died; the others redo its part of the step.",
    "{replica} of job {job} is being evicted; it may come back, as after a death",
    click.argument("replica"),
    click.option("--host-is-gone", is_flag=True, help="Nobody waits any more for its host, which is away."),
)
pause = _order(
    "pause",
    "Pause joins until `fabric resume`; the members go on, also without those that die.",
    "job {job} admits no replica now; its members go on",
)
resume = _order("resume", "Resume joins after `fabric pause`.", "job {job} admits newcomers again")
scale = _order(
    "scale",
    "Set how many members a job needs to step and how many it may have; surplus members leave, newest first.",
    "job {job} needs {min}, and may have {max}",
    click.option("--min", type=_REPLICAS, help="Needed to step; 0: as the replicas ask."),
    click.option("--max", type=_REPLICAS, help="Most members; 0: as the replicas ask."),
    needed="give --min, --max or both; 0 is what the replicas themselves ask for",
)
admit = _order(
    "admit",
    "Let in a replica or a host that is kept out for failing too often; its failures are forgotten.",
    "job {job} holds nothing against {about} any more",
    click.argument("about", metavar="REPLICA|HOST"),
)
retry = _order(
    "retry",
    "Let a failed job begin again from the state in memory; start its replicas after that.",
    "job {job} may begin again",
)
end = _order(
    "end",
    "End a job whose processes are gone for good: it is complete, and its alerts end.",
    "job {job} is ended; start it again under another name",
)
adapt = _order(
    "adapt",
    "Say what is done about slow replicas of a job.",
    "job {job}: mode {mode}; replicas under a veto: {vetoed}",
    click.option("--mode", type=click.Choice(ADAPT_MODES), help="act: lower the shares of slow replicas."),
    click.option("--veto", metavar="REPLICA", help="Never lower the share of REPLICA."),
    click.option("--allow", metavar="REPLICA", help="End the veto for REPLICA."),
    needed="give --mode, --veto or --allow",
)
