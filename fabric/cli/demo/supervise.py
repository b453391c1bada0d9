"""Runs the demo: starts the processes, kills one trainer, waits for the end, and judges the journals.

The supervisor has no part in the training. It reads the journals, and writes its actions and observations to
``supervisor.jsonl``. Each replica has its own launcher, which restarts a killed trainer.
"""

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from fabric.audit.audit import absent
from fabric.audit.journal import read_run
from fabric.audit.verify import judge, write_summary
from fabric.cli.demo.progress import DemoProgress
from fabric.cli.demo.report import write_report
from fabric.cli.terminal_text import print_table
from fabric.drill.report.tables import failure_table, join_table, overview_table
from fabric.drill.run.journal_watch import JournalWatch, WatchedReplica
from fabric.errors import FabricError
from fabric.runtime.local_job import POLL_S, LocalJob
from fabric.runtime.process_environment import own_program

JOB = "demo"
TIME_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """The arguments of ``fabric demo``. ``kill_at`` None: no replica is killed. ``drop`` makes it the control
    run: a survivor leaves a micro-batch of the dead replica out of its gradient."""

    out: Path
    replicas: int
    steps: int
    kill_at: int | None
    drop: bool = False
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
    """The loop around a running job."""

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
        program = own_program("fabric.cli.demo.trainer", "--steps", str(options.steps))
        if options.drop and name == options.names[0]:
            program = (*program, "--drop-inherited")
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
