"""A NaN gradient in real jobs: passed on, skipped by all replicas, or the end of the job, as ``on_nan`` says.
The error names replica and tensor.
"""

from job import Job
from test_corruption import bad
from test_failures import finish_and_check


def start(job: Job) -> None:
    job.start("r0")
    job.start("r1", **bad("not a number"))
    job.start("r2")


def job_of(zygote, folder, policy: str) -> Job:
    environment = {"TINY_STEPS": "20", "TINY_STEP_S": "0.005", "FABRIC_ON_NAN": policy}
    return Job(zygote, folder, environment=environment)


def test_with_on_nan_skip_all_members_skip_the_step(zygote, tmp_path):
    with job_of(zygote, tmp_path, "skip") as job:
        start(job)
        finish_and_check(job, 20)
        for replica in ("r0", "r1", "r2"):
            [told] = job.events(replica, "skipped")
            assert told["step"] == 6
            expected = "0.weight at step 6 is not finite: nor is the contribution of r1 (its 0.weight)"
            assert expected in told["why"]
            assert [e["step"] for e in job.events(replica, "commit")] == list(range(20))


def test_with_on_nan_stop_all_members_stop(zygote, tmp_path):
    with job_of(zygote, tmp_path, "stop") as job:
        start(job)
        job.finish()
        assert job.codes == {"r0": 1, "r1": 1, "r2": 1}, job.logs()
        for replica in ("r0", "r1", "r2"):
            said = (job.folder / f"{replica}.log").read_text()
            assert (
                "the averaged gradient of 0.weight at step 6 is not finite: nor is the contribution of r1"
                in said
            )
            assert [e["step"] for e in job.events(replica, "commit")] == list(range(6)), (
                "nothing half-applied"
            )


def test_by_default_a_nonfinite_gradient_is_applied(zygote, tmp_path):
    with job_of(zygote, tmp_path, "propagate") as job:
        start(job)
        finish_and_check(job, 20)
        assert not job.events("r0", "skipped")
        metrics = {e["step"]: e["metrics"] for e in job.events("r0", "commit")}
        assert "nan:loss" not in metrics[5] and metrics[6]["nan:loss"] == 1, "r1 alone at first"
        assert metrics[7]["nan:loss"] == 3, "then everybody's weights"


def test_an_unknown_value_of_on_nan_is_refused(zygote, tmp_path):
    with job_of(zygote, tmp_path, "ignore") as job:
        job.start("r0")
        job.finish()
        assert job.codes == {"r0": 1}
        assert 'FABRIC_ON_NAN is "ignore": it must be "propagate"' in (job.folder / "r0.log").read_text()


# --- other input that cannot be kept equal ----------------------------------------------------------------


def test_a_model_that_changes_after_attach_is_named_by_all(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "20", "TINY_STEP_S": "0.005"}) as job:
        job.start("r0")
        job.start("r1", **bad("a frozen layer"))
        job.start("r2")
        job.finish()
        assert job.codes == {"r0": 1, "r1": 1, "r2": 1}, job.logs()
        why = "the parameter 3.bias was frozen after the training began"
        assert f"fabric: {why}" in (job.folder / "r1.log").read_text()
        for replica in ("r0", "r2"):
            said = (job.folder / f"{replica}.log").read_text()
            assert "r1 failed at step 7: StateError: " + why in said
            assert max(e["step"] for e in job.events(replica, "commit")) == 6, "nothing of it was summed"


def test_a_sparse_gradient_is_a_mistake_and_no_crash(zygote, tmp_path):
    with Job(zygote, tmp_path, environment={"TINY_STEPS": "20", "TINY_STEP_S": "0.005"}) as job:
        job.start("r0")
        job.start("r1", **bad("a sparse gradient"))
        job.start("r2")
        job.finish()
        assert job.codes == {"r0": 1, "r1": 1, "r2": 1}, job.logs()
        assert job.starts == {"r0": 1, "r1": 1, "r2": 1}
        for replica in ("r0", "r1", "r2"):
            said = job.said(replica)
            why = "the gradient of 0.weight is sparse, which cannot be summed over replicas"
            assert f"r1 failed at step 6: {why}" in said and len(said.splitlines()) == 1, said
            assert max(e["step"] for e in job.events(replica, "commit")) == 5, "nothing half-applied"


def test_an_optimizer_that_evaluates_the_loss_itself_is_refused(zygote, tmp_path):
    with Job(zygote, tmp_path, replicas=1) as job:
        job.start("r0", **bad("an optimizer that evaluates"))
        job.finish()
        assert job.codes == {"r0": 1}
        assert "torch.optim.LBFGS evaluates the loss again inside step" in (job.folder / "r0.log").read_text()
