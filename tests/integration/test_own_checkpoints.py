"""A script with checkpoints of its own: the job begins at their step, and one replica writes for all."""

from job import Job
from test_failures import finals

PATIENT = {"TINY_PATIENT_STEPS": "15"}


def test_a_job_begins_at_the_step_of_a_checkpoint_of_the_scripts_own(zygote, tmp_path):
    """r0's file is of step 40, r1's of step 30: both begin at 40. r1 is killed: it joins where the job is."""
    environment = {"TEST_TRAINER": "odd_trainer", "ODD": "resumed", "TINY_STEPS": "66", **PATIENT}
    with Job(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start_all({"r1": "before-ring@50=kill"})
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0}, job.logs()
        assert job.starts == {"r0": 1, "r1": 2}
        assert len(set(finals(job).values())) == 1
        assert [e["step"] for e in job.events("r0", "commit")] == list(range(40, 66))
        assert min(e["step"] for e in job.events("r1", "commit")) == 40
        writers: dict[int, int] = {}
        for replica in ("r0", "r1"):
            lines = [line.split() for line in job.said(replica).splitlines() if line.startswith("step ")]
            assert all(int(members) > 0 for _, _, _, members, _ in lines), "it computes, so somebody is there"
            for _, step, _, _, writes in lines:
                writers[int(step)] = writers.get(int(step), 0) + (writes == "True")
        assert writers == dict.fromkeys(range(40, 66), 1), "one replica at every step, and never two"
