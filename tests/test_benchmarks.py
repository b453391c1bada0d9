"""The common part of the benchmarks: the arithmetic of their figures, and that a miss is reported."""

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))

import common


def test_sides_take_turns_and_the_warm_up_is_not_counted():
    calls = []

    def side(name, value):
        calls.append(name)
        return value

    measured = common.interleave(
        {"a": lambda: side("a", 1.0), "b": lambda: side("b", 2.0)}, rounds=4, warm_up=1
    )
    assert measured == {"a": [1.0] * 4, "b": [2.0] * 4}
    assert sorted(calls[:2]) == sorted(calls[2:4]) == ["a", "b"]
    firsts = calls[2::2]
    assert firsts == ["a", "b", "a", "b"]


def test_a_side_without_a_measure_is_timed():
    measured = common.interleave({"a": lambda: None}, rounds=3, warm_up=0)
    assert len(measured["a"]) == 3 and all(seconds >= 0 for seconds in measured["a"])


def test_a_ratio_is_paired_before_its_median_is_taken():
    # The machine gets ten times slower midway: the ratio of the medians would be 10.
    assert common.paired([1.0, 10.0, 20.0], [1.0, 5.0, 10.0]) == 2.0
    with pytest.raises(ValueError, match="per round"):
        common.paired([1.0], [])


def test_quantiles_are_observed_values():
    values = [float(x) for x in range(100)]
    assert [common.quantile(values, share) for share in (0, 0.5, 0.99, 1)] == [0.0, 49.0, 98.0, 99.0]
    assert common.quantile([3.0], 0.99) == 3.0


def test_a_missed_snapshot_is_reported(capsys):
    assert common.verdict("ratio", 0.9, at_most=1.0)
    assert not common.verdict("ratio", 1.1, at_most=1.0)
    assert not common.verdict("speed", 0.9, at_least=1.0)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["met", "MISSED", "MISSED"]


def test_the_last_line_is_an_object_of_plain_numbers(capsys):
    # None stands for a figure that could not be measured.
    result = {"ratio": {"2": {"4MB": 1.25, "128MB": None}}, "rounds": 9}
    common.finish(result)
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == result
    for value in (True, "1.25", float("nan"), [1.0]):
        with pytest.raises(ValueError, match="/ratio/2"):
            common.finish({"ratio": {"2": value}})


def test_an_absent_dependency_ends_with_2_and_a_sentence(capsys):
    with pytest.raises(SystemExit) as ended:
        common.need("no_such_module_anywhere", "this comparison")
    assert ended.value.code == 2
    assert "this comparison needs the Python package 'no_such_module_anywhere'" in capsys.readouterr().err


FLEET = """
import signal, subprocess, sys
sys.path.insert(0, sys.argv[1])
import common
from fleet import Fleet
common.begin()
with Fleet("nothing.py", 1) as fleet:
    # As a trainer starts its checkpoint server.
    apart = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print(fleet.folder, fleet._lighthouse.pid, apart.pid, flush=True)
    signal.pause()
"""
FORK = """
import os, signal, sys, time
sys.path.insert(0, sys.argv[1])
import common
child = os.fork()
if not child:
    common.die_with_parent()
    print(os.getpid(), flush=True)
signal.pause()
"""


def lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def ends_with(number: int, program: str, skip: int) -> list[str]:
    """Run ``program`` until it has printed a line after ``skip`` others, and end it; the words of the line.
    Every number there is the pid of a process that must be gone then."""
    command = [sys.executable, "-c", program, common.__file__.rpartition("/")[0]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(skip):
            process.stdout.readline()
        words = process.stdout.readline().split()
        pids = [word for word in words if word.isdecimal()]
        assert pids and all(map(lives, pids))
        process.send_signal(number)
        assert process.wait(timeout=60) == (143 if number == signal.SIGTERM else -number)
    deadline = time.monotonic() + 60
    while any(map(lives, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.01)
    return words


def test_a_benchmark_that_gets_sigterm_leaves_nothing_behind():
    folder, *_ = ends_with(signal.SIGTERM, FLEET, skip=1)
    assert not Path(folder).exists()


def test_a_benchmark_that_is_killed_leaves_no_process_behind():
    folder, *_ = ends_with(signal.SIGKILL, FLEET, skip=1)
    shutil.rmtree(folder)


def test_a_child_that_was_forked_dies_with_its_parent():
    ends_with(signal.SIGKILL, FORK, skip=0)


IMPORT_EACH = """
import runpy, sys
folders, given = sys.argv[1].split(":"), list(sys.path)
for script in sys.argv[2:]:
    sys.path[:] = [script.rpartition("/")[0], *given]
    runpy.run_path(script, run_name="imported")
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(tuple(folders)):
            del sys.modules[name]  # the next script finds its own imports
"""


def test_each_benchmark_finds_what_it_imports():
    """Each as in a process of its own; nobody runs most of them before a release."""
    root = Path(__file__).parent.parent.resolve()
    found = [*root.glob("benchmarks/*.py"), *root.glob("benchmarks/gpu/*.py")]
    # A trainer reads at once what its benchmark gives it.
    scripts = sorted(str(x) for x in found if not x.name.endswith("_trainer.py"))
    folders = f"{root}/benchmarks:{root}/tests"
    run = [sys.executable, "-P", "-c", IMPORT_EACH, folders, *scripts]
    done = subprocess.run(run, capture_output=True, text=True, cwd="/", check=False)
    assert done.returncode == 0, done.stderr
    assert len(scripts) > 30
