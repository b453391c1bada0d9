"""Standbys: a rank that starts again is a process that has imported torch, and is as a new one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_launch import Play, runs

from fabric.cli.launch import standbys as module
from fabric.cli.launch.standbys import Standbys
from fabric.cli.run import STANDBY_NAME
from fabric.drill.injection.drilled_processes import DrilledProcesses
from fabric.errors import Refused
from fabric.runtime.process_environment import STANDBY, is_standby

# Plays ``fabric run``, without torch; $ACT: what it does in place of that.
PLAYED = """
import json, os, socket, sys, time
act = os.environ.get("ACT")
if act == "dies":
    sys.exit(1)
launcher = socket.socket(fileno=int(os.environ["FABRIC_STANDBY"].split()[0]))
print("up", flush=True)
if act == "imports":
    time.sleep(1000)
launcher.send(b"ready")
print(launcher.recv(65536).decode(), flush=True)
launcher.send(b"begins")
launcher.close()
sys.stdin.read()  # until the test's end
"""
ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "TORCHELASTIC_RESTART_COUNT": "0", "OMP_NUM_THREADS": "1"}


@pytest.fixture
def standbys():
    made = Standbys()
    yield made
    made.close()


def start(standbys, **environment) -> "subprocess.Popen[bytes]":
    """Start a standby, and wait until it runs."""
    found = []

    def spawn(variables, inherited):
        command = [sys.executable, "-S", "-c", PLAYED]
        found.append(
            subprocess.Popen(
                command,
                env=dict(variables),
                pass_fds=inherited,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        )
        return found[0]

    standbys.start(0, {**ENVIRONMENT, **environment}, spawn)
    if environment.get("ACT") == "dies":
        found[0].wait()
    else:
        assert found[0].stdout.readline() == b"up\n"
    return found[0]


def wait_ready(standbys) -> None:
    """Wait until the standby has said a word, and leave it there."""
    connection = standbys._waiting[0].connection
    assert connection.recv(64, module.socket.MSG_PEEK) == b"ready"


def test_a_standby_learns_the_variables_of_the_attempt(standbys):
    process = start(standbys)
    wait_ready(standbys)
    assert is_standby(process.pid, {STANDBY: _variable(process.pid)})
    now = {**ENVIRONMENT, "RANK": "3", "TORCHELASTIC_RESTART_COUNT": "1", "FABRIC_REPLICA": "r7"}
    assert standbys.take(0, now) is process
    told = {"RANK": "3", "TORCHELASTIC_RESTART_COUNT": "1", "FABRIC_REPLICA": "r7"}
    assert json.loads(process.stdout.readline()) == told
    assert standbys.take(0, now) is None and not standbys.pids
    process.kill()
    process.wait()


def _variable(pid: int) -> str:
    entries = Path(f"/proc/{pid}/environ").read_text().split("\0")
    return next(x.partition("=")[2] for x in entries if x.startswith(f"{STANDBY}="))


@pytest.mark.parametrize("why", ["another environment", "a variable less", "dies", "imports", "stopped"])
def test_a_rank_starts_without_a_standby_that_does_not_fit_or_does_not_answer(standbys, why, monkeypatch):
    monkeypatch.setattr(module, "_ANSWER_S", 0.1)
    process = start(standbys, **({"ACT": why} if why in ("dies", "imports") else {"GIVEN": "1"}))
    now = {**ENVIRONMENT, **({"ACT": why} if why in ("dies", "imports") else {"GIVEN": "1"})}
    if why not in ("dies", "imports"):
        wait_ready(standbys)
    if why == "another environment":
        now["OMP_NUM_THREADS"] = "2"
    elif why == "a variable less":
        del now["GIVEN"]
    elif why == "stopped":
        process.send_signal(signal.SIGSTOP)
    assert standbys.take(0, now) is None
    assert process.wait() != 0 and not standbys.pids


def test_the_standbys_of_an_earlier_attempt_end(standbys):
    process = start(standbys)
    standbys.close()
    assert process.wait() == -signal.SIGKILL


def test_a_drill_takes_no_standby_for_the_trainer():
    environment = {**os.environ, "FABRIC_JOB": "job", "FABRIC_REPLICA": "r0", "FABRIC_DRILL": "1"}
    sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
    waiting = Standbys()
    waiting.start(0, environment, lambda given, kept: subprocess.Popen(sleep, env=dict(given), pass_fds=kept))
    with subprocess.Popen(sleep, env=environment) as trainer:
        try:
            found = DrilledProcesses("job").trainer("r0")
            assert found.pid == trainer.pid
            found.close()
        finally:
            trainer.kill()
            waiting.close()
    with pytest.raises(Refused):
        DrilledProcesses("job").trainer("r0")


# A training script: its first process ends as by a fault once a standby waits, and each notes what it is.
SCRIPT = """
import ctypes, faulthandler, gc, json, os, signal, sys, threading, time
from pathlib import Path
modules = sorted(sys.modules)
import torch
from torch.utils.data import DataLoader
OWN = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "MASTER_PORT")
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
def signal_at_the_parents_end():
    found = ctypes.c_int()
    ctypes.CDLL(None).prctl(2, ctypes.byref(found))
    return found.value
def niceness():
    # The kernel may still have the thread that imported, which Python has seen the end of.
    until = time.monotonic() + 30
    while True:
        found = {}
        for thread in os.listdir("/proc/self/task"):
            try:
                found[os.getpriority(os.PRIO_PROCESS, int(thread))] = thread
            except ProcessLookupError:
                pass
        if len(found) == 1 or time.monotonic() > until:
            return list(found)
        time.sleep(0.01)
def named(name):
    for entry in Path("/proc").iterdir():
        try:
            if (entry / "comm").read_text().strip() == name:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getppid():
                    return int(entry.name)
        except OSError:
            pass
    return 0
def facts():
    descriptors = {}
    for number in sorted(os.listdir("/proc/self/fd"), key=int):
        try:
            descriptors[number] = os.readlink(f"/proc/self/fd/{number}").partition("[")[0]
        except OSError:
            pass  # that of the search itself
    return {
        "name": __name__, "argv": sys.argv, "file": __file__, "path": sys.path, "flags": str(sys.flags),
        "own": __import__("__main__").__dict__ is globals(), "modules": modules,
        "environment": {k: v for k, v in os.environ.items() if k not in OWN},
        "signals": {str(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "faulthandler": faulthandler.is_enabled(), "descriptors": descriptors,
        "session": os.getsid(0) == os.getpid(), "group": os.getpgid(0) == os.getpid(),
        "parent": os.getppid(), "dies with it": signal_at_the_parents_end(), "folder": os.getcwd(),
        "threads": [x.name for x in threading.enumerate()], "computes": torch.get_num_threads(),
        "niceness": niceness(),
        "comm": Path("/proc/self/comm").read_text(), "cuda": torch.cuda.is_initialized(),
        "gc": [gc.isenabled(), gc.get_threshold()], "living": len(gc.get_objects()) < 100_000,
        "words": Path("/proc/self/cmdline").read_text(),
        "forked": [int(x) for x in DataLoader(range(4), num_workers=2)],
    }
if __name__ == "__main__":
    folder = os.environ["NOTES"]
    last = facts()
    last["spawned"] = [int(x) for x in DataLoader(range(4), num_workers=1, multiprocessing_context="spawn")]
    Path(f"{folder}/facts-{attempt}").write_text(json.dumps(last))
    if attempt == 0:
        until = time.monotonic() + 300
        while not (standby := named("fabric-standby")) and time.monotonic() < until:
            time.sleep(0.05)
        Path(f"{folder}/standby").write_text(str(standby))
        # The next process reads the script as it is then.
        Path(__file__).write_text(Path(__file__).read_text() + "    print('changed', flush=True)\\n")
        os.kill(os.getpid(), signal.SIGKILL)
    Path(f"{folder}/second").write_text(str(os.getpid()))
    while len(sys.argv) > 1 and sys.argv[1] == "wait":
        time.sleep(1000)
"""
LAUNCH = """
import sys
from fabric.cli.launch import launcher
launcher.STANDBYS_AFTER_S = 0.0
sys.argv[0] = "fabric"
from fabric.cli.main import main
main()
"""


def test_a_rank_that_was_a_standby_is_as_a_new_process(tmp_path):
    play = Play(tmp_path)
    play.script.write_text(SCRIPT)
    command = [
        sys.executable,
        "-P",
        "-c",
        LAUNCH,
        "launch",
        "--restarts",
        "1",
        str(play.script),
        "--steps",
        "5",
    ]
    environment = play.environment(OMP_NUM_THREADS="1", PYTHONFAULTHANDLER="1")
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (0, "changed\n"), ended.stderr
    cold, warm = [json.loads((tmp_path / f"facts-{attempt}").read_text()) for attempt in (0, 1)]
    for fact in cold:
        assert warm[fact] == cold[fact], fact
    assert int((tmp_path / "second").read_text()) == int((tmp_path / "standby").read_text()) != 0
    assert STANDBY not in warm["environment"] and STANDBY_NAME not in warm["comm"]
    assert not warm["cuda"] and warm["dies with it"] == signal.SIGKILL and warm["niceness"] == [os.nice(0)]


def test_a_killed_launcher_leaves_no_standby(tmp_path):
    play = Play(tmp_path)
    play.script.write_text("import time\nwhile True: time.sleep(1000)")
    command = [sys.executable, "-P", "-c", LAUNCH, "launch", "--ranks", "2", str(play.script)]
    with subprocess.Popen(command, env=play.environment()) as launcher:
        children = f"/proc/{launcher.pid}/task/{launcher.pid}/children"
        play.wait_for(lambda: len(_standbys_among(children)) == 2, "a standby of each rank")
        started = list(map(int, Path(children).read_text().split()))
        assert len(started) == 4, "a rank and its standby, twice"
        launcher.kill()
    play.wait_for(lambda: not any(map(runs, started)), "all of them to end")


def _standbys_among(children: str) -> list[int]:
    found = []
    for word in Path(children).read_text().split():
        entries = Path(f"/proc/{word}/environ").read_text().split("\0")
        variables = dict(x.partition("=")[::2] for x in entries)
        found += [int(word)] if is_standby(int(word), variables) else []
    return found
