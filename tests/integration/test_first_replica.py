"""A replica that has met no other one publishes no gradients; a second replica joins it all the same."""

import json

from job import Job

ENVIRONMENT = {"TINY_STEPS": "36", "TINY_REPLICAS": "2", "TINY_PATIENT_STEPS": "28"}


def test_a_second_replica_joins_one_that_has_published_no_gradient(zygote, tmp_path):
    with Job(zygote, tmp_path, replicas=1, environment=ENVIRONMENT) as job:
        # The journal would want the digests of all gradients.
        job.start("r0", FABRIC_JOURNAL="")
        job.wait_for(lambda: "begins job test" in (tmp_path / "r0.log").read_text(), "r0 to begin")
        job.wait_for(lambda: job.status()["members"][0]["step"] >= 5, "r0 at work")
        server = job.status()["members"][0]["ckpt"]
        assert json.loads(job.ask(f"{server}/v1/gradients")) == []
        job.start("r1")
        job.finish(restart=False)
        assert job.codes == {"r0": 0, "r1": 0}, job.logs()
        commits = job.events("r1", "commit")
        assert [e["step"] for e in commits if e["replay"]], "r1 replays gradients of r0"
        together = [e for e in commits if set(e["contributions"]) == {"r0", "r1"}]
        # At each of these steps the members have compared the digests of their states.
        assert len(together) > 5 and not job.told("dispute")
