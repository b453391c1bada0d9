"""A replica of real processes gets slow in the mode act: its share is lowered, and given back."""

import subprocess
import sys

from job import Job
from test_slow_replica import is_predicted

EQUAL = {"r0": 1, "r1": 1, "r2": 1}
# Damping may delay the report of a slow replica by 40 steps, which take a second each on a crowded host.
PATIENCE_S = 400.0


def adapt(job: Job, *options: str) -> str:
    command = ["adapt", "--lighthouse", job.url, "--job", "test", "--token-file", str(job.token)]
    return subprocess.run(
        [sys.executable, "-m", "fabric.cli.main", *command, *options, "--why", "a test"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def shares(job: Job) -> dict[str, int]:
    return {member["replica"]: member["shares"] for member in job.status()["members"]}


def parts(job: Job, epoch: int) -> list[dict[str, int]]:
    """The micro-batches by replica of each step that r0 has committed in ``epoch``."""
    commits = [x for x in job.events("r0", "commit") if x["epoch"] == epoch]
    return [{name: len(ids) for name, ids in x["contributions"].items()} for x in commits]


def gradients(job: Job, replica: str) -> dict[int, str]:
    """Step -> digest of the applied gradient."""
    return {x["step"]: x["gradient_digest"] for x in job.events(replica, "commit")}


def test_the_leader_lowers_the_share_of_a_slow_replica_and_gives_it_back(zygote, tmp_path):
    slow = tmp_path / "slow"
    environment = {"TEST_TRAINER": "packed_trainer", "PACKED_STEPS": "1000000", "FABRIC_DIGEST_EVERY": "1"}
    with Job(zygote, tmp_path / "job", environment=environment) as job:
        for replica in ("r0", "r1", "r2"):
            more = {"PACKED_SLOW": str(slow), "PACKED_FACTOR": "4"} if replica == "r1" else {}
            job.start(replica, **more)
        job.wait_for(lambda: job.events("r0", "commit"), "the first step")
        # On a loaded host the others may be slow for a while, too: they keep their shares.
        assert "mode advise; replicas under a veto: r0" in adapt(job, "--veto", "r0")
        assert "mode act; replicas under a veto: r0, r2" in adapt(job, "--veto", "r2", "--mode", "act")
        job.wait_for(lambda: is_predicted(job), "the end of the warm-up", PATIENCE_S)
        slow.touch()
        job.wait_for(lambda: shares(job)["r1"] < shares(job)["r0"], "the lower share", PATIENCE_S)
        record = job.status()["record"]
        assert "shares by speed: replica r1 computes at" in record["reason"]
        assert "predicted: throughput +" in record["reason"] and "cost 0 s" in record["reason"]
        assert [x for x in job.told("shares") if x["about"] == "r1"]
        job.wait_for(lambda: parts(job, record["epoch"]), "a step with the new shares")
        for counts in parts(job, record["epoch"]):
            assert sum(counts.values()) == 12 and counts["r1"] < min(counts["r0"], counts["r2"])
        slow.unlink()
        job.wait_for(lambda: shares(job) == EQUAL, "the shares to be given back", PATIENCE_S)
        last = job.status()["record"]["epoch"]
        job.wait_for(lambda: parts(job, last), "a step with the asked shares")
        assert parts(job, last)[-1] == {"r0": 4, "r1": 4, "r2": 4}
        digests = [gradients(job, replica) for replica in ("r0", "r1", "r2")]
        common = set.intersection(*(set(x) for x in digests))
        assert common and all(len({x[step] for x in digests}) == 1 for step in common)
