"""``fabric demo`` and ``fabric demo verify``: arguments, exit codes and sentences for people.

Exit codes: 0 good, 1 a process failed or a promise of the protocol was broken, 2 a mistake in the
arguments, 130 interrupted.
"""

from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import click
from rich.console import Console

from fabric.audit.verify import verify
from fabric.cli.demo.supervise import TIME_LIMIT_S, DemoOptions, supervise
from fabric.cli.terminal_text import plain_console, printable
from fabric.errors import ConfigError, FabricError
from fabric.runtime.local_job import MAX_REPLICAS, claimed, interrupt_at_sigterm

MAX_STEPS = 100_000
DEFAULT_STEPS = 120
FILES = ("supervisor.jsonl", "summary.json", "report.html", "events.jsonl")


@click.group(invoke_without_command=True)
@click.option("--out", default="demo-out", type=click.Path(path_type=Path), help="Folder of the run.")
@click.option("--replicas", default=3, show_default=True, help="How many replicas train.")
@click.option("--steps", default=DEFAULT_STEPS, show_default=True, help="Steps to train.")
@click.option("--kill-at", type=int, help="Kill a replica at this step; default a third of the run.")
@click.option("--no-failure", is_flag=True, help="Kill no replica: the same job undisturbed.")
@click.option("--limit-s", default=TIME_LIMIT_S, show_default=True, help="Most seconds for the run.")
@click.option("--drop-micro-batch", is_flag=True, hidden=True)
@click.pass_context
def demo(
    context: click.Context,
    out: Path,
    replicas: int,
    steps: int,
    kill_at: int | None,
    no_failure: bool,
    limit_s: float,
    drop_micro_batch: bool,
) -> None:
    """Train a language model with replicas, kill one with SIGKILL, and prove that nothing was lost."""
    if context.invoked_subcommand is not None:
        return
    console = plain_console()
    try:
        kill = _kill_step(replicas, steps, kill_at, no_failure=no_failure)
        if replicas == 1 and kill is None and not no_failure:
            console.print(
                "A single replica has no peer to catch up from: it is not killed unless --kill-at says so."
            )
        _run(DemoOptions(out, replicas, steps, kill, drop_micro_batch, limit_s), console)
    except ConfigError as error:
        _fail(error, 2)
    except FabricError as error:
        _fail(error, 1)
    except KeyboardInterrupt:
        _fail("Interrupted; every process of the demo has been ended.", 130)


@demo.command("verify")
@click.argument("directory", type=click.Path(path_type=Path))
def verify_command(directory: Path) -> None:
    """Recompute the summary of the run in DIRECTORY from its journals and check every promise."""
    try:
        verdict = verify(directory)
    except (ConfigError, OSError) as error:
        _fail(error, 2)
    for sentence in verdict.broken:
        click.echo(printable(sentence))
    if verdict.broken:
        raise SystemExit(1)
    summary = verdict.summary
    click.echo(
        f"{summary.steps} steps, {len(summary.failure_list)} failures, {len(summary.join_list)} joins: "
        "the journals agree with summary.json, and every promise was kept."
    )


def _run(options: DemoOptions, console: Console) -> NoReturn:
    interrupt_at_sigterm()
    with claimed(options.out, "demo", FILES) as directory:
        code = supervise(replace(options, out=directory), console)
    raise SystemExit(code)


def _kill_step(replicas: int, steps: int, kill_at: int | None, *, no_failure: bool) -> int | None:
    """Return the step at which to kill, None for no kill. Raises ConfigError for impossible arguments."""
    if not 1 <= replicas <= MAX_REPLICAS:
        raise ConfigError(f"--replicas must be between 1 and {MAX_REPLICAS}, not {replicas}.")
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"--steps must be between 1 and {MAX_STEPS}, not {steps}.")
    if no_failure:
        if kill_at is not None:
            raise ConfigError("--no-failure and --kill-at contradict each other; give one of them.")
        return None
    if kill_at is not None and not 1 <= kill_at < steps:
        raise ConfigError(f"--kill-at must be between 1 and {steps - 1} for {steps} steps, not {kill_at}.")
    if kill_at is None:
        return None if replicas == 1 or steps == 1 else max(1, steps // 3)
    return kill_at


def _fail(why: object, code: int) -> NoReturn:
    click.echo(f"Error: {printable(str(why))}", err=True)
    raise SystemExit(code)
