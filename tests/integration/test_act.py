"""A replica of real processes gets slow in the mode act: its share is lowered, and given back."""

from collections.abc import Callable

from forked_processes import run_python
from job import Job
from test_slow_replica import PATIENCE_S, is_predicted

EQUAL = {"r0": 1, "r1": 1, "r2": 1}


def adapt(job: Job, *options: str) -> str:
    command = ["adapt", "--lighthouse", job.url, "--job", "test", "--token-file", str(job.token)]
    return run_python("-m", "fabric.cli.main", *command, *options, "--why", "a test").stdout


def record_with_shares(job: Job, fits: Callable[[dict[str, int]], bool], what: str) -> dict:
    """Wait until the shares of r0, r1 and r2 fit, and return the record of the same status."""
    statuses: list[dict] = []

    def has_come() -> bool:
        statuses.append(job.status())
        shares = {member["replica"]: member["shares"] for member in statuses[-1]["members"]}
        return set(shares) == set(EQUAL) and fits(shares)

    job.wait_for(has_come, what, PATIENCE_S)
    return statuses[-1]["record"]


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
        record = record_with_shares(job, lambda shares: shares["r1"] < shares["r0"], "the lower share")
        assert "shares by speed: replica r1 computes at" in record["reason"]
        assert "predicted: throughput +" in record["reason"] and "cost 0 s" in record["reason"]
        assert [x for x in job.told("shares") if x["about"] == "r1"]
        job.wait_for(lambda: parts(job, record["epoch"]), "a step with the new shares")
        for counts in parts(job, record["epoch"]):
            assert sum(counts.values()) == 12 and counts["r1"] < min(counts["r0"], counts["r2"])
        slow.unlink()
        last = record_with_shares(job, EQUAL.__eq__, "the shares to be given back")["epoch"]
        job.wait_for(lambda: parts(job, last), "a step with the asked shares")
        assert parts(job, last)[-1] == {"r0": 4, "r1": 4, "r2": 4}
        digests = [gradients(job, replica) for replica in ("r0", "r1", "r2")]
        common = set.intersection(*(set(x) for x in digests))
        assert common and all(len({x[step] for x in digests}) == 1 for step in common)
