"""The lighthouse diagnoses real hangs: a stopped process, C code, an absent rank, mismatched collectives, a
slow link.
"""

import os
import signal

from job import Job
from rank_job import RankJob
from slow_link import SlowLink

PATIENT = {"FABRIC_EXCHANGE_S": "3", "FABRIC_USER_CODE_S": "3"}


def diagnosed(job: Job, replica: str = "") -> dict:
    """Return the first recovery record with a diagnosis, of the named replica's loss if given."""

    def found() -> list[dict]:
        return [r for r in job.recoveries() if r["diagnosis"] and (not replica or replica in r["lost"])]

    job.wait_for(lambda: job.events("r0", "commit"), "the first step")
    job.wait_for(found, "a diagnosis")
    return found()[0]


def test_the_diagnosis_names_a_stopped_process(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "500"}) as job:
        job.start_all({"r1": "forward@8=stop"})
        record = diagnosed(job, "r1")
        said = record["diagnosis"]
        assert (said["verdict"], said["about"]) == ("stopped process", ["r1"])
        [seen] = said["seen"]
        assert (seen["process"], seen["how"]) == ("stopped", "kernel")
        assert f"process {job.pids['r1']} of r1 is stopped" in said["why"]
        [told] = job.told("diagnosis")
        assert (told["about"], told["incident_id"]) == ("r1", record["incident_id"]) and said["why"] in told[
            "why"
        ]
        os.kill(job.pids["r1"], signal.SIGCONT)


def test_the_diagnosis_names_a_process_stuck_in_c_code_that_keeps_the_gil(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "500", **PATIENT}) as job:
        job.start("r0")
        job.start("r1", TEST_TRAINER="stuck_trainer", STUCK="c")
        job.start("r2")
        said = diagnosed(job, "r1")["diagnosis"]
        assert (said["verdict"], said["about"]) == ("absent rank", ["r1"])
        [seen] = said["seen"]
        assert (seen["process"], seen["how"]) == ("running", "signal")
        assert any("stuck_in_c" in frame for frame in seen["main"]), seen
        assert "holds the interpreter's lock" in said["why"]


def ranks_diagnosed(zygote, tmp_path, how: str) -> dict:
    environment = {"SHARDED": "fsdp2", "TINY_STEPS": "500", "TORCH_FR_BUFFER_SIZE": "2000", **PATIENT}
    with RankJob(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start("r0")
        job.start("r1", TEST_TRAINER="stuck_trainer", STUCK=how)
        return diagnosed(job, "r1")["diagnosis"]


def test_the_diagnosis_names_a_rank_that_does_not_enter_its_replicas_collective(zygote, tmp_path):
    said = ranks_diagnosed(zygote, tmp_path, "absent")
    assert (said["verdict"], said["about"]) == ("absent rank", ["r1"])
    assert "r1 rank 1 has not come to all_reduce (number" in said["why"] and "stay_away" in said["why"]
    assert {seen["rank"] for seen in said["seen"]} == {0, 1}


def test_the_diagnosis_names_ranks_whose_collectives_do_not_match(zygote, tmp_path):
    said = ranks_diagnosed(zygote, tmp_path, "mismatch")
    assert said["verdict"] == "mismatched operation or sizes"
    assert "r1 rank 0 is in broadcast" in said["why"] and "r1 rank 1 is in all_reduce" in said["why"]


def test_the_diagnosis_names_a_slow_link(zygote, tmp_path):
    """Every process runs, but from some step on the bytes to r1 arrive slowly."""
    environment = {"TINY_STEPS": "500", "TINY_WIDTH": "8192", "FABRIC_DATA_PLANE": "tcp", **PATIENT}
    with Job(zygote, tmp_path, environment=environment) as job, SlowLink() as link:
        job.start("r0")
        job.start("r1", FABRIC_BIND=f"127.0.0.1:{link.port}", FABRIC_ADVERTISE=link.host)
        job.start("r2")
        job.wait_for(lambda: len(job.events("r0", "commit")) > 3, "the first steps")
        link.is_slow.set()
        said = diagnosed(job)["diagnosis"]
        assert said["verdict"] == "slow link", said
        assert "every process runs" in said["why"] and set(said["about"]) <= {"r0", "r1", "r2"}
