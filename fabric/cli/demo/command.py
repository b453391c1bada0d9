"""``fabric demo`` and ``fabric demo verify``: arguments, exit codes and sentences for people.

Exit codes: 0 good, 1 a process failed or a promise of the protocol was broken, 2 a mistake in the
arguments, 130 interrupted.
"""

import contextlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from types import TracebackType
from typing import NoReturn

import click
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fabric.audit.audit import Evidence, absent
from fabric.audit.journal import JournalLine, ReplicaJournal, lines_of, read_run
from fabric.audit.summary import Verdict, judge, mean_loss, step_gaps, verify, write_summary
from fabric.cli.lighthouse_options import out_option, replicas_option
from fabric.cli.terminal_text import plain_console, print_table
from fabric.drill.report.charts import ChartMark, ChartPoint, ChartSpan, bars, colour, curves, rosters
from fabric.drill.report.documents import (
    failure_table,
    html_facts,
    html_list,
    html_table,
    join_table,
    overview_table,
)
from fabric.drill.run.journal_watch import JournalWatch, WatchedReplica
from fabric.errors import ConfigError, FabricError
from fabric.model import printable
from fabric.runtime.local_job import MAX_REPLICAS, POLL_S, LocalJob, claimed, interrupt_at_sigterm
from fabric.runtime.process_environment import own_program
from fabric.runtime.rank_layout import is_count

# ``report.html`` and ``events.jsonl``: a run for people to look at.
#
# The page needs no network and no other file. It is written from the same evidence as the verdict, also
# for a run that broke a promise.


def write_report(directory: Path, verdict: Verdict) -> None:
    (directory / "report.html").write_bytes(render(verdict).encode(errors="backslashreplace"))
    events = [json.dumps(entry) + "\n" for entry in merged_events(verdict.evidence)]
    (directory / "events.jsonl").write_text("".join(events), encoding="utf-8")


def merged_events(evidence: Evidence) -> list[Mapping[str, object]]:
    """Return all journal lines and supervisor events, ordered by wall time."""
    entries: list[Mapping[str, object]] = [
        dict(line.fields) for journal in evidence.run.journals.values() for line in journal.lines
    ]
    entries.extend({**event, "source": "supervisor"} for event in evidence.run.supervisor)
    return sorted(entries, key=lambda entry: float(str(entry["t"])))


def render(verdict: Verdict) -> str:
    evidence, summary = verdict.evidence, verdict.summary
    times = [line.t for journal in evidence.run.journals.values() for line in journal.lines]
    zero = min(times, default=0.0)
    seconds = max(times, default=0.0) - zero
    marks = [ChartMark(f.t - zero, "kill", f"{f.replica} dies") for f in summary.failure_list]
    marks += [ChartMark(j.t - zero, "join", f"{j.replica} joins") for j in summary.join_list]
    replicas = sorted(evidence.run.journals)
    spans = {name: _spans(evidence.run.journals[name], zero) for name in replicas}
    template = Template((files("fabric.cli.demo") / "report.html").read_text(encoding="utf-8"))
    return template.substitute(
        title=f"{len(replicas)} replicas, {summary.steps} steps, failures: {len(summary.failure_list)}",
        subtitle=f"A training run of {seconds:.1f} s, as the journals of its replicas tell it.",
        verdict=f"{len(verdict.broken)} promises of the protocol were broken."
        if verdict.broken
        else "Every step was committed once, with every sample counted once, and all replicas hold the same "
        "bits.",
        verdict_class="bad" if verdict.broken else "good",
        broken=html_list(verdict.broken[:50]),
        facts=html_facts(
            (str(summary.steps_lost), "steps lost"),
            (str(summary.samples_skipped), "samples skipped"),
            (str(summary.samples_repeated), "samples repeated"),
            (f"{summary.median_step_s:.3f} s", "median step"),
            (f"{summary.max_survivor_stall_s:.3f} s", "longest stall"),
            (f"{summary.final_loss:.4f}", "final loss"),
        ),
        legend="".join(
            f'<button data-replica="{escape(name)}" aria-pressed="true">'
            f'<i style="background:{colour(index)}"></i>{escape(name)}</button>'
            for index, name in enumerate(replicas)
        ),
        loss=curves(_losses(evidence, zero), marks, seconds),
        roster=rosters(spans, marks, seconds),
        steps=bars(_step_times(evidence, zero), marks, seconds, summary.median_step_s),
        failures=html_table(failure_table(summary), "No process failed."),
        joins=html_table(join_table(summary), "No process joined the running job."),
    )


def _losses(evidence: Evidence, zero: float) -> dict[str, list[list[ChartPoint]]]:
    def point(line: JournalLine) -> ChartPoint:
        replay, loss = line.flag("replay"), mean_loss(line.fields)
        tip = f"{line.replica}, step {line.integer('step')}: {loss:.4f}{' (replayed)' if replay else ''}"
        return ChartPoint(line.t - zero, loss, tip, hollow=replay)

    return {
        replica: [list(map(point, lines_of(lines, "commit"))) for lines in journal.incarnations()]
        for replica, journal in sorted(evidence.run.journals.items())
    }


def _step_times(evidence: Evidence, zero: float) -> dict[str, list[ChartPoint]]:
    series: dict[str, list[ChartPoint]] = {name: [] for name in sorted(evidence.run.journals)}
    for line, gap in step_gaps(evidence):
        tip = f"{line.replica}, step {line.integer('step')}: {gap:.3f} s"
        series[line.replica].append(ChartPoint(line.t - zero, gap, tip))
    return series


def _spans(journal: ReplicaJournal, zero: float) -> list[ChartSpan]:
    """Return the replica's epoch over time, from each epoch line of its journal to the next."""
    spans: list[ChartSpan] = []
    for lines in journal.incarnations():
        start, epoch = lines[0].t, None
        for line in lines_of(lines, "epoch"):
            member = journal.replica in line.fields["roster"]
            spans.append(_one_span(journal.replica, start - zero, line.t - zero, epoch))
            start, epoch = line.t, line.integer("epoch") if member else None
        spans.append(_one_span(journal.replica, start - zero, lines[-1].t - zero, epoch))
    return spans


def _one_span(replica: str, start: float, end: float, epoch: int | None) -> ChartSpan:
    what = "starts or catches up" if epoch is None else f"in epoch {epoch}"
    return ChartSpan(start, end, f"{replica} {what}, {start:.2f} s to {end:.2f} s", epoch)


_STYLES = {"training": "green", "catching up": "yellow", "killed": "bold red", "finished": "dim"}


class DemoProgress:
    """A context manager around the run; ``say`` adds a line, ``update`` redraws."""

    def __init__(self, console: Console, steps: int, views: Mapping[str, WatchedReplica]) -> None:
        self._console, self._steps, self._views = console, steps, views
        self._began = time.monotonic()
        self._told = 0
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

    def say(self, *lines: str) -> None:
        """Print one line per sentence; the first line shows the seconds since the start."""
        for index, line in enumerate(lines):
            stamp = f"{time.monotonic() - self._began:6.1f} s  " if index == 0 else " " * 10
            self._console.print(Text(stamp + line), soft_wrap=True)

    def update(self) -> None:
        if self._live is not None:
            self._live.update(self._picture(), refresh=True)
            return
        done = max((view.step for view in self._views.values()), default=0)
        # Where the output is a log, it gets one line for every tenth of the run.
        if done * 10 // self._steps > self._told:
            self._told = done * 10 // self._steps
            self.say(f"step {done} of {self._steps}: {_plain(list(self._views.values()))}")

    def _picture(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for name in ("replica", "phase", "step", "epoch", "loss", "step time"):
            table.add_column(name, min_width=9)
        for view in self._views.values():
            table.add_row(
                view.replica,
                Text(view.phase, style=_STYLES.get(view.phase, "")),
                str(view.step),
                str(view.epoch),
                "" if view.loss is None else f"{view.loss:.4f}",
                "" if view.step_s is None else f"{view.step_s:.3f} s",
            )
        done = max((view.step for view in self._views.values()), default=0)
        return Group(table, ProgressBar(total=self._steps, completed=done, width=60))


def _plain(views: Sequence[WatchedReplica]) -> str:
    # A replica that was killed or is behind shows the loss of an older step.
    newest = max((view for view in views if view.step), key=lambda view: view.step, default=None)
    loss = f"loss {newest.loss:.4f}, " if newest is not None and newest.loss is not None else ""
    return loss + ", ".join(f"{view.replica} {view.phase} ({view.step})" for view in views)


JOB = "demo"
TRAINER = "fabric.cli.demo.trainer"
TIME_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The arguments of ``fabric demo``. ``kill_at`` None: no replica is killed."""

    out: Path
    replicas: int
    steps: int
    kill_at: int | None
    limit_s: float = TIME_LIMIT_S  # the demo has failed if it is not over by then

    @property
    def names(self) -> list[str]:
        return [f"r{number}" for number in range(self.replicas)]

    @property
    def victim(self) -> str:
        return self.names[1 % self.replicas]


def supervise(options: DemoOptions, console: Console) -> int:
    """Run the demo in the claimed folder ``options.out``; returns the exit code.

    Raises FabricError where a process failed or the time limit passed.
    """
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FABRIC_")}
    with LocalJob(options.out, JOB, options.names, inherited) as job:
        supervisor = _Supervisor(options, job)
        with DemoProgress(console, options.steps, supervisor.views) as show:
            supervisor.run(show)
    supervisor.seal()
    return _conclude(options, console)


def _conclude(options: DemoOptions, console: Console) -> int:
    """Judge the run and write its summary, from its journals alone."""
    out = options.out
    verdict = judge(read_run(out))
    write_summary(out, verdict.summary)
    write_report(out, verdict)
    for table in (t(verdict.summary) for t in (overview_table, failure_table, join_table)):
        print_table(console, table.title, table.head, table.rows)
    for sentence in verdict.broken:
        console.print(sentence, style="red", markup=False)
    for replica in absent(verdict.evidence):
        console.print(
            f"{replica} was not back before the end and does not hold the final state: give it more --steps.",
            markup=False,
        )
    console.print(f"Report: {out / 'report.html'}", soft_wrap=True, markup=False)
    return 1 if verdict.broken else 0


class _Supervisor:
    """The loop around a running job.

    The supervisor has no part in the training. It reads the journals, and writes its actions and observations
    to ``supervisor.jsonl``. Each replica has its own launcher, which restarts a killed trainer.
    """

    def __init__(self, options: DemoOptions, job: LocalJob) -> None:
        self._options, self._job = options, job
        self._watch = JournalWatch({name: job.journal(name) for name in options.names})
        self.views = self._watch.replicas
        self._killed = options.kill_at is None
        self._shown = False

    def run(self, show: DemoProgress) -> None:
        """Run from the first process to the exit of the last launcher."""
        deadline = time.monotonic() + self._options.limit_s
        options = self._options
        self._job.note("demo", replicas=options.replicas, steps=options.steps, kill_at=options.kill_at)
        self._job.start_lighthouse()
        show.say(f"the lighthouse answers at {self._lighthouse}")
        for name in options.names:
            self._start_replica(name)
        while not self._job.is_over():
            self._job.check("lighthouse")
            self._follow(show)
            if time.monotonic() > deadline:
                raise FabricError(
                    f"The demo did not finish within {options.limit_s:g} s: give more with --limit-s, "
                    f"or see the logs of its processes in {options.out / 'log'}."
                )
            time.sleep(POLL_S)
        self._follow(show)

    def seal(self) -> None:
        """Log how many lines of each process of each replica the supervisor has seen."""
        for name, counts in self._watch.counts().items():
            self._job.note("journal", replica=name, lines=counts)

    @property
    def _lighthouse(self) -> str:
        return next(iter(self._job.urls.values()))

    def _start_replica(self, name: str) -> None:
        options = self._options
        # Do not use `fabric run`: on a crowded host a low-priority start may take as long as the whole demo.
        program = own_program(TRAINER, "--steps", str(options.steps))
        # The audit needs the digest of the state after every step.
        settings = {"FABRIC_DIGEST_EVERY": "1", "OMP_NUM_THREADS": "1"}
        self._job.start_replica(name, ["--no-python", *program], settings)

    def _follow(self, show: DemoProgress) -> None:
        before = self._watch.lines
        for sentence in self._watch.look():
            show.say(sentence)
        victim = self.views[self._options.victim]
        if not self._killed and victim.step >= (self._options.kill_at or 0) and victim.pid:
            self._kill(victim, show)
        if not self._shown and all(view.step > 0 for view in self.views.values()):
            self._shown = True
            page = f"{self._lighthouse}/ with the token of {self._options.out / 'token'}"
            show.say(f"look inside: {page} in a browser, or in another terminal:", *self._curl_lines())
        if self._watch.lines > before:
            show.update()

    def _kill(self, view: WatchedReplica, show: DemoProgress) -> None:
        t = time.time()
        if not self._job.processes.kill(view.pid):
            raise FabricError(f"Process {view.pid} of {view.replica} was to be killed and is not ours.")
        self._killed = True
        self._job.note("kill", t, replica=view.replica, pid=view.pid, step=view.step)
        view.phase = "killed"
        show.say(f"kill -9 {view.pid}: {view.replica} dies after step {view.step}")

    def _curl_lines(self) -> Iterator[str]:
        curl = f"curl -s -H @{self._options.out / 'auth'}"
        yield f"{curl} {self._lighthouse}/v1/jobs/{JOB}"
        yield f"{curl} {self._lighthouse}/v1/jobs/{JOB}/events"
        client = self._job.client
        with contextlib.suppress(FabricError, LookupError, TypeError, AttributeError):
            members = client.ask(client.path())["members"]
            for checkpoint in [member["ckpt"].rstrip("/") for member in members if member["ckpt"]][:1]:
                yield f"{curl} {checkpoint}/v1/snapshots"
                yield f"{curl} -o latest.safetensors {checkpoint}/v1/snapshots/latest/data"


MAX_STEPS = 100_000
DEFAULT_STEPS = 120
FILES = ("supervisor.jsonl", "summary.json", "report.html", "events.jsonl")


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
        with claimed(out, "demo", FILES) as directory:
            code = supervise(DemoOptions(directory, replicas, steps, kill, limit_s), console)
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
