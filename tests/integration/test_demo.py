"""The demo as a person runs it: with a kill, undisturbed, and a control run whose loss must differ.

A failure must not change the mathematics. The only thing that may differ between the run with a kill and
the undisturbed one is the order in which float32 gradients are added (three members, then two, then three;
or one alone). So their mean losses agree at every step to within TOLERANCE. The control run drops one
inherited micro-batch of twelve once, and must exceed it.
"""

import json
import subprocess
import sys
from pathlib import Path

import demo_control
import pytest
from forked_processes import run_python, run_supervisor

from fabric.audit.audit import gather
from fabric.audit.journal import read_run
from fabric.audit.summary import mean_loss

# docs/demo.md has the largest measured difference of the mean loss, over runs of 120 steps.
TOLERANCE = 1e-5
STEPS = 9  # after the kill, six are left to come back in


def run_demo(out: Path, *arguments: str) -> None:
    done = run_supervisor("demo", "--out", str(out), "--steps", str(STEPS), *arguments)
    assert done.returncode == 0, f"{out.name}:\n{done.stdout}"
    assert done.stdout.splitlines()[-1] == f"Report: {out / 'report.html'}", done.stdout
    assert "/ in a browser, with the token of" in done.stdout, "the address of the lighthouse's page"


def compare_losses(*runs: Path) -> float:
    """Return the largest difference of the mean loss at any step of two runs."""
    first, second = (gather(read_run(folder)).lineage() for folder in runs)
    assert first and set(first) == set(second), "both have committed the same steps"
    return max(abs(mean_loss(first[step].fields) - mean_loss(second[step].fields)) for step in first)


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("demo")
    run_demo(folder / "killed")
    # One replica computes all twelve micro-batches. It starts a third of the processes.
    run_demo(folder / "undisturbed", "--kill-at", "never", "--replicas", "1")
    return {name: folder / name for name in ("killed", "undisturbed")}


def test_the_killed_run_loses_nothing(runs):
    summary = json.loads((runs["killed"] / "summary.json").read_text())
    assert summary["steps"] == STEPS
    assert (summary["failures"], summary["joins"]) == (1, 1)
    assert (summary["steps_lost"], summary["samples_skipped"], summary["samples_repeated"]) == (0, 0, 0)
    assert summary["digests_equal"] is True
    for key in ("median_step_s", "max_survivor_stall_s", "catch_up_s", "final_loss"):
        assert isinstance(summary[key], float)
    undisturbed = json.loads((runs["undisturbed"] / "summary.json").read_text())
    assert (undisturbed["failures"], undisturbed["joins"]) == (0, 0)


def test_a_failure_does_not_change_the_mathematics(runs):
    assert compare_losses(runs["killed"], runs["undisturbed"]) <= TOLERANCE


@pytest.mark.long("cli/test_demo_trainer.py")
def test_the_comparison_of_losses_notices_the_control_run(runs, tmp_path):
    words = [sys.executable, demo_control.__file__, "--out", str(tmp_path / "control"), "--steps", str(STEPS)]
    subprocess.run(words, check=True)
    assert compare_losses(tmp_path / "control", runs["undisturbed"]) > TOLERANCE


def test_the_files_are_there_and_the_token_is_private(runs):
    out = runs["killed"]
    assert (out / "token").stat().st_mode & 0o777 == 0o600
    report = (out / "report.html").read_text()
    assert "<svg" in report and "http://" not in report.replace("http://www.w3.org", "")
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    assert [e["t"] for e in events] == sorted(e["t"] for e in events)


@pytest.mark.parametrize("event", ["commit", "contribute", "state"])
def test_a_tampered_journal_is_found(runs, tmp_path, event):
    """Delete one line of the real run: ``fabric demo verify`` exits 1."""
    copy = tmp_path / "copy"
    subprocess.run(["cp", "-r", str(runs["killed"]), str(copy)], check=True)
    verify = ("-m", "fabric.cli.main", "demo", "verify", str(copy))
    assert run_python(*verify).returncode == 0
    journal = copy / "journal" / "r0.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    index = next(i for i, line in enumerate(lines) if json.loads(line)["event"] == event and i > 20)
    journal.write_text("".join(lines[:index] + lines[index + 1 :]))
    done = run_python(*verify)
    assert done.returncode == 1, done.stdout
