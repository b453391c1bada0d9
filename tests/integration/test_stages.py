"""Epochs and stages in a loop of its own: a replica is killed in one and comes back in another."""

import pytest
from job import Job
from test_failures import check, finals

STEPS = 30
STAGED = {"TEST_TRAINER": "staged_trainer", "TINY_STEPS": str(STEPS), "TINY_PATIENT_STEPS": "30"}


@pytest.mark.parametrize("step", [8, 20])
def test_a_replica_that_is_killed_in_any_epoch_comes_back(zygote, tmp_path, step):
    with Job(zygote, tmp_path, environment=STAGED) as job:
        job.start_all({"r1": f"forward@{step}=kill"})
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}
        assert len(set(finals(job).values())) == 1
        check(job, STEPS)
        for name in job.pids:
            assert "FINAL lr 0.001681" in job.said(name), "the scheduler has made a step per epoch"
            changes = [(e["step"], e["data"]["first_step"]) for e in job.events(name, "data")]
            assert set(changes) == {(18, 18)}
        assert "fabric: r1: goes on with job test at step " in (job.folder / "r1.log").read_text()
        assert "fabric: r0: begins job test at step 0, generation 1" in (job.folder / "r0.log").read_text()
        assert "FABRIC_DURABLE is not set" in (job.folder / "r0.log").read_text()


def test_an_error_in_a_step_without_micro_batches_ends_its_replica_alone(zygote, tmp_path):
    go_on = tmp_path / "go-on"
    environment = {**STAGED, "STAGED_PRINT": "loss", "TINY_GO_ON": str(go_on)}
    with Job(zygote, tmp_path, environment=environment) as job:
        job.start_all({"r1": "forward@4=kill"})
        job.wait_for(lambda: job.ended("r1") is not None, "the death of r1")
        job.start("r1")
        job.wait_for(lambda: job.ended("r1") is not None, "the end of r1")
        go_on.touch()
        job.finish()
        assert job.codes == {"r0": 0, "r1": 1, "r2": 0}, job.logs()
        [sentence] = [x for x in job.said("r1").splitlines() if "computed no micro-batch" in x]
        assert (
            "local variable 'loss'" in sentence and "use step.metrics, or `if step.contributed:`" in sentence
        )
