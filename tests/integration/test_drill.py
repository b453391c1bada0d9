"""A drill of real jobs: each fault happens, is seen, ends, and the job holds."""

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from etcd_process import require_etcd
from forked_processes import run_supervisor, start_supervisor

from fabric.drill.run.started_job import may_mount

TRAINER = Path(__file__).parent / "tiny_trainer.py"
LIMIT_S = 900.0
EXPECT = (
    "promises-kept",
    "digests-equal",
    "samples-exactly-once",
    "sources-agree",
    "status-true",
    "restarts==0",
)

# The fault, and the word that the drill's evidence has.
FAULTS = {
    "stop r2 1s": "is stopped",
    "hang r1 1s": "stands still at ring of step",
    "slow r1 1s": "was stopped",
    "cut-peers r1 1s": "the relay held",
    "cut-in r2 1s": "the relay held",
    "cut-lighthouse r0 1s": "the relay held",
    "slow-link r1 1s": "the relay delayed",
    "lossy-link r1 1s": "the relay reset",
    "flip-payload r2": "the relay flipped",
    "kill-server r2": "is gone",
    "kill-lighthouse 1s": "is gone",
    "stop-lighthouse 1s": "is stopped",
    "memory 1s": "holds",
    "flip-gradient r1": "of the gradient of",
    "poison r2": "is nan instead of",
    "clock r1 1s": "its clock is 3600 s ahead",
    "flip-snapshot r1": "it sent wrong bytes",
    "kill-joining r1": "its journal has no commit",
    "kill-recovering r0": "recovers",
    "kill-two r1": "is gone",
    "kill-all": "is gone",
}
if may_mount():
    FAULTS["disk-full 1s"] = "No space left on device"
STORE_FAULTS = {
    "kill-follower 1s": "is gone",
    "kill-store 1s": "is gone",
    "stop-store 1s": "is stopped",
    "kill-lighthouse 1s": "is gone",
}


def drill(
    out: Path, faults: dict[str, str], *options: str, expect: Sequence[str] = EXPECT, trainer: Path = TRAINER
) -> dict:
    """Run the drill; return its report."""
    words = ["drill", "--out", str(out), *options]
    for fault in faults:
        words += ["--fault", fault]
    for text in expect:
        words += ["--expect", text]
    words += ["--", sys.executable, str(trainer)]
    environment = os.environ | {"TINY_STEPS": "1000000", "TINY_STEP_S": "0.08", "OMP_NUM_THREADS": "1"}
    environment |= {"EXAMPLE_STEPS": "1000000", "EXAMPLE_PAUSE_S": "0.05"}
    done = run_supervisor(*words, environment=environment, limit_s=LIMIT_S)
    logs = [f"--- {p.name}\n{p.read_text()[-2000:]}" for p in sorted((out / "log").glob("*.log"))]
    assert done.returncode == 0, "\n".join([done.stdout[-12000:], *logs])
    return json.loads((out / "report.json").read_text())


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> dict:
    """One job that meets every fault of a job with one lighthouse."""
    out = tmp_path_factory.mktemp("drill") / "out"
    # A death of all trainers may cost the steps since the newest snapshot, so steps_lost has no bound here.
    return drill(out, FAULTS, expect=(*EXPECT, "rejoined<=300s"))


@pytest.fixture(scope="module")
def store_report(tmp_path_factory) -> dict:
    """One job with two lighthouses and three etcd members."""
    require_etcd()
    out = tmp_path_factory.mktemp("drill") / "out"
    options = ("--replicas", "2", "--lighthouses", "2", "--store-members", "3")
    return drill(out, STORE_FAULTS, *options, expect=(*EXPECT, "steps_lost==0"))


@pytest.mark.long("cli/test_verify.py")
def test_a_loop_with_its_own_data_holds(tmp_path):
    """The judge asks for no order of samples where ``session.exchange`` has none."""
    trainer = TRAINER.parents[2] / "examples" / "exchange.py"
    expect = ("promises-kept", "digests-equal", "sources-agree", "status-true", "rejoined<=300s")
    faults = {"kill r1": "is gone", "kill-server r2": "is gone"}
    report = drill(tmp_path / "out", faults, expect=expect, trainer=trainer)
    for fault, evidence in faults.items():
        check(report, fault, evidence)


def check(report: dict, fault: str, evidence: str) -> None:
    entries = [entry for entry in report["faults"] if entry["fault"] == fault.split()[0]]
    assert entries
    for entry in entries:
        assert entry["observed"] and entry["undone"], entry
    assert any(evidence in entry["observed"] for entry in entries)


@pytest.mark.parametrize("fault", [*FAULTS, "kill r1"])
def test_a_fault_happens_and_ends_and_the_job_holds(report, fault):
    check(report, fault, FAULTS.get(fault, "is gone"))
    assert report["holds"]


@pytest.mark.long("contract/test_etcd.py")
@pytest.mark.parametrize("fault", STORE_FAULTS)
def test_a_fault_of_the_store_or_of_a_second_lighthouse_happens_and_ends(store_report, fault):
    check(store_report, fault, STORE_FAULTS[fault])
    assert store_report["holds"]


@pytest.mark.long("sim/test_store_worlds.py")
def test_a_job_begins_again_in_a_wiped_store_without_a_new_process(tmp_path):
    require_etcd()
    options = ("--replicas", "2", "--store-members", "3")
    faults = {"kill r1": "is gone", "wipe-store 1s": "3 members are gone with their data"}
    wiped = drill(tmp_path / "out", faults, *options)
    for fault, evidence in faults.items():
        check(wiped, fault, evidence)
    lines = [json.loads(x) for x in (tmp_path / "out" / "journal" / "r0.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines].count("start") == 1
    assert {line["generation"] for line in lines if line["event"] == "commit"} == {1, 2}


@pytest.mark.long("sim/test_sharing.py")
def test_a_micro_batch_that_kills_two_trainers_is_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("TINY_ON_POISON", "skip")
    # Each micro-batch of the tiny trainer has two samples.
    expect = [x for x in EXPECT if x != "samples-exactly-once"]
    expect += ["samples_repeated==0", "samples_skipped==2", "steps_lost==0"]
    report = drill(tmp_path / "out", {"kill-micro-batch": ""}, "--yes-lose-it", expect=expect)
    (entry,) = report["faults"]
    assert "both at micro-batch 0 of step" in entry["observed"] and len(entry["targets"]) == 2
    assert entry["undone"].count("started") == 2


def test_a_micro_batch_kills_nobody_where_the_job_may_not_be_lost(tmp_path):
    words = ["drill", "--out", str(tmp_path / "out"), "--fault", "kill-micro-batch"]
    done = run_supervisor(*words, "--", sys.executable, str(TRAINER))
    assert done.returncode == 1
    assert 'on_poison="skip", or else the job ends: give --yes-lose-it' in done.stdout


def test_a_command_that_ends_at_once_is_named_with_its_own_last_line(tmp_path):
    words = ["drill", "--out", str(tmp_path / "out"), "--replicas", "2", "--fault", "kill r1"]
    done = run_supervisor(*words, "--", sys.executable, "-c", "import no_such_module")
    assert done.returncode == 1
    assert "(ModuleNotFoundError: No module named 'no_such_module'): see its log" in done.stdout


def test_a_killed_drill_leaves_no_process(tmp_path):
    out = tmp_path / "out"
    words = ["drill", "--out", str(out), "--replicas", "2", "--fault", "stop r1 600s"]
    environment = os.environ | {"TINY_STEPS": "1000000", "OMP_NUM_THREADS": "1"}
    with (tmp_path / "log").open("wb") as log:
        words += ["--", sys.executable, str(TRAINER)]
        process = start_supervisor(*words, log=log, environment=environment)
    try:
        until(lambda: [p for p in processes_of(out) if is_stopped(p)], "a stopped trainer")
    finally:
        process.kill()
        process.wait()
    until(lambda: not processes_of(out), "the end of every process")


def processes_of(out: Path) -> list[int]:
    """The processes whose run folder, or whose output, is in ``out``."""
    pids = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdecimal() and f"={out}/".encode() in (entry / "environ").read_bytes():
                pids.append(int(entry.name))
        except OSError:
            continue
    return pids


def is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def until(condition, what: str) -> None:
    deadline = time.monotonic() + 180
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)
