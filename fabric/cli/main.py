"""``fabric``: one command that imports a subcommand only when it is used.

Importing torch takes seconds and hundreds of megabytes, which ``fabric lighthouse`` and ``fabric status`` do
not need. An error that a person can mend gives one line on standard error and exit code 1.
"""

import importlib
import sys
from pathlib import Path

import click

from fabric import __version__
from fabric.cli.tls import tls_options
from fabric.errors import FabricError
from fabric.runtime.config import refuse_unknown_variables
from fabric.runtime.http.tls import Tls

# Command -> its module, and its line in the help.
_COMMANDS: dict[str, tuple[str, str]] = {
    "adapt": ("fabric.cli.operate:adapt", "Say what is done about slow replicas of a job."),
    "admit": ("fabric.cli.operate:admit", "Let in a replica or a host that failures keep out."),
    "ckpt-server": ("fabric.cli.ckpt_server:ckpt_server", "Hold and serve one replica's snapshots."),
    "demo": (
        "fabric.cli.demo.command:demo",
        "Train with replicas, kill one, and prove that nothing is lost.",
    ),
    "diagnose": (
        "fabric.cli.collectives.command:diagnose",
        "Say what holds a job up, from recorded collectives.",
    ),
    "diff": ("fabric.cli.states.inspect:diff", "Show where two states differ, files or URLs."),
    "doctor": ("fabric.cli.doctor:doctor", "Check this host, and say what to do."),
    "drain": ("fabric.cli.operate:drain", "Let a replica leave its job at a step boundary."),
    "drill": ("fabric.cli.drill:drill", "Break a job on purpose, and judge whether it held."),
    "events": ("fabric.cli.events:events", "Show what happened to a job, or follow what happens."),
    "evict": ("fabric.cli.operate:evict", "Evict a replica from its job at once."),
    "inspect": ("fabric.cli.states.inspect:inspect_state", "Show what is in a state, a file or a URL."),
    "launch": (
        "fabric.cli.launch.command:launch_command",
        "Start one replica's ranks on this host; start them again where that helps.",
    ),
    "end": ("fabric.cli.operate:end", "End a job whose processes are gone for good."),
    "lighthouse": ("fabric.cli.lighthouse:lighthouse", "Run a lighthouse: watch members, announce epochs."),
    "local": ("fabric.cli.local:local", "Train a script with several replicas on this host."),
    "pause": ("fabric.cli.operate:pause", "Pause joins: no replica enters a job for now."),
    "plan": ("fabric.cli.plan:plan", "Compare failure policies for a cluster, and say what to run."),
    "pull": ("fabric.cli.states.pull:pull", "Fetch a snapshot into a file, verified."),
    "resume": ("fabric.cli.operate:resume", "Resume joins after `fabric pause`."),
    "retry": ("fabric.cli.operate:retry", "Let a job that has failed begin again."),
    "run": ("fabric.cli.run:run", "Run a training script; import torch at low priority."),
    "scale": ("fabric.cli.operate:scale", "Set how many members a job needs and may have."),
    "status": ("fabric.cli.status:status", "Show the jobs of a lighthouse, or one of them."),
    "top": ("fabric.cli.status:top", "The same, live."),
}

# ``doctor`` reports an unknown variable among its findings, and the demo's processes get no FABRIC_ variable.
_TAKE_ANY_VARIABLES = ("demo", "doctor")


class LazyGroup(click.Group):
    """A group that imports a command when it is invoked."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command = getattr(importlib.import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Click's default would import every command to show the first line of its help.
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name][1]) for name in sorted(_COMMANDS)])


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fabric")
@tls_options
@click.pass_context
def cli(context: click.Context, tls_cert: Path | None, tls_key: Path | None, tls_ca: Path | None) -> None:
    """A checkpoint and recovery fabric for data-parallel PyTorch training."""
    if context.invoked_subcommand not in _TAKE_ANY_VARIABLES:
        refuse_unknown_variables()
    context.obj = Tls(tls_cert, tls_key, tls_ca)


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["run"]:
        run = importlib.import_module("fabric.cli.run")
        # The script runs outside of the error handling below, because its own hooks handle its errors.
        if run.names_a_program(sys.argv[2:]):
            run.run_program(sys.argv[2:])
            return
    try:
        cli(prog_name="fabric")
    except FabricError as error:
        words = importlib.import_module("fabric.cli.terminal_text")
        sys.stderr.write(f"error: {words.printable(str(error))}\n")
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
