"""The lanes of ``make test``: each file runs once, a failure is reported, and a signal ends everything."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
import lanes
lanes.LANES, lanes.LINT = {"jobs": 2}, ("true",)
lanes.files = lambda: {"jobs": sys.argv[1:]}
lanes.start_zygotes = lambda folder: os.open(os.devnull, os.O_RDONLY)
lanes.forked_processes.has_room = lambda: True
sys.exit(lanes.main())
"""
PASSES = """
import pathlib
def test_it(): pathlib.Path(__file__).with_suffix(".ran").open("a").write("once")
"""
FAILS = PASSES + "def test_more(): assert 2 * 2 == 5"
WAITS = PASSES.rstrip() + "; __import__('time').sleep(1000)"


@pytest.fixture
def start(tmp_path):
    """Start lanes with files of these sources."""

    def run(*sources: str) -> subprocess.Popen:
        names = []
        for number, source in enumerate(sources):
            names.append(tmp_path / f"test_file{number}.py")
            names[-1].write_text(source)
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
        command = [sys.executable, "-c", PROGRAM, *map(str, names)]
        return subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return run


def ran(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in folder.glob("*.ran")}


def test_each_file_runs_once_and_a_failure_is_reported(start, tmp_path):
    process = start(PASSES, PASSES, FAILS, PASSES, PASSES)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 1, said
    assert ran(tmp_path) == {f"test_file{number}": "once" for number in range(5)}
    assert said.endswith("failed: jobs\n") and "assert (2 * 2) == 5" in said
    assert said.count("=== jobs: exit code 0 ===") == said.count("=== jobs: exit code 1 ===") == 1


def test_lanes_that_pass_end_with_0(start):
    process = start(PASSES, PASSES, PASSES)
    said = process.communicate(timeout=300)[0]
    assert process.returncode == 0 and said.endswith("all passed\n"), said


def test_a_signal_ends_all_lanes_and_shows_what_they_did(start, tmp_path):
    process = start(WAITS, WAITS)
    while len(ran(tmp_path)) < 2:
        assert process.poll() is None
        os.sched_yield()
    process.send_signal(signal.SIGTERM)
    said = process.communicate(timeout=300)[0]
    assert process.returncode != 0 and said.count("=== jobs: interrupted ===") == 2, said
