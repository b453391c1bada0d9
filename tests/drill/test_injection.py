"""A drill touches only processes that allow it, and a dead drill leaves no process stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fabric.drill.injection.drilled_processes import DrilledProcesses, ProcessTarget, start_time
from fabric.drill.injection.undo_guard import UndoGuard, guard
from fabric.errors import Refused

JOB = f"drilled-{os.getpid()}"
SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
DRILL = """
import os, signal, sys, time
from fabric.drill.injection.undo_guard import UndoGuard
guard = UndoGuard()
guard.note_stop(int(sys.argv[1]))
os.kill(int(sys.argv[1]), signal.SIGSTOP)
print("stopped", flush=True)
time.sleep(600)
"""


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen]]:
    started = []

    def begin(*words: str, code: str = SLEEPER, **environment: str) -> subprocess.Popen:
        command = [sys.executable, "-c", code, *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | environment)
        assert process.stdout.readline()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def allowed(replica: str = "r1", job: str = JOB) -> dict[str, str]:
    return {"FABRIC_DRILL": "1", "FABRIC_JOB": job, "FABRIC_REPLICA": replica}


def test_a_process_that_was_started_for_drills_is_the_trainer_of_its_replica(start):
    process = start(**allowed())
    target = DrilledProcesses(JOB).trainer("r1")
    assert target.pid == process.pid and not target.is_gone and not target.is_stopped
    target.send(signal.SIGSTOP)
    until(lambda: target.is_stopped)
    target.send(signal.SIGCONT)
    until(lambda: not target.is_stopped)
    target.send(signal.SIGKILL)
    until(lambda: target.is_gone)
    target.send(signal.SIGKILL)
    target.close()


@pytest.mark.parametrize(
    "environment",
    [
        {"FABRIC_JOB": JOB, "FABRIC_REPLICA": "r1"},
        allowed() | {"FABRIC_DRILL": "0"},
        allowed(job="other"),
        allowed("r2"),
    ],
)
def test_no_other_process_is_touched(start, environment):
    start(**environment)
    with pytest.raises(Refused, match="r1 has no trainer on this host that was started with FABRIC_DRILL=1"):
        DrilledProcesses(JOB).trainer("r1")


def test_a_drill_touches_no_process_of_another_drill_on_the_host(start):
    first = start(**allowed(), FABRIC_GUARD_MARK="first")
    start(**allowed(), FABRIC_GUARD_MARK="second")
    target = DrilledProcesses(JOB, "first").trainer("r1")
    assert target.pid == first.pid
    target.close()
    with pytest.raises(Refused, match="r1 has no trainer on this host"):
        DrilledProcesses(JOB, "third").trainer("r1")


def test_a_replica_that_is_gone_is_one_sentence(start):
    process = start(**allowed())
    process.kill()
    process.wait()
    with pytest.raises(Refused, match="r1 has no trainer"):
        DrilledProcesses(JOB).trainer("r1")
    with pytest.raises(Refused, match=f"process {process.pid} is gone"):
        ProcessTarget(process.pid)


def test_the_launcher_and_the_server_of_a_replica_are_not_its_trainer(start):
    start("fabric.cli.main", "launch", **allowed())
    server = start("fabric.ckpt_server", **allowed())
    trainer = start(**allowed())
    processes = DrilledProcesses(JOB)
    for find, pid in ((processes.trainer, trainer.pid), (processes.server, server.pid)):
        target = find("r1")
        assert target.pid == pid
        target.close()
    assert processes.replicas() == ["r1"]


def test_two_ranks_on_one_host_are_one_sentence(start):
    start(**allowed())
    start(**allowed())
    with pytest.raises(Refused, match="r1 has 2 ranks on this host"):
        DrilledProcesses(JOB).trainer("r1")


def test_a_killed_drill_leaves_no_process_stopped(start):
    victim = start(**allowed())
    drill = start(str(victim.pid), code=DRILL)
    until(lambda: state(victim.pid) == "T")
    drill.kill()
    drill.wait()
    until(lambda: state(victim.pid) != "T")


def test_a_guard_continues_what_its_drill_has_not(start):
    first, second = start(), start()
    undo = UndoGuard()
    for process in (first, second):
        undo.note_stop(process.pid)
        process.send_signal(signal.SIGSTOP)
        until(lambda process=process: state(process.pid) == "T")
    undo.note_continue(second.pid)
    undo.close()
    until(lambda: state(first.pid) != "T")
    assert state(second.pid) == "T"


def test_a_guard_touches_no_process_that_has_the_pid_of_an_earlier_one(start):
    process = start()
    process.send_signal(signal.SIGSTOP)
    until(lambda: state(process.pid) == "T")
    guard([f"+{process.pid} {int(start_time(process.pid)) - 1}\n"])
    assert state(process.pid) == "T"
    guard([f"+{process.pid} {start_time(process.pid)}\n"])
    until(lambda: state(process.pid) != "T")


def test_a_process_that_is_gone_has_no_start_time(start):
    process = start()
    process.kill()
    process.wait()
    assert start_time(process.pid) == ""
