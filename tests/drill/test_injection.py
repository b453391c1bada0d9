"""A drill touches only processes that allow it, and a dead drill leaves no process stopped."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from fabric.drill.injection.drilled_processes import DrilledProcesses, ProcessTarget, start_time
from fabric.drill.injection.injector import Injector, TrainerAddress
from fabric.drill.injection.played_faults import PlayedFault, kill, kill_server, memory, slow, stop
from fabric.drill.injection.undo_guard import UndoGuard, guard
from fabric.drill.schedule.drill_schedule import ScheduledFault
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


def looked(fault: PlayedFault, evidence: str) -> str:
    """The evidence ``observed`` or ``undone`` of a fault, once it is there."""

    def look() -> str:
        fault.look()
        return getattr(fault, evidence)

    until(look)
    return getattr(fault, evidence)


@pytest.fixture
def undo() -> Iterator[UndoGuard]:
    undo = UndoGuard()
    yield undo
    undo.close()


@dataclass
class Scene:
    """Stands for what a drill may touch: these trainers, and the servers of JOB."""

    trainers: dict[str, subprocess.Popen] = field(default_factory=dict)
    guard: UndoGuard | None = None
    started: list[str] = field(default_factory=list)
    server = DrilledProcesses(JOB).server

    @property
    def processes(self) -> "Scene":
        return self

    def trainer(self, replica: str) -> ProcessTarget:
        return ProcessTarget(self.trainers[replica].pid)

    def restarted(self, names: Sequence[str]) -> Callable[[], str]:
        return lambda: "; ".join(self.started)


@pytest.mark.parametrize(("player", "evidence"), [(stop, "is stopped"), (slow, "was stopped")])
def test_a_stopped_process_goes_on_at_the_end_of_its_fault(start, undo, player, evidence):
    process = start()
    fault = PlayedFault("stop")
    fault.script = player(Scene({"r0": process}, undo), fault, ScheduledFault("stop", "r0"))
    assert evidence in looked(fault, "observed") and not fault.undone
    fault.end()
    assert looked(fault, "undone") == f"process {process.pid} runs"
    assert state(process.pid) != "T" and evidence in fault.observed


@pytest.mark.parametrize("player", [stop, slow])
def test_a_stopped_process_goes_on_where_its_player_is_broken_off(start, undo, player):
    process = start()
    fault = PlayedFault("stop")
    fault.script = player(Scene({"r0": process}, undo), fault, ScheduledFault("stop", "r0"))
    looked(fault, "observed")
    fault.script.close()
    until(lambda: state(process.pid) != "T")
    fault.end()
    assert fault.undone == ""


def test_a_fault_that_ends_before_its_first_look_never_begins(start):
    process = start()
    fault = PlayedFault("kill")
    fault.script = kill(Scene({"r0": process}), fault, ("r0",))
    fault.end()
    assert process.poll() is None and not fault.pids


def test_a_kill_is_over_when_the_next_processes_are_seen(start):
    processes = {name: start() for name in ("r0", "r1")}
    scene, fault = Scene(processes), PlayedFault("kill-two")
    fault.script = kill(scene, fault, ("r0", "r1"))
    assert looked(fault, "observed").count("is gone") == 2
    assert fault.pids == {name: x.pid for name, x in processes.items()} and fault.targets == ("r0", "r1")
    fault.end()
    assert not fault.is_over
    scene.started.append("process 1 of r0 started")
    fault.look()
    assert fault.undone == "process 1 of r0 started"


def test_a_killed_checkpoint_server_is_over_when_another_has_taken_its_place(start):
    start("fabric.ckpt_server", **allowed())
    fault = PlayedFault("kill-server")
    fault.script = kill_server(Scene(), fault, ScheduledFault("kill-server", "r1"))
    looked(fault, "observed")
    fault.end()
    assert not fault.undone
    successor = start("fabric.ckpt_server", **allowed())
    assert looked(fault, "undone") == f"process {successor.pid} has taken its place"


def test_memory_is_held_until_the_end(monkeypatch):
    monkeypatch.setattr("fabric.drill.injection.played_faults._MOST_MEMORY_BYTES", 1 << 24)
    fault = PlayedFault("memory")
    fault.script = memory(Scene(), fault, ScheduledFault("memory"))
    assert "holds" in looked(fault, "observed")
    fault.end()
    assert "has ended" in fault.undone


class Orders:
    """Stands for a lighthouse: orders the faults, and ends the trainer once all of them are over."""

    def __init__(self, faults: list[dict], trainer: subprocess.Popen) -> None:
        self.faults, self.trainer = faults, trainer
        self.reports: dict[str, dict[str, str]] = {}

    def path(self, *rest: str) -> str:
        return "/".join(rest)

    def ask(self, path: str, body: dict) -> dict:
        self.reports |= body["reports"]
        over = {number for number, x in self.reports.items() if x.keys() & {"undone", "problem"}}
        if len(over) == len(self.faults):
            self.trainer.kill()
        left = [x for x in self.faults if str(x["number"]) not in over]
        return {"drill": "d1", "faults": left}


def test_an_injector_plays_what_the_lighthouse_orders_and_says_what_it_cannot_play(start, undo, tmp_path):
    trainer = start()
    faults = [("stop", 0.2), ("no-such-fault", 0.0), ("hang", 1.0)]
    orders = Orders(
        [{"number": n, "fault": name, "seconds": s} for n, (name, s) in enumerate(faults, start=1)], trainer
    )
    Injector(TrainerAddress(trainer.pid, JOB, "r1", tmp_path, True), orders, undo).run()
    reports = orders.reports
    assert reports["1"]["observed"] == f"process {trainer.pid} is stopped"
    assert reports["1"]["undone"] == f"process {trainer.pid} runs"
    assert reports["2"] == {"problem": "this injector plays no no-such-fault: use a drill of its version"}
    assert "no trainer takes orders of a drill" in reports["3"]["problem"]
