"""A drill of a running job: real trainers under real launchers, broken through a real lighthouse."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fabric.runtime.guarded_processes import Processes
from fabric.runtime.http.lighthouse_client import Lighthouses

pytestmark = pytest.mark.long("drill/test_outside.py")

TRAINER = Path(__file__).parent / "tiny_trainer.py"
LIMIT_S = 300.0
# The fault, and the word that the injector's evidence has.
FAULTS = {
    "kill r1": "is gone",
    "stop r2 1s": "is stopped",
    "slow r2 1s": "was stopped",
    "hang r1 1s": "stands still at ring",
    "kill r2 @optimizer": "is gone at optimizer",
    "flip-gradient r0": "of the gradient of",
    "poison r1": "is nan instead of",
    "clock r0 1s": "its clock is 3600 s ahead",
    "cut-in r1 2s": "the kernel has dropped packets",
    "lossy-link r2 2s": "the kernel has dropped packets",
    "kill-server r1": "is gone",
    "kill-two r1": "is gone",
    "kill-all": "is gone",
}


class Job:
    """A job of launched replicas that allow drills."""

    def __init__(self, folder: Path, processes: Processes) -> None:
        self.folder, self.processes = folder, processes
        for name in ("token", "drill-token"):
            (folder / name).touch(mode=0o600)
            (folder / name).write_text(f"the-{name}-of-this-test")
        words = ["--job", "gpt", "--token-file", str(folder / "drill-token"), "--print-key"]
        command = [sys.executable, "-m", "fabric.cli.main", "drill", *words]
        (folder / "drill-key").touch(mode=0o600)
        (folder / "drill-key").write_bytes(subprocess.run(command, check=True, capture_output=True).stdout)
        for name in ("journal", "log", "run"):
            (folder / name).mkdir(mode=0o700)
        words = [
            "fabric.cli.main",
            "lighthouse",
            "--store",
            f"sqlite://{folder}/store.db",
            "--limit",
            "failures=0",
        ]
        words += ["--token-file", str(folder / "token"), "--drill-token-file", str(folder / "drill-token")]
        processes.start("lighthouse", [*words, "--ready-file", str(folder / "ready")], self.log("lighthouse"))
        until(lambda: (folder / "ready").exists(), "the lighthouse")
        self.url = json.loads((folder / "ready").read_text())["url"]
        self.client = Lighthouses((self.url,), "gpt", "the-token-of-this-test")

    def start(self, *replicas: str, launched: bool = True, **more: str) -> None:
        for replica in replicas:
            launcher = ["fabric.cli.main", "launch", "--no-python", sys.executable, str(TRAINER)]
            environment = {
                "FABRIC_DRILL": str(self.folder / "drill-key"),
                "FABRIC_JOB": "gpt",
                "FABRIC_REPLICA": replica,
                "FABRIC_REPLICAS": str(len(replicas)),
                "FABRIC_LIGHTHOUSE": self.url,
                "FABRIC_TOKEN_FILE": str(self.folder / "token"),
                "FABRIC_JOURNAL": str(self.folder / "journal" / f"{replica}.jsonl"),
                "FABRIC_RUN_DIR": str(self.folder / "run" / replica),
                "FABRIC_DIGEST_EVERY": "1",
                "FABRIC_ON_NAN": "skip",
                "FABRIC_DATA_PLANE": "tcp",  # links inside a host are unix sockets otherwise
                **more,
            }
            if launched:
                self.processes.start(replica, launcher, self.log(replica), **environment)
            else:
                words = [sys.executable, str(TRAINER)]
                self.processes.start_program(replica, words, self.log(replica), **environment)

    def log(self, name: str) -> Path:
        return self.folder / "log" / f"{name}.log"

    def steps(self) -> list[int]:
        members = self.client.ask(self.client.path())["members"]
        return [x["step"] for x in members if x["connected"]]

    def wait_trained(self, count: int) -> None:
        """Wait until ``count`` members have committed three steps and their injectors have asked."""
        until(lambda: self._knows(count), f"{count} members")

    def _knows(self, count: int) -> bool:
        try:
            steps = self.steps()
            injectors = self.client.ask(self.client.path("drill"))["injectors"]
        except Exception:  # noqa: BLE001  (the job is not there yet)
            return False
        return len(steps) == count == len(injectors) and min(steps) >= 3

    def trainer(self, replica: str) -> int:
        """The process of the replica's trainer."""
        injectors = self.client.ask(self.client.path("drill"))["injectors"]
        return next(x["pid"] for x in injectors if x["replica"] == replica)

    def command(self, *words: str, token: str = "drill-token", out: str = "out") -> list[str]:
        command = [sys.executable, "-m", "fabric.cli.main", "drill", "--lighthouse", self.url]
        command += ["--job", "gpt", "--token-file", str(self.folder / token)]
        return [*command, "--out", str(self.folder / out), *words]

    def drill(self, *words: str, **options: str) -> "subprocess.CompletedProcess[str]":
        command = self.command(*words, **options)
        return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)

    def refusal(self, *words: str, **options: str) -> str:
        done = self.drill(*words, **options)
        assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
        assert done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    def events(self) -> list[dict]:
        return self.client.ask(self.client.path("events"))


@contextmanager
def job_in(folder: Path) -> Iterator[Job]:
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FABRIC_")}
    environment |= {"TINY_STEPS": "1000000", "TINY_STEP_S": "0.05", "OMP_NUM_THREADS": "1"}
    processes = Processes(environment)
    try:
        yield Job(folder, processes)
    finally:
        processes.end()


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, f"waited for {what}"
        time.sleep(0.05)


def state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def injector_of(pid: int) -> int:
    """The process that plays the faults of the trainer ``pid``."""
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdecimal() else []
        except OSError:
            continue
        if b"fabric.drill.injection.injector" in words and json.loads(words[3])["pid"] == pid:
            return int(entry.name)
    raise AssertionError(f"process {pid} has no injector")


@pytest.fixture(scope="module")
def job(tmp_path_factory) -> Iterator[Job]:
    with job_in(tmp_path_factory.mktemp("running")) as job:
        job.start("r0", "r1", "r2")
        job.wait_trained(3)
        yield job


def test_each_fault_happens_and_ends_and_the_job_holds_and_its_events_name_the_drill(job):
    words = [word for fault in FAULTS for word in ("--fault", fault)]
    expect = ("promises-kept", "digests-equal", "samples-exactly-once", "restarts==0", "rejoined<=300s")
    words += [word for text in expect for word in ("--expect", text)]
    done = job.drill(*words, "--journals", str(job.folder / "journal"))
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    report = json.loads((job.folder / "out" / "report.json").read_text())
    assert [x["fault"] for x in report["faults"]] == [fault.split()[0] for fault in FAULTS]
    for entry, evidence in zip(report["faults"], FAULTS.values(), strict=True):
        assert evidence in entry["observed"] and entry["undone"], entry
    drills = [event for event in job.events() if event["kind"].startswith("drill ")]
    drill = next(word for word in done.stdout.split() if word.startswith("d") and len(word) == 9)
    of_this = [event for event in drills if f"drill {drill}" in event["why"]]
    kinds = [event["kind"] for event in of_this]
    assert kinds[0] == "drill began" and kinds[-1] == "drill ended"
    assert kinds.count("drill fault") == kinds.count("drill observed") == kinds.count("drill undone")


def test_without_journals_the_judge_says_what_it_could_not_see(job):
    done = job.drill(
        "--fault", "kill r1", "--expect", "rejoined<=300s", "--expect", "steps_lost==0", out="out2"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Not seen: no journal was read" in done.stdout
    assert job.drill("--fault", "stop r1 1s", "--expect", "digests-equal", out="out2").returncode == 1


def test_each_impossible_drill_is_one_sentence_and_breaks_nothing(job):
    pids = [job.trainer(name) for name in ("r0", "r1", "r2")]
    assert "has no right to drill" in job.refusal("--fault", "kill r1", token="token")
    assert 'names the replica "r9", which the job does not have' in job.refusal("--fault", "kill r9")
    assert "on which the drill itself runs" in job.refusal("--fault", "memory r1 1s")
    assert "it needs a job that the drill starts" in job.refusal("--fault", "cut-peers r1")
    assert "leave the training command away" in job.refusal("--fault", "kill r1", "--", "true")
    assert pids == [job.trainer(name) for name in ("r0", "r1", "r2")]


@contextmanager
def stopped(job: Job) -> Iterator[tuple["subprocess.Popen[bytes]", int]]:
    """A drill that has stopped the trainer of r2 for ten minutes."""
    pid = job.trainer("r2")
    with (job.folder / "drill.log").open("wb") as log:
        drill = subprocess.Popen(job.command("--fault", "stop r2 10m", out="out3"), stdout=log, stderr=log)
    try:
        until(lambda: state(pid) == "T", "a stopped trainer")
        yield drill, pid
    finally:
        drill.kill()
        drill.wait()


def test_a_second_drill_is_refused_and_a_killed_drill_is_undone(job):
    job.wait_trained(3)
    with stopped(job) as (drill, pid):
        assert "wait for its end" in job.refusal("--fault", "kill r1", out="out4")
        drill.send_signal(signal.SIGKILL)
        until(lambda: state(pid) != "T", "the end of the stop")
    until(lambda: not job.client.ask(job.client.path("drill"))["drill"], "the end of the drill")
    assert any("was not renewed" in event["why"] for event in job.events())


def test_a_fault_is_undone_when_its_injector_dies(job):
    job.wait_trained(3)
    with stopped(job) as (_, pid):
        os.kill(injector_of(pid), signal.SIGKILL)
        until(lambda: state(pid) != "T", "the end of the stop")


def test_a_fault_is_undone_when_the_lighthouse_dies(tmp_path):
    with job_in(tmp_path) as job:
        job.start("r1", "r2")
        job.wait_trained(2)
        with stopped(job) as (_, pid):
            os.kill(job.processes.pid_of("lighthouse"), signal.SIGKILL)
            until(lambda: state(pid) != "T", "the end of the stop")


def test_a_job_that_may_not_survive_is_drilled_only_on_demand(tmp_path):
    with job_in(tmp_path) as job:
        job.start("r0", launched=False)
        job.wait_trained(1)
        assert "has one replica and may not survive" in job.refusal("--fault", "stop r0 1s")
        done = job.drill("--fault", "stop r0 1s", "--yes-lose-it")
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_trainer_that_does_not_allow_drills_has_no_injector(tmp_path):
    with job_in(tmp_path) as job:
        job.start("r0", FABRIC_DRILL="0")
        until(lambda: _has_member(job), "a member")
        assert "start its trainers with FABRIC_DRILL=KEY-FILE" in job.refusal("--fault", "kill r0")


def _has_member(job: Job) -> bool:
    try:
        return bool(job.steps())
    except Exception:  # noqa: BLE001  (the job is not there yet)
        return False
