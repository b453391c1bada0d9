"""Arguments of ``fabric demo``, its folder, its processes, and its reading of the journals."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cli.journals import STEPS, VICTIM, SyntheticRun
from click.testing import CliRunner
from rich.console import Console

from fabric.cli.demo.command import DemoProgress, _plain, demo
from fabric.drill.run.journal_watch import JournalFollower, JournalWatch, WatchedReplica
from fabric.runtime.guarded_processes import Processes


def until(condition: Callable[[], bool], within_s: float = 20.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.005)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--replicas", "0"], "--replicas must be between 1 and 64, not 0."),
        (["--replicas", "-3"], "--replicas must be between"),
        (["--steps", "0"], "--steps must be between"),
        (["--kill-at", "120"], "--kill-at must be between 1 and 119"),
        (["--kill-at", "0"], "--kill-at must be between"),
        (["--steps", "10", "--kill-at", "11"], "--kill-at must be between 1 and 9"),
        (["--kill-at", "soon"], "or never, not soon"),
    ],
)
def test_a_bad_argument_is_one_sentence(tmp_path: Path, arguments: list[str], sentence: str) -> None:
    out = tmp_path / "out"
    result = CliRunner().invoke(demo, ["--out", str(out), *arguments])
    assert result.exit_code == 2 and sentence in result.output
    assert result.output.count("\n") == 1 and not out.exists()


def test_the_time_limit_of_the_demo_can_be_changed(tmp_path: Path) -> None:
    command = ["demo", "--out", str(tmp_path / "out"), "--replicas", "1", "--limit-s", "0.001"]
    done = subprocess.run(
        [sys.executable, "-m", "fabric.cli.main", *command], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 1
    assert "did not finish within 0.001 s: give more with --limit-s" in done.stderr


def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    result = CliRunner().invoke(demo, ["--out", str(tmp_path)])
    assert result.exit_code == 2 and "is not the folder of an earlier fabric demo" in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = CliRunner().invoke(demo, ["--out", str(tmp_path / "file" / "out")])
    assert result.exit_code == 2 and "cannot be used" in result.output and "Traceback" not in result.output


PARENT = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", sys.argv[2]], start_new_session=True)
open(sys.argv[1] + ".new", "w").write(str(child.pid)); os.rename(sys.argv[1] + ".new", sys.argv[1])
child.wait()
"""
DEAF = "import signal; signal.signal(15, signal.SIG_IGN); signal.signal(2, signal.SIG_IGN); signal.pause()"


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    (tmp_path / "parent.py").write_text(PARENT)
    started = Processes({**os.environ, "PYTHONPATH": str(tmp_path)})
    yield started
    started.end(grace_s=0.2)
    assert started._marked.living() == []


def until_both_live(processes: Processes) -> None:
    # Wait for both processes: during its exec a process has no environment that could show its mark.
    until(lambda: len(processes._marked.living()) == 2)


def start_pair(processes: Processes, tmp_path: Path) -> int:
    note = tmp_path / "child.pid"
    processes.start("pair", ["parent", str(note), DEAF], tmp_path / "pair.log")
    until(note.exists)
    until_both_live(processes)
    return int(note.read_text())


def test_descendants_in_other_sessions_are_ended_too(processes: Processes, tmp_path: Path) -> None:
    child = start_pair(processes, tmp_path)
    assert child in processes._marked.living()
    processes.end(grace_s=0.2)
    assert processes._marked.living() == []
    assert processes.exit_code("pair") is not None


SUPERVISOR = """
import os, signal, sys
from pathlib import Path
from fabric.runtime.guarded_processes import Processes
processes = Processes(os.environ)
processes.start("pair", ["parent", sys.argv[1], sys.argv[2]], Path(sys.argv[3]))
print(processes.mark, flush=True)
signal.pause()
"""


def test_a_killed_supervisor_leaves_no_process_behind(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    note, child = tmp_path / "child.pid", "import signal; signal.pause()"
    command = [sys.executable, "-c", SUPERVISOR, str(note), child, str(tmp_path / "pair.log")]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        left = Processes({}, supervisor.stdout.readline().strip())
        try:
            until(note.exists)
            until_both_live(left)
        finally:
            supervisor.send_signal(signal.SIGKILL)
    until(lambda: not left._marked.living(), within_s=60.0)


def test_only_marked_processes_are_killed(processes: Processes, tmp_path: Path) -> None:
    child = start_pair(processes, tmp_path)
    with subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"]) as stranger:
        try:
            assert processes.kill(stranger.pid) is False
            assert stranger.poll() is None
            assert processes.kill(child) is True
            until(lambda: processes.exit_code("pair") is not None)
            assert processes.kill(child) is False
            assert stranger.poll() is None
        finally:
            stranger.send_signal(signal.SIGKILL)


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_in_terminals_and_logs(tmp_path: Path, terminal: bool) -> None:
    output = io.StringIO()
    path = tmp_path / "r0.jsonl"
    with (
        DemoProgress(Console(file=output, force_terminal=terminal, width=120), STEPS) as show,
        path.open("a", buffering=1) as file,
    ):
        watch = JournalWatch({"r0": path, "r1": tmp_path / "r1.jsonl"}, show.follow)
        for entry in SyntheticRun().entries["r0"]:
            file.write(json.dumps(entry) + "\n")
            watch.look()
    text = output.getvalue()
    assert "r0 started, process 100" in text and ("finished" in text) is terminal
    assert ("\x1b[" in text) is terminal
    assert ("step 5 of 10: loss 1.0000, r0 training (5)" in text) is not terminal


def test_a_journal_is_followed_as_it_grows(tmp_path: Path) -> None:
    path = tmp_path / "r1.jsonl"
    follower, view = JournalFollower(path), WatchedReplica(VICTIM)
    assert follower.poll() == []
    content = b"".join(json.dumps(entry).encode() + b"\n" for entry in SyntheticRun().entries[VICTIM])
    said: list[str] = []
    with path.open("ab", buffering=0) as file:
        # Write seven bytes at a time, so that every line arrives in pieces.
        for start in range(0, len(content), 7):
            file.write(content[start : start + 7])
            said.extend(filter(None, map(view.take, follower.poll())))
    run = SyntheticRun()
    sealed = next(e for e in run.supervisor if e.get("replica") == VICTIM and e["event"] == "journal")
    assert follower.counts == sealed["lines"]
    assert (view.step, view.phase, view.pid, view.epoch) == (STEPS, "finished", 177, 3)
    assert [sentence.split(",")[0] for sentence in said] == [
        "r1 started",
        "r1 is back",
        "r1 fetched the state of step 5 (4.0 MB)",
        "r1 joined with step 8",
    ]


def test_a_line_of_the_demo_has_the_loss_of_its_newest_step():
    killed = WatchedReplica("r0", "killed", step=3, loss=4.5)
    training = WatchedReplica("r1", "training", step=9, loss=2.25)
    starting = WatchedReplica("r2")
    assert _plain([killed, training, starting]).startswith("loss 2.2500, r0 killed (3), ")
    assert _plain([starting]) == "r2 starting (0)"
