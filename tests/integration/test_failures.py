"""Real trainers are killed and stopped at failpoints: the others go on, the dead replica comes back, all
states end bitwise equal, and every sample counts once.
"""

import os
import re
import signal
import time

import pytest
from job import DEADLINE_S, Job

from fabric.audit.journal import read_run
from fabric.audit.summary import judge

STEPS = 40  # of a job whose environment says no other number
# With this setting the job does not end before a killed or stopped replica is back.
PATIENT = {"TINY_PATIENT_STEPS": "30"}


def check(job: Job, steps: int | None = None) -> None:
    """Judge the journals as ``fabric demo verify`` does: all invariants hold, digests agree, no step is
    lost.
    """
    verdict = judge(read_run(job.folder))
    assert not verdict.broken, "\n".join(verdict.broken[:10])
    summary = verdict.summary
    assert summary.digests_equal
    expected = steps or int(job.environment.get("TINY_STEPS", STEPS))
    assert (summary.steps, summary.steps_lost) == (expected, 0)
    assert (summary.samples_skipped, summary.samples_repeated) == (0, 0)


def finals(job: Job) -> dict[str, str]:
    """Each replica's digest of its last state."""
    return {f"r{i}": job.events(f"r{i}", "state")[-1]["digest"] for i in range(job.replicas)}


def finish_and_check(job: Job, steps: int | None = None, deadline_s: float = DEADLINE_S) -> None:
    job.finish(deadline_s=deadline_s)
    assert job.codes == {f"r{i}": 0 for i in range(job.replicas)}, job.logs()
    assert len(set(finals(job).values())) == 1, job.logs()
    check(job, steps)


def test_a_job_without_failures_runs_in_one_epoch(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "15"}) as job:
        job.start_all()
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 1, "r2": 1}
        assert {e["epoch"] for r in ("r0", "r1", "r2") for e in job.events(r, "commit")} == {1}


# One job has several faults, one after the other. While a replica is away the others wait for it at each
# step, so it is back long before the next fault.
FAULT_STEPS = {"r1": 8, "r2": 18, "r0": 28}
LATER_FAULT = 38
SHARED_STEPS = 48
SHARED = {"TINY_STEPS": str(SHARED_STEPS), "TINY_PATIENT_STEPS": str(SHARED_STEPS)}
SEQUENCES = [("forward", "before-ring", "ring", "before-barrier"), ("barrier", "after-barrier", "optimizer")]


def contributed_after(job: Job, replica: str, step: int) -> bool:
    return any(e["contributed"] and e["step"] > step for e in job.events(replica, "commit"))


@pytest.mark.parametrize("points", SEQUENCES, ids="+".join)
def test_each_member_killed_at_a_failpoint_comes_back(zygote, tmp_path, points):
    """A death at every point; the second process of r1 has the fourth point."""
    with Job(zygote, tmp_path, environment=SHARED) as job:
        job.later_points["r1"] = [f"{point}@{LATER_FAULT}=kill" for point in points[3:]]
        firsts = dict(zip(FAULT_STEPS, points, strict=False))
        job.start_all({r: f"{point}@{FAULT_STEPS[r]}=kill" for r, point in firsts.items()})
        finish_and_check(job, SHARED_STEPS, 2 * DEADLINE_S)
        assert sum(job.starts.values()) == 3 + len(points), job.logs()
        told = (job.folder / "r0.log").read_text()
        assert re.search(r"^fabric: r0: epoch \d+ with .*: .*r1 evicted: ", told, re.MULTILINE), told
        assert re.search(r"^fabric: r0: epoch \d+ with .*r1.*: .*r1 joins", told, re.MULTILINE), told
        for replica, step in FAULT_STEPS.items():
            assert contributed_after(job, replica, step), f"{replica} never contributed again"
        assert contributed_after(job, "r1", LATER_FAULT)


@pytest.mark.long("sim/test_worlds.py")
@pytest.mark.parametrize("points", SEQUENCES, ids="+".join)
def test_each_member_stopped_at_a_failpoint_is_evicted_and_comes_back(zygote, tmp_path, points):
    """A stopped trainer is evicted; continued, it notices, catches up and joins without a restart."""
    with Job(zygote, tmp_path, environment=SHARED) as job:
        faults = [*zip(FAULT_STEPS.items(), points, strict=False)]
        faults += [(("r1", LATER_FAULT), point) for point in points[3:]]
        armed = {r: [f"{p}@{at}=stop" for (name, at), p in faults if name == r] for r in FAULT_STEPS}
        job.start_all({replica: ",".join(stops) for replica, stops in armed.items()})
        for (replica, step), point in faults:
            job.wait_for(lambda r=replica: job.is_stopped(r), f"{replica} to stop at {point}")
            other = "r1" if replica == "r0" else "r0"
            seen = len(job.events(other, "epoch"))

            def evicted(replica=replica, other=other, seen=seen) -> bool:
                # The eviction may have come before this look.
                epochs = job.events(other, "epoch")
                return any(replica not in e["roster"] for e in epochs[max(0, seen - 1) :])

            job.wait_for(evicted, f"the eviction of {replica}")
            os.kill(job.pids[replica], signal.SIGCONT)
            job.wait_for(lambda r=replica, s=step: contributed_after(job, r, s + 2), f"{replica} is back")
        finish_and_check(job, SHARED_STEPS)
        assert job.starts == {"r0": 1, "r1": 1, "r2": 1}


JOIN_POINTS = ["fetch", "install", "replay", "switch", "first-round", "snapshot"]


def test_a_joining_replica_killed_at_each_failpoint_joins_in_the_end(zygote, tmp_path):
    """Six newcomers die during their joins, each at another point, and the seventh joins."""
    environment = {"TINY_STEPS": "60", "TINY_PATIENT_STEPS": "60", "TEST_FAILURES": "0"}
    environment["FABRIC_SNAPSHOT_EVERY"] = (
        "100%"  # or a newcomer's first snapshot may come after the job's end
    )
    with Job(zygote, tmp_path, environment=environment) as job:
        job.later_points["r1"] = [f"{point}=kill" for point in JOIN_POINTS]
        job.start_all({"r1": "forward@8=kill"})
        finish_and_check(job, 60, 2 * DEADLINE_S)
        assert job.starts["r1"] == 2 + len(JOIN_POINTS), job.later_points
        assert job.starts["r0"] == job.starts["r2"] == 1


@pytest.mark.long("sim/test_worlds.py")
def test_a_joining_replica_stopped_at_each_failpoint_holds_up_no_member(zygote, tmp_path):
    """A newcomer stopped during its join delays no member; after it continues, it joins without a restart."""
    environment = {"TINY_STEPS": "300", "FABRIC_SNAPSHOT_EVERY": "100000%", "TEST_FAILURES": "0"}
    with Job(zygote, tmp_path, environment=environment | {"TINY_PATIENT_STEPS": "60"}) as job:
        job.start_all({"r1": "forward@8=kill"})
        for point in JOIN_POINTS:
            job.wait_for(lambda: job.ended("r1") is not None, "the death of r1")
            job.start("r1", f"{point}=stop")
            job.wait_for(lambda: job.is_stopped("r1"), f"r1 to stop at {point}")
            before = len(job.events("r0", "commit"))
            job.wait_for(lambda n=before: len(job.events("r0", "commit")) > n + 3, "the others' next steps")
            os.kill(job.pids["r1"], signal.SIGCONT)
            newest = job.events("r0", "commit")[-1]["step"]
            job.wait_for(lambda n=newest: contributed_after(job, "r1", n), f"the join after {point}")
            if point != JOIN_POINTS[-1]:
                job.kill("r1")
        finish_and_check(job, 300)
        assert job.starts == {"r0": 1, "r1": 1 + len(JOIN_POINTS), "r2": 1}


def test_a_second_member_is_stopped_during_the_recovery(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "30", **PATIENT}) as job:
        job.start_all({"r1": "ring@12=kill", "r2": "recovery@12=stop"})
        job.wait_for(lambda: job.is_stopped("r2"), "r2 to stop")
        before = len(job.events("r0", "commit"))
        job.wait_for(lambda: len(job.events("r0", "commit")) > before + 3, "the survivor's next steps")
        os.kill(job.pids["r2"], signal.SIGCONT)
        finish_and_check(job, 30)
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}


def test_two_members_die_at_once_and_one_survives(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "24", **PATIENT}) as job:
        job.start_all({"r1": "barrier@8=kill", "r2": "forward@8=kill"})
        finish_and_check(job, 24)
        assert job.starts == {"r0": 1, "r1": 2, "r2": 2}


@pytest.mark.long("sim/test_worlds.py")
def test_a_second_member_dies_during_the_recovery(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "90", **PATIENT}) as job:
        job.start_all({"r1": "ring@12=kill", "r2": "recovery@12=kill"})
        finish_and_check(job, 90)
        assert job.starts["r0"] == 1


@pytest.mark.long("sim/test_worlds.py")
def test_the_member_that_snapshots_for_a_joining_replica_dies(zygote, tmp_path):
    with Job(
        zygote, tmp_path, environment={"TINY_STEPS": "110", "FABRIC_SNAPSHOT_EVERY": "0%", **PATIENT}
    ) as job:
        job.start_all({"r1": "forward@8=kill", "r2": "snapshot@0=wait:/dev/null,snapshot=kill"})
        finish_and_check(job, 110)
        assert job.starts["r0"] == 1


def test_all_trainers_die_and_the_job_resumes_from_host_memory(zygote, tmp_path):
    """A cold start: the checkpoint servers' memory outlives all trainers, and the event names the lost
    steps.
    """
    environment = {"FABRIC_SNAPSHOT_EVERY": "100000%", "TINY_STEPS": "24"}
    with Job(zygote, tmp_path, environment=environment) as job:
        job.kill_together(15, ("r0", "r1", "r2"))
        job.finish()
        assert set(job.codes.values()) == {0}, job.logs()
        assert len(set(finals(job).values())) == 1
        generations = {e["generation"] for e in job.events("r0", "commit")}
        assert generations == {1, 2}
        first = min(e["step"] for e in job.events("r0", "commit") if e["generation"] == 2)
        assert first >= 13, "snapshots every step: at most the newest step or two may be lost"


@pytest.mark.long("integration/test_drill.py")
def test_the_lighthouse_is_killed_and_no_trainer_notices(zygote, tmp_path):
    with Job(zygote, tmp_path) as job:
        job.start_all()
        job.wait_for(lambda: len(job.events("r0", "commit")) > 10, "ten steps")
        port = int(job.url.rsplit(":", 1)[1])
        job.stop_lighthouse(signal.SIGKILL)
        before = len(job.events("r0", "commit"))
        job.wait_for(lambda: len(job.events("r0", "commit")) > before + 10, "steps without a lighthouse")
        job.start_lighthouse(port)
        finish_and_check(job)
        assert {e["epoch"] for e in job.events("r0", "commit")} == {1}


@pytest.mark.long("integration/test_drill.py")
def test_a_checkpoint_server_is_killed_and_no_member_stops(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"FABRIC_SNAPSHOT_EVERY": "100000%"}) as job:
        job.start_all()
        job.wait_for(lambda: len(job.events("r0", "commit")) > 10, "ten steps")
        for pid in job.server_pids():
            os.kill(pid, signal.SIGKILL)
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 1, "r2": 1}


def test_a_late_restart_of_a_finished_job_says_that_it_is_finished(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "10"}) as job:
        job.start_all()
        finish_and_check(job, 10)
        job.codes.pop("r1")
        job.start("r1")
        job.finish(restart=False)
        assert job.codes["r1"] == 0
        assert "the job is complete at step 10" in (job.folder / "r1.log").read_text()
        assert not [e for e in job.events("r1", "commit") if e["step"] > 9]


def test_a_single_replica_trains_and_resumes(zygote, tmp_path):
    environment = {"FABRIC_SNAPSHOT_EVERY": "100000%", "TINY_STEPS": "20"}
    with Job(zygote, tmp_path, replicas=1, environment=environment) as job:
        job.start_all({"r0": "forward@9=kill"})
        job.finish()
        assert job.codes == {"r0": 0}, job.logs()


@pytest.mark.long("sim/test_worlds.py")
def test_a_replica_comes_back_on_a_host_whose_clock_is_behind(zygote, tmp_path):
    """The first process claims an incarnation of tomorrow, so the clock of every other host is behind."""
    home = tmp_path / "run" / "r2"
    with Job(zygote, tmp_path, environment=PATIENT) as job:
        home.mkdir(mode=0o700, parents=True)
        tomorrow = int((time.time() + 86400) * 1000)
        (home / "trainer.lock").write_bytes(f"{tomorrow}\n".encode().ljust(32))
        job.start_all()
        job.wait_for(lambda: len(job.events("r2", "commit")) > 5, "r2 at work")
        job.kill("r2")
        job.wait_for(lambda: "r2" not in job.events("r0", "epoch")[-1]["roster"], "r2 is out")
        job.environment = {**PATIENT, "FABRIC_RUN_DIR": str(tmp_path / "run" / "elsewhere")}
        job.start("r2", FABRIC_JOURNAL="")
        job.wait_for(lambda: job.ended("r2") is not None, "the end of the process with the lower incarnation")
        assert job.ended("r2") == 75 and "the clock of this host is behind" in job.said("r2"), job.logs()
        finish_and_check(job)
        assert job.starts["r2"] == 3, job.logs()
