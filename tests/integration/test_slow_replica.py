"""A replica of real processes gets slow: the lighthouse names it, advises shares, and says when it is
well."""

import json

from forked_processes import run_python
from job import Job
from rank_job import RankJob

# Damping may delay a report by 40 steps, which take a second each on a crowded host.
PATIENCE_S = 400.0


def health(job: Job) -> dict:
    return job.status()["health"]


def is_predicted(job: Job, count: int = 3) -> bool:
    replicas = health(job)["replicas"]
    return len(replicas) == count and all(x["predicted_s"] is not None for x in replicas.values())


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
        job.wait_for(
            lambda: [e for e in job.told("slow") if e["about"] == "r1"], "r1 to be named", PATIENCE_S
        )
        job.wait_for(lambda: lowers_the_share_of_r1(health(job)), "advice", PATIENCE_S)
        job.wait_for(lambda: "replica r1 takes" in status_text(job), "the sentence about r1")
        # The lighthouse only advises: each member still has the shares that it asked for.
        assert {member["shares"] for member in job.status()["members"]} == {1}
        # The device of this test is a timed wait, so the micro-benchmark may well refute the slowdown.
        job.wait_for(lambda: verdict_on(job, "r1") in ("confirmed", "refuted"), "a micro-benchmark of r1")
        slow.unlink()
        job.wait_for(
            lambda: [e for e in job.told("no longer slow") if e["about"] == "r1"], "its recovery", PATIENCE_S
        )
        job.wait_for(
            lambda: any(x["replica"] == "r1" and x["ended"] and x["steps"] for x in slowdowns(job)),
            "the record of the slowdown",
        )


def lowers_the_share_of_r1(shown: dict) -> bool:
    """Whether the mode is advise and the advised shares keep the global batch of 12 micro-batches."""
    assert shown["mode"] == "advise"
    shares = shown["advice"]["micro_batches"] if shown["advice"] else {}
    assert sum(shares.values()) in (0, 12)
    # On a loaded host another replica may be slow for a while, too.
    return bool(shares) and shares["r1"] < min(shares["r0"], shares["r2"])


def status_text(job: Job) -> str:
    command = ["status", "--lighthouse", job.url, "--job", "test", "--token-file", str(job.token)]
    shown = run_python("-m", "fabric.cli.main", *command)
    assert shown.returncode == 0, shown.stderr
    return " ".join(shown.stdout.split()).partition("slow: ")[2]


def slowdowns(job: Job) -> list[dict]:
    return [json.loads(line) for line in job.ask("/v1/jobs/test/slowdowns").splitlines()]


def verdict_on(job: Job, replica: str) -> str:
    """The verdict of the newest micro-benchmark on this replica."""
    return next((x["verdict"] for x in reversed(slowdowns(job)) if x["replica"] == replica), "")


def slow_ranks(job: Job) -> list[tuple[str, str, list[int]]]:
    return [(x["scope"], x["replica"], x["ranks"]) for x in health(job)["slow"]]


def test_the_slow_rank_of_a_replica_is_named_although_both_ranks_take_as_long(zygote, tmp_path):
    slow = tmp_path / "slow"
    environment = {"TEST_TRAINER": "ranked_trainer", "FABRIC_DIGEST_EVERY": "1"}
    with RankJob(zygote, tmp_path / "job", replicas=2, ranks=2, environment=environment) as job:
        job.start("r0")
        job.start("r1", RANKED_SLOW=str(slow), RANKED_RANK="1")
        job.wait_for(lambda: job.events("r0", "commit"), "the first step")
        job.wait_for(lambda: is_predicted(job, 2), "the end of the warm-up")
        job.wait_for(
            lambda: all(x.get("predicted_s") for x in health(job)["by_step"]["rows"]), "predictions by rank"
        )
        slow.touch()
        job.wait_for(lambda: ("rank", "r1", [1]) in slow_ranks(job), "rank 1 of r1 to be named", PATIENCE_S)
        rows = {(x["replica"], x["rank"]): x["speeds"] for x in health(job)["by_step"]["rows"]}
        assert rows.keys() == {("r0", 0), ("r0", 1), ("r1", 0), ("r1", 1)}
        slow.unlink()
        job.wait_for(
            lambda: [e for e in job.told("no longer slow") if e["about"] == "r1"], "its recovery", PATIENCE_S
        )
