"""Replicas under ``fabric launch``, and under torchrun: real ranks are killed; the replica comes back."""

import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from alone import losses_alone
from forked_processes import ForkedProcess, start_supervisor
from job import HERE, SEARCH_PATH
from layout_trainer import GLOBAL_BATCH, build
from rank_job import RankJob

STEPS = 24
# Start without `fabric run`: its low-priority imports would take minutes on a crowded host.
AT_ONCE = ["--ranks", "2", "--no-python", sys.executable]
TORCHRUN = """
import sys, forked_processes, torch.distributed.run
forked_processes.fork_ranks_of_torchrun()
torch.distributed.run.main(sys.argv[1:])
"""
TORCHRUN_OPTIONS = ["--standalone", "--max-restarts=100", "--monitor-interval=0.1"]


@dataclass
class LaunchedJob(RankJob):
    """Each replica is the process group of one launcher."""

    launchers: dict[str, subprocess.Popen | ForkedProcess] = field(default_factory=dict)
    trainer: str = "launched_trainer.py"

    def __exit__(self, *error) -> None:
        for launcher in self.launchers.values():
            launcher.terminate()
        for launcher in self.launchers.values():
            try:
                launcher.wait(60)
            finally:
                launcher.kill()
        super().__exit__(*error)

    def launch(self, replica: str, *options: str, torchrun: bool = False, **more: str) -> None:
        """Start a replica's launcher; its ranks record their environment."""
        program = [*options, str(HERE / self.trainer)]
        environment = self.trainer_environment(
            replica,
            LAUNCHED_NOTES=str(self.folder / f"{replica}.notes"),
            PYTHONPATH=SEARCH_PATH,
            OMP_NUM_THREADS="1",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",
            **more,
        )
        environment = {**os.environ, **environment}
        with (self.folder / f"{replica}.log").open("ab") as log:
            words, own = ("launch", *program), {}
            if torchrun:
                words, own = (*TORCHRUN_OPTIONS, *program), {"program": ("-c", TORCHRUN)}
            self.launchers[replica] = start_supervisor(*words, log=log, environment=environment, **own)
        self.groups[replica] = [f"{replica}.{rank}" for rank in range(self.ranks)]

    def start_beside(self, replica: str, points: str = "") -> None:
        """Start a replica without a launcher, in forked processes, which cost little."""
        self.start(replica, points, TEST_TRAINER="layout_trainer", SHARDED="fsdp")

    def notes(self, replica: str) -> list[list[str]]:
        """Return rank, process, rendezvous port and layout of every start of a rank."""
        path = self.folder / f"{replica}.notes"
        return [line.split() for line in path.read_text().splitlines()] if path.exists() else []

    def pid(self, replica: str, rank: int) -> int:
        return [int(pid) for number, pid, _, _ in self.notes(replica) if number == str(rank)][-1]

    def wait_step(self, replica: str, step: int) -> None:
        def reached() -> bool:
            assert replica not in self.launchers or self.launchers[replica].poll() is None, self.logs()
            return any(event["step"] >= step for event in self.events(replica, "commit"))

        self.wait_for(reached, f"step {step} of {replica}")

    def end_codes(self) -> dict[str, int]:
        """Return the exit codes of the launchers, and of each rank that was started beside them."""

        def codes() -> dict[str, int | None]:
            launched = {replica: launcher.poll() for replica, launcher in self.launchers.items()}
            return launched | {rank: self.ended(rank) for rank in self.pids}

        self.wait_for(lambda: None not in codes().values(), "the launchers' ends")
        return codes()

    def losses(self, replica: str) -> dict[int, float]:
        name = f"{replica}.0" if replica in self.starts else replica
        lines = re.findall(r"^(?:\[0\] )?loss (\d+) (\S+)$", (self.folder / f"{name}.log").read_text(), re.M)
        return {int(number): float(loss) for number, loss in lines}


@pytest.fixture
def job(zygote, tmp_path):
    environment = {"TINY_STEPS": str(STEPS), "TINY_PATIENT_STEPS": "18", "FABRIC_REPLICAS": "2"}
    with LaunchedJob(zygote, tmp_path, replicas=2, ranks=2, environment=environment) as running:
        yield running


def check_ends(job: LaunchedJob, killed_at: int = 8) -> None:
    """Both replicas have finished with equal lanes; the one that was never killed trained as one process."""
    assert job.end_codes() == {"r1": 0, "r0.0": 0, "r0.1": 0}, job.logs()
    again = [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > killed_at]
    assert again, f"the killed replica never contributed again\n{job.logs()}"
    steps = int(job.environment["TINY_STEPS"])
    job.check_lanes(steps)
    losses, alone = job.losses("r0"), losses_alone(build(), steps, GLOBAL_BATCH)
    assert sorted(losses) == list(range(steps))
    assert [losses[n] for n in range(steps)] == pytest.approx(alone, rel=1e-4)


def test_a_killed_rank_and_a_killed_launcher_each_bring_the_whole_replica_back(job):
    """A rank of r1 dies, and later its launcher. The ranks have a fresh rendezvous each time. SIGKILL of the
    launcher ends its ranks and no server, so that the next ranks find their state."""
    job.environment |= {"TINY_STEPS": "40", "TINY_PATIENT_STEPS": "34"}
    held = job.folder / "second"
    job.start_beside("r0", f"forward@22=wait:{held}")
    job.launch("r1", "--ranks", "2")
    job.wait_step("r1", 5)
    servers = set(job.server_pids())
    assert len(servers) == 2, "the ranks of a replica on one host have one checkpoint server"
    os.kill(job.pid("r1", 1), signal.SIGKILL)
    # r0 stands in step 22 until r1's launcher is dead. It waits in each step before for r1 to be back.
    job.wait_for(Path(f"{held}.awaited").exists, "step 22")
    job.wait_for(
        lambda: any(e["contributed"] and e["step"] > 8 for e in job.events("r1", "commit")), "r1 to be back"
    )
    ranks = [job.pid("r1", rank) for rank in range(2)]
    job.launchers["r1"].kill()
    job.wait_for(lambda: not any(map(lives, ranks)), "the end of the ranks")
    assert set(job.server_pids()) == servers
    job.launch("r1", *AT_ONCE)
    held.touch()
    check_ends(job, 22)
    starts = job.notes("r1")
    assert len(starts) == 6 and len({pid for _, pid, _, _ in starts}) == 6, "both ranks started three times"
    rendezvous = [{row[2] for row in starts[n : n + 2]} for n in (0, 2, 4)]
    assert [len(x) for x in rendezvous] == [1, 1, 1] and rendezvous[0] != rendezvous[1], starts


def test_torchrun_still_brings_a_replica_back(job):
    job.start_beside("r0")
    job.launch("r1", "--nproc-per-node=2", torchrun=True)
    job.wait_step("r1", 5)
    os.kill(job.pid("r1", 1), signal.SIGKILL)
    check_ends(job)


def test_the_users_mistake_ends_its_launcher_after_one_start_and_every_other_rank(job):
    job.start_beside("r0")
    job.launch("r1", "--ranks", "2", SHARDED_RAISES="1@4")
    assert job.end_codes() == {"r1": 1, "r0.0": 1, "r0.1": 1}, job.logs()
    assert len(job.notes("r1")) == 2
    said = (job.folder / "r1.log").read_text()
    assert "ValueError: the user's own mistake" in said and "the replica is not started again" in said


@pytest.mark.long("cli/test_restart_policy.py")
def test_an_outage_of_all_lighthouses_beyond_every_bound_ends_no_launcher(zygote, tmp_path):
    """The members stop themselves, and their next processes look for a lighthouse beyond ``contact_s``."""
    bounds = {"FABRIC_AUTONOMY_S": "5", "FABRIC_EXCHANGE_S": "2", "FABRIC_USER_CODE_S": "2"}
    environment = {**bounds, "TINY_STEP_S": "0.1"}
    environment |= {"TINY_STEPS": "150", "FABRIC_REPLICAS": "2"}
    with LaunchedJob(zygote, tmp_path, replicas=2, ranks=1, environment=environment) as job:
        job.trainer = "tiny_trainer.py"
        for name in ("r0", "r1"):
            job.launch(name, "--ranks", "1", *AT_ONCE[2:])
        job.wait_step("r1", 5)
        port = int(job.url.rsplit(":", 1)[1])
        job.stop_lighthouse(signal.SIGKILL)
        # The first that stops leaves the other in an aborted round, where it waits for a lighthouse too.
        waits = re.compile("because its launcher has restarted it|has waited [0-9]+ s: for the lighthouse")
        for name in ("r0", "r1"):
            log = job.folder / f"{name}.log"
            job.wait_for(lambda log=log: waits.search(log.read_text()), f"{name} to wait for a lighthouse")
        job.start_lighthouse(port)
        assert job.end_codes() == {"r0": 0, "r1": 0}, job.logs()
        assert {x["step"] for x in job.events("r0", "commit")} == set(range(150))


def test_a_replica_alone_goes_on_with_fewer_ranks(zygote, tmp_path):
    """The device of rank 1 fails in two attempts. One rank then reads the state of two ranks from memory."""
    steps, gate = 14, tmp_path / "gate"
    environment = {
        "TINY_STEPS": str(steps),
        "FABRIC_SNAPSHOT_EVERY": "2",
        "LAUNCHED_DEVICE": "1@6",
        "LAUNCHED_GATE": str(gate),
    }
    with LaunchedJob(zygote, tmp_path, replicas=1, ranks=2, environment=environment) as job:
        job.launch("r0", "--ranks", "1:2", *AT_ONCE[2:])
        job.wait_step("r0", 5)
        job.wait_for(lambda: (job.status()["recoverable"] or {}).get("step", -1) >= 4, "a snapshot of step 4")
        gate.touch()
        assert job.end_codes() == {"r0": 0}, job.logs()
        said, layouts = (job.folder / "r0.log").read_text(), [row[3] for row in job.notes("r0")]
        assert layouts == ["ranks=2"] * 4 + ["ranks=1"] and "device 1 has failed repeatedly" in said, said
        joined = job.events("r0", "join")[-1]
        assert joined["resharded"] and joined["step"] >= 4, joined
        losses, expected = job.losses("r0"), losses_alone(build(), steps, GLOBAL_BATCH)
        assert sorted(losses) == list(range(steps))
        assert [losses[n] for n in range(steps)] == pytest.approx(expected, rel=1e-4)


def lives(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"
