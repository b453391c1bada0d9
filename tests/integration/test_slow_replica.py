"""A replica of real processes gets slow: the lighthouse names it, advises shares, and says when it is
well."""

import subprocess
import sys

from job import Job


def health(job: Job) -> dict:
    return job.status()["health"]


def is_predicted(job: Job) -> bool:
    replicas = health(job)["replicas"]
    return len(replicas) == 3 and all(x["predicted_s"] is not None for x in replicas.values())


def test_a_slow_replica_is_named_with_the_shares_that_would_help(zygote, tmp_path):
    slow = tmp_path / "slow"
    environment = {"TEST_TRAINER": "packed_trainer", "PACKED_STEPS": "1000000", "FABRIC_DIGEST_EVERY": "1"}
    with Job(zygote, tmp_path / "job", environment=environment) as job:
        for replica in ("r0", "r1", "r2"):
            more = {"PACKED_SLOW": str(slow), "PACKED_FACTOR": "4"} if replica == "r1" else {}
            job.start(replica, **more)
        job.wait_for(lambda: job.events("r0", "commit"), "the first step")
        job.wait_for(lambda: is_predicted(job), "the end of the warm-up")
        slow.touch()
        job.wait_for(lambda: [e for e in job.told("slow") if e["about"] == "r1"], "r1 to be named")
        job.wait_for(lambda: health(job)["advice"], "advice")
        shown = health(job)
        assert shown["mode"] == "advise"
        shares = shown["advice"]["micro_batches"]
        assert sum(shares.values()) == 12 and shares["r1"] < min(shares["r0"], shares["r2"])
        command = ["status", "--lighthouse", job.url, "--job", "test", "--token-file", str(job.token)]
        said = subprocess.run(
            [sys.executable, "-m", "fabric.cli.main", *command],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        assert "slow: replica r1 takes" in " ".join(said.split())
        # The lighthouse only advises: each member still has the shares that it asked for.
        assert {member["shares"] for member in job.status()["members"]} == {1}
        slow.unlink()
        job.wait_for(lambda: [e for e in job.told("no longer slow") if e["about"] == "r1"], "its recovery")
