"""``fabric``: one command that imports a subcommand only when it is used.

Importing torch takes seconds and hundreds of megabytes, which ``fabric lighthouse`` and ``fabric status`` do
not need. An error that a person can mend gives one line on standard error and exit code 1.
"""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from fabric import __version__
from fabric.errors import FabricError
from fabric.model import Value
from fabric.runtime.config import refuse_unknown_variables
from fabric.runtime.http.tls import Tls


class _Command(Value):
    does: str  # the line in the help
    example: str  # the words after ``fabric``
    first: bool = False  # `fabric --help` shows it; `fabric commands` shows all
    where: str = ""  # the module in fabric/cli, and the attribute, where they are not named as the command


# Group -> command -> what is shown without importing the command.
_GROUPS: dict[str, dict[str, _Command]] = {
    "Run": {
        "local": _Command(
            "Train a script with several replicas on this host.",
            "local --replicas 3 --adopt auto train.py",
            first=True,
        ),
        "launch": _Command(
            "Start one replica's ranks on this host; start them again where that helps.",
            "launch --job gpt --replica r0 --replicas 3 --lighthouse http://10.0.0.5:8600 train.py",
            first=True,
            where="launch.command:launch_command",
        ),
        "lighthouse": _Command(
            "Run a lighthouse: watch members, announce epochs.",
            "lighthouse --store sqlite:///lighthouse.db --token-file token",
            first=True,
        ),
        "run": _Command("Run a training script; import torch at low priority.", "run train.py --epochs 2"),
        "ckpt-server": _Command(
            "Hold and serve one replica's snapshots.",
            "ckpt-server --job gpt --replica r0 --run-dir /run/fabric/r0",
        ),
    },
    "Look": {
        "status": _Command(
            "Show the jobs of a lighthouse, or one of them.",
            "status --job gpt --lighthouse http://10.0.0.5:8600 --token-file token",
            first=True,
        ),
        "top": _Command("The same, live.", "top --job gpt", where="status"),
        "events": _Command(
            "Show what happened to a job, or follow what happens.",
            "events --job gpt --follow",
            first=True,
            where="status",
        ),
        "doctor": _Command("Check this host, and say what to do.", "doctor", first=True),
        "diagnose": _Command(
            "Say what holds a job up, from recorded collectives.", "diagnose --job gpt --save evidence"
        ),
    },
    "States": {
        "pull": _Command(
            "Fetch a snapshot into a file, verified.",
            "pull http://10.0.0.7:35905 -o state.safetensors --token-file token",
            first=True,
            where="states",
        ),
        "inspect": _Command(
            "Show what is in a state, a file or a URL.",
            "inspect state.safetensors",
            where="states:inspect_state",
        ),
        "diff": _Command(
            "Show where two states differ, files or URLs.",
            "diff state.safetensors http://10.0.0.8:41233 --token-file token",
            where="states",
        ),
    },
    "Operate": {
        "adapt": _Command(
            "Say what is done about slow replicas of a job.",
            'adapt --mode act --why "the remedies held in advice"',
            where="operate",
        ),
        "admit": _Command(
            "Let in a replica or a host that failures keep out.",
            'admit r1 --why "its disk is new"',
            where="operate",
        ),
        "drain": _Command(
            "Let a replica leave its job at a step boundary.",
            'drain r2 --why "its memory is bad"',
            where="operate",
        ),
        "end": _Command(
            "End a job whose processes are gone for good.",
            'end --job gpt --why "the run is over"',
            where="operate",
        ),
        "evict": _Command(
            "Evict a replica from its job at once.",
            'evict r2 --why "its host is gone" --host-is-gone',
            where="operate",
        ),
        "pause": _Command(
            "Pause joins: no replica enters a job for now.",
            'pause --why "rack 4 is serviced"',
            where="operate",
        ),
        "resume": _Command(
            "Resume joins after `fabric pause`.", 'resume --why "rack 4 is back"', where="operate"
        ),
        "retry": _Command(
            "Let a job that has failed begin again.", 'retry --why "data mended"', where="operate"
        ),
        "scale": _Command(
            "Set how many members a job needs and may have.",
            'scale --max 6 --why "two hosts less"',
            where="operate",
        ),
    },
    "Prove and plan": {
        "demo": _Command(
            "Train with replicas, kill one, and prove that nothing is lost.",
            "demo --replicas 3",
            where="demo.command",
        ),
        "drill": _Command(
            "Break a job on purpose, and judge whether it held.",
            "drill --replicas 3 --fault 'kill r1' -- python train.py",
            first=True,
        ),
        "plan": _Command(
            "Compare failure policies for a cluster, and say what to run.",
            "plan gpus=4096 replica_gpus=64 mtbf_s=7200",
        ),
    },
}
_COMMANDS = {name: command for group in _GROUPS.values() for name, command in group.items()}

# ``doctor`` reports an unknown variable among its findings, and the demo's processes get no FABRIC_ variable.
_TAKE_ANY_VARIABLES = ("commands", "demo", "doctor")


# Command -> removed flag -> what to give in its place.
_LIMITS = "autonomy-s failures lease-s max-jobs max-replicas retain-s silence-s start-wait-s store-wait-s"
_PLAN = (
    "arrivals=arrivals exchange=exchange_s gpus=gpus link=link_bytes_s micro-batches=micro_batches "
    "mtbf=mtbf_s rack-replicas=rack_replicas rack-share=rack_share repair=repair_median_s "
    "replica-gpus=replica_gpus restart=restart_s save=save_s shape=shape state-bytes=state_bytes "
    "step=step_s steps=steps"
)
_STORE = dict.fromkeys(
    ("--store-ca", "--store-cert", "--store-key"),
    "give --store-tls FOLDER with ca.crt, and for mTLS tls.crt and tls.key",
)
_GONE: dict[str, dict[str, str]] = {
    "fabric": dict.fromkeys(
        ("--tls-ca", "--tls-cert", "--tls-key"), "give --tls FOLDER with tls.crt, tls.key and ca.crt"
    ),
    "demo": {"--no-failure": "give --kill-at never"},
    "doctor": _STORE,
    "drill": dict.fromkeys(("--every", "--for"), 'give --random "7 every 30s for 2m"'),
    "launch": {"--spare-node": "give --node spare"},
    "lighthouse": {
        **_STORE,
        "--port": "give --bind 127.0.0.1:8600",
        **{f"--{name}": f"give --limit {name}=NUMBER" for name in _LIMITS.split()},
    },
    "plan": {
        "--preset": "write the preset's name alone",
        **{f"--{old}": f"write {new}=VALUE" for old, new in (pair.split("=") for pair in _PLAN.split())},
    },
}


@contextmanager
def _gone_flags() -> Iterator[None]:
    """Name what replaces a removed flag."""
    try:
        yield
    except click.NoSuchOption as error:
        name = error.ctx.info_name if error.ctx is not None else ""
        if instead := _GONE.get(name or "", {}).get(error.option_name):
            raise click.UsageError(f"{error.option_name} is gone: {instead}", error.ctx) from None
        raise


class LazyGroup(click.Group):
    """A group that imports a command when it is invoked."""

    def make_context(self, *arguments: Any, **named: Any) -> click.Context:
        """As in the base class."""
        with _gone_flags():
            return super().make_context(*arguments, **named)

    def invoke(self, ctx: click.Context) -> Any:
        """As in the base class."""
        with _gone_flags():
            return super().invoke(ctx)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*_COMMANDS, "commands"]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name == "commands":
            return commands
        if cmd_name not in _COMMANDS:
            return None
        chosen = _COMMANDS[cmd_name]
        name = cmd_name.replace("-", "_")
        module, _, attribute = (chosen.where or name).partition(":")
        command = getattr(importlib.import_module(f"fabric.cli.{module}"), attribute or name)
        assert isinstance(command, click.Command)
        command.epilog = f"Example: fabric {chosen.example}"
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        # Click's default would import every command to show the first line of its help.
        _write_groups(formatter, lambda command: command.first)
        formatter.write_paragraph()
        formatter.write_text("All commands: fabric commands. One command: fabric COMMAND --help.")


def _write_groups(formatter: click.HelpFormatter, shown: Callable[[_Command], bool]) -> None:
    for title, group in _GROUPS.items():
        if rows := [(name, command.does) for name, command in group.items() if shown(command)]:
            with formatter.section(title):
                formatter.write_dl(rows)


@click.command("commands")
def commands() -> None:
    """Show all commands, in groups."""
    formatter = click.HelpFormatter()
    _write_groups(formatter, lambda command: True)
    click.echo(formatter.getvalue().strip())


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fabric")
@click.option(
    "--tls",
    envvar="FABRIC_TLS",
    type=click.Path(path_type=Path),
    help="Folder with tls.crt, tls.key and ca.crt (PEM), for TLS in both directions; FABRIC_TLS.",
)
@click.pass_context
def cli(context: click.Context, tls: Path | None) -> None:
    """A checkpoint and recovery fabric for data-parallel PyTorch training."""
    if context.invoked_subcommand not in _TAKE_ANY_VARIABLES:
        refuse_unknown_variables()
    context.obj = Tls(tls)


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
