"""``fabric demo`` and ``fabric demo verify``: a drill with one kill, and its own first page.

Exit codes: 0 good, 1 a process failed or a promise of the protocol was broken, 2 a mistake in the
arguments, 130 interrupted.
"""

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fabric.audit.audit import absent
from fabric.audit.journal import RecordedRun
from fabric.audit.summary import verify, write_summary
from fabric.cli.lighthouse_options import out_option, replicas_option
from fabric.cli.terminal_text import plain_console, print_table
from fabric.drill.judge.drill_verdict import judge_drill
from fabric.drill.report.documents import failure_table, join_table, overview_table, write_reports
from fabric.drill.run.drill_loop import DrillRun
from fabric.drill.run.journal_watch import JournalWatch, WatchedReplica
from fabric.drill.run.started_job import REPORTS, JobOptions
from fabric.drill.schedule.drill_schedule import DrillSchedule, ScheduledFault
from fabric.errors import ConfigError, FabricError
from fabric.model import printable
from fabric.runtime.local_job import MAX_REPLICAS, SUPERVISOR_FILE, claimed, interrupt_at_sigterm
from fabric.runtime.process_environment import other_environment, own_program
from fabric.runtime.rank_layout import is_count

TRAINER = "fabric.cli.demo.trainer"
TIME_LIMIT_S = 600.0
MAX_STEPS = 100_000
DEFAULT_STEPS = 120
FILES = (*REPORTS, SUPERVISOR_FILE, "summary.json", "events.jsonl")
# Times are not judged, because the host may be crowded.
EXPECT = ("promises-kept", "digests-equal", "samples-exactly-once")


_STYLES = {"training": "green", "catching up": "yellow", "killed": "bold red", "finished": "dim"}


class DemoProgress:
    """A context manager around the run; ``say`` adds a line, ``follow`` redraws what has changed."""

    def __init__(self, console: Console, steps: int, limit_s: float = math.inf) -> None:
        self._console, self._steps, self._limit_s = console, steps, limit_s
        self._views: Sequence[WatchedReplica] = ()
        self._began = time.monotonic()
        self._tenths = self._lines = 0
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None

    def __enter__(self) -> "DemoProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, sentence: str) -> None:
        """Print a sentence, with the seconds since the start."""
        stamp = f"{time.monotonic() - self._began:6.1f} s  "
        self._console.print(Text(stamp + sentence), soft_wrap=True)

    def follow(self, watch: JournalWatch, sentences: Sequence[str]) -> None:
        """Show what the journals have told. Raises FabricError after the time limit."""
        self._views = list(watch.replicas.values())
        for sentence in sentences:
            self.say(sentence)
        if watch.lines > self._lines:
            self._lines = watch.lines
            self._update()
        if time.monotonic() > self._began + self._limit_s:
            raise FabricError(
                f"The demo did not finish within {self._limit_s:g} s: give more with --limit-s, or see the "
                "logs of its processes in the folder log of --out."
            )

    def _update(self) -> None:
        done = max(view.step for view in self._views)
        if self._live is not None:
            self._live.update(self._picture(done), refresh=True)
        # Where the output is a log, it gets one line for every tenth of the run.
        elif done * 10 // self._steps > self._tenths:
            self._tenths = done * 10 // self._steps
            self.say(f"step {done} of {self._steps}: {_plain(self._views)}")

    def _picture(self, done: int) -> Group:
        table = Table(box=None, pad_edge=False)
        for name in ("replica", "phase", "step", "epoch", "loss", "step time"):
            table.add_column(name, min_width=9)
        for view in self._views:
            table.add_row(
                view.replica,
                Text(view.phase, style=_STYLES.get(view.phase, "")),
                str(view.step),
                str(view.epoch),
                "" if view.loss is None else f"{view.loss:.4f}",
                "" if view.step_s is None else f"{view.step_s:.3f} s",
            )
        return Group(table, ProgressBar(total=self._steps, completed=done, width=60))


def _plain(views: Sequence[WatchedReplica]) -> str:
    # A replica that was killed or is behind shows the loss of an older step.
    newest = max((view for view in views if view.step), key=lambda view: view.step, default=None)
    loss = f"loss {newest.loss:.4f}, " if newest is not None and newest.loss is not None else ""
    return loss + ", ".join(f"{view.replica} {view.phase} ({view.step})" for view in views)


def train(job: JobOptions, steps: int, kill_at: int | None, limit_s: float, console: Console) -> int:
    """Train to ``steps``, and kill a replica at step ``kill_at`` (None: none); return the exit code.

    Raises FabricError where a process failed or the time limit passed.
    """
    victim = job.names[1 % job.replicas]
    kills = () if kill_at is None else (ScheduledFault("kill", victim, step=kill_at),)
    schedule = DrillSchedule(kills, least_s=math.inf, warm_steps=0)
    with DemoProgress(console, steps, limit_s) as show:
        record = DrillRun(job, schedule, show.say, show.follow).run()
    verdict = judge_drill(record, EXPECT)
    write_summary(job.out, verdict.summary)
    write_events(job.out, record.run)
    line = f"fabric demo --replicas {job.replicas} --steps {steps} --kill-at {kill_at or 'never'}"
    title = f"{job.replicas} replicas, {steps} steps, failures: {len(verdict.summary.failure_list)}"
    write_reports(verdict, job.out, line, title)
    for table in (make(verdict.summary) for make in (overview_table, failure_table, join_table)):
        print_table(console, table.title, table.head, table.rows)
    for sentence in (*verdict.mistakes, *verdict.broken):
        console.print(sentence, style="red", markup=False)
    for replica in absent(verdict.evidence):
        console.print(
            f"{replica} was not back before the end and does not hold the final state: give it more --steps.",
            markup=False,
        )
    console.print(f"Report: {job.out / 'report.html'}", soft_wrap=True, markup=False)
    return 0 if verdict.holds else 1


def write_events(folder: Path, run: RecordedRun) -> None:
    """Write all lines of the journals and of the supervisor into one file, ordered by wall time."""
    events = [dict(line.fields) for journal in run.journals.values() for line in journal.lines]
    events += [{**event, "source": "supervisor"} for event in run.supervisor]
    events.sort(key=lambda event: float(str(event["t"])))
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(text, encoding="utf-8")


@click.group(invoke_without_command=True)
@out_option(default="demo-out")
@replicas_option(default=3)
@click.option("--steps", default=DEFAULT_STEPS, show_default=True, help="Steps to train.")
@click.option("--kill-at", help="Kill a replica at this step, or never; default a third of the run.")
@click.option("--limit-s", default=TIME_LIMIT_S, show_default=True, help="Most seconds for the run.")
@click.pass_context
def demo(
    context: click.Context,
    out: Path,
    replicas: int,
    steps: int,
    kill_at: str | None,
    limit_s: float,
) -> None:
    """Train a language model with replicas, kill one with SIGKILL, and prove that nothing was lost."""
    if context.invoked_subcommand is not None:
        return
    console = plain_console()
    try:
        kill = _kill_step(replicas, steps, kill_at)
        if replicas == 1 and kill_at is None:
            console.print(
                "A single replica has no peer to catch up from: it is not killed unless --kill-at says so."
            )
        interrupt_at_sigterm()
        environment = {**other_environment(), "OMP_NUM_THREADS": "1"}
        with claimed(out, "demo", FILES) as folder:
            # Do not use `fabric run`: on a crowded host a low-priority start may take as long as the demo.
            command = own_program(TRAINER, "--steps", str(steps))
            job = JobOptions(
                folder, command, replicas, environment=environment, name="demo", has_relays=False
            )
            code = train(job, steps, kill, limit_s, console)
        raise SystemExit(code)
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


def _kill_step(replicas: int, steps: int, kill_at: str | None) -> int | None:
    """Return the step at which to kill, None for no kill. Raises ConfigError for impossible arguments."""
    if not 1 <= replicas <= MAX_REPLICAS:
        raise ConfigError(f"--replicas must be between 1 and {MAX_REPLICAS}, not {replicas}.")
    if not 1 <= steps <= MAX_STEPS:
        raise ConfigError(f"--steps must be between 1 and {MAX_STEPS}, not {steps}.")
    if kill_at is None:
        return None if replicas == 1 or steps == 1 else max(1, steps // 3)
    if kill_at == "never":
        return None
    if not (is_count(kill_at) and int(kill_at) < steps):
        raise ConfigError(
            f"--kill-at must be between 1 and {steps - 1} for {steps} steps, or never, not {kill_at[:40]}."
        )
    return int(kill_at)


def _fail(why: object, code: int) -> NoReturn:
    click.echo(f"Error: {printable(str(why))}", err=True)
    raise SystemExit(code)
