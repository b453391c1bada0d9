"""A second kill counts as one in a recovery only if a survivor had aborted and not committed since."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fabric.drill.injection.drilled_processes import ProcessTarget
from fabric.drill.injection.played_faults import PlayedFault
from fabric.drill.run.journal_watch import JournalWatch
from fabric.drill.run.started_faults import DrillScene, kill_recovering


class Trainers:
    """Stands for the processes of a job: each replica is a process that sleeps."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
        self.processes = {name: subprocess.Popen(command) for name in ("r0", "r1", "r2")}

    def trainer(self, replica: str) -> ProcessTarget:
        return ProcessTarget(self.processes[replica].pid)


class Guard:
    def note_stop(self, pid: int) -> None: ...

    def note_continue(self, pid: int) -> None: ...


@pytest.fixture
def trainers() -> Iterator[Trainers]:
    started = Trainers()
    yield started
    for process in started.processes.values():
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()


def append(path: Path, event: str, t: float, **fields: object) -> None:
    items = {"event": event, "t": t, "pid": os.getpid(), "step": 1, **fields}
    text = ", ".join(f'"{k}": ' + (f'"{v}"' if isinstance(v, str) else str(v)) for k, v in items.items())
    with path.open("a") as file:
        file.write("{" + text + "}\n")


@pytest.mark.parametrize("commits_before", [False, True])
def test_the_journals_tell_whether_the_second_kill_hit_a_recovery(tmp_path, trainers, commits_before):
    paths = {name: tmp_path / name for name in trainers.processes}
    for path in paths.values():
        append(path, "start", time.time())
    watch = JournalWatch(paths)
    watch.look()
    scene = DrillScene(trainers, watch, Guard(), None)
    fault = PlayedFault("kill-recovering")
    fault.script = kill_recovering(scene, fault, ("r0", "r1"))
    fault.look()
    assert trainers.processes["r0"].wait(timeout=30) == -signal.SIGKILL
    assert not fault.observed and trainers.processes["r1"].poll() is None
    append(paths["r2"], "abort", time.time())
    if commits_before:
        append(paths["r2"], "commit", time.time())
    watch.look()
    fault.look()
    assert not fault.observed
    assert trainers.processes["r1"].wait(timeout=30) == -signal.SIGKILL
    # The recovery ends before the drill looks again.
    append(paths["r2"], "commit", time.time())
    watch.look()
    fault.look()
    assert bool(fault.observed) is not commits_before
    fault.end()
    assert not fault.undone
    for name in ("r0", "r1"):
        append(paths[name], "start", time.time())
    watch.look()
    fault.look()
    assert fault.undone == fault.earlier[0].undone and fault.undone.count("started") == 2
