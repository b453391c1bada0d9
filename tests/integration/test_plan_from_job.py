"""``fabric plan --from-job`` against a real job: the plan is made from what its replicas' deaths cost."""

import json
import statistics

import pytest
from forked_processes import run_python
from job import Job

DESCRIBED = ("gpus=24", "replica_gpus=8", "step_s=0.05", "exchange_s=0.005", "save_s=0.1")


def plan(job, *more):
    words = ["plan", "--from-job", "test", "--lighthouse", job.url, "--token-file", str(job.token)]
    words += ["steps=200", "--seeds", "1", "--json", *DESCRIBED, *more]
    return run_python("-m", "fabric.cli.main", *words)


def test_a_plan_takes_rate_and_phases_from_the_deaths_that_a_job_has_recorded(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "48", "TINY_PATIENT_STEPS": "38"}) as job:
        gate = tmp_path / "gate"
        job.start_all({"r1": "forward@8=kill", "r2": f"forward@28=wait:{gate}"})
        job.wait_for(lambda: job.ended("r1") is not None, "the death of r1")
        job.start("r1")
        job.wait_for(lambda: (tmp_path / "gate.awaited").exists(), "r2 to come to step 28")
        job.wait_for(lambda: [x["kind"] for x in job.recoveries()] == ["death"], "a record of the death")
        early = plan(job)
        assert early.returncode == 2, early.stdout
        assert "the job has 1 recorded failure, and a rate needs at least 2" in early.stderr
        job.kill("r2")
        job.finish()
        deaths = [x for x in job.recoveries() if x["kind"] == "death"]
        assert len(deaths) == 2, deaths
        answer = plan(job)
        assert answer.returncode == 0, answer.stderr
        body = json.loads(answer.stdout)
        cluster, first = body["cluster"], deaths[0]["detected"]
        assert cluster["mtbf_s"] == pytest.approx(deaths[1]["detected"] - first)
        stalls = [x["step_committed"] - x["detected"] for x in deaths]
        assert cluster["stall_s"] == pytest.approx(statistics.median(stalls))
        away = [
            lost["joined"] - x["detected"] for x in deaths for lost in x["lost"].values() if lost["joined"]
        ]
        assert away and cluster["restart_s"] == pytest.approx(statistics.median(away))
        assert cluster["source"] == "recovery records of job test, 2 failures"
        assert {"fabric", "checkpoint and restart"} <= {x["name"] for x in body["policies"]}
        given = json.loads(plan(job, "mtbf_s=3600").stdout)["cluster"]
        assert given["mtbf_s"] == 3600 and given["stall_s"] == cluster["stall_s"], "what is given goes first"
