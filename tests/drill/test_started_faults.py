"""Faults of a started job: each is played from its beginning to its end; the journals tell what it hit."""

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
from fabric.drill.run.started_faults import SCRIPTS, DrillScene, kill_recovering, play
from fabric.drill.schedule.drill_schedule import ScheduledFault


class Trainers:
    """Stands for the processes of a job: each replica is a process that sleeps."""

    def __init__(self) -> None:
        self.processes = {name: self.start() for name in ("r0", "r1", "r2")}

    @staticmethod
    def start() -> subprocess.Popen:
        return subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])

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


@pytest.mark.parametrize("has_joined", [False, True])
def test_a_kill_counts_as_one_of_a_joining_process_only_if_that_process_has_committed_nothing(
    tmp_path, trainers, has_joined
):
    paths = {name: tmp_path / name for name in trainers.processes}
    for path in paths.values():
        append(path, "start", time.time())
    watch = JournalWatch(paths)
    watch.look()
    fault = PlayedFault("kill-joining")
    scene = DrillScene(trainers, watch, Guard(), None)
    fault.script = SCRIPTS["kill-joining"](scene, fault, ScheduledFault("kill-joining", "r1"))
    fault.look()
    pids = [trainers.processes["r1"].pid]
    for number in range(1 + has_joined):
        assert trainers.processes["r1"].wait(timeout=30) == -signal.SIGKILL
        trainers.processes["r1"] = trainers.start()
        pids.append(trainers.processes["r1"].pid)
        append(paths["r1"], "start", time.time(), pid=pids[-1])
        if has_joined and not number:
            append(paths["r1"], "commit", time.time())
        watch.look()
        fault.look()
        assert trainers.processes["r1"].wait(timeout=30) == -signal.SIGKILL
        fault.look()
        assert bool(fault.observed) is (number == has_joined)
    assert [x.pids["r1"] for x in fault.earlier] == pids[:-1] and all(x.undone for x in fault.earlier)
    fault.end()
    assert fault.pids == {"r1": pids[-1]} and not fault.undone
    append(paths["r1"], "start", time.time())
    watch.look()
    fault.look()
    assert fault.undone == f"process {os.getpid()} of r1 started"


class Launchers:
    """Stands for a job: each launcher notes a new process in the journal of a trainer that is gone."""

    def __init__(self, trainers: Trainers, paths: dict[str, Path]) -> None:
        self.trainers, self.paths = trainers, paths
        self.noted: set[str] = set()

    def is_over(self) -> bool:
        for name, process in self.trainers.processes.items():
            if process.poll() is not None and name not in self.noted:
                self.noted.add(name)
                append(self.paths[name], "start", time.time())
        return False


@pytest.mark.parametrize(
    ("name", "target", "hit"), [("stop", "r1", 1), ("kill-two", "r2", 2), ("kill-all", "", 3)]
)
def test_a_fault_is_played_from_its_beginning_to_the_evidence_of_its_end(
    tmp_path, trainers, name, target, hit
):
    paths = {name: tmp_path / name for name in trainers.processes}
    for path in paths.values():
        append(path, "start", time.time())
    watch = JournalWatch(paths)
    watch.look()
    scene = DrillScene(trainers, watch, Guard(), Launchers(trainers, paths))
    (record,) = play(scene, ScheduledFault(name, target, lasts_s=0.2 if name == "stop" else None))
    assert record.name == name and len(record.targets) == hit
    assert record.observed.count("process") == hit
    if name == "stop":
        assert record.ended - record.began >= 0.2 and not record.kills
        assert record.undone == f"process {trainers.processes['r1'].pid} runs"
    else:
        assert record.ended == record.began and set(record.pids) == set(record.targets)
        assert record.kills and record.undone.count("started") == hit
