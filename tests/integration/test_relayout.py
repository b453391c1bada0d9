"""A replica with a slow rank leaves; `fabric launch` brings it back without that rank, and later with it."""

import sys

import pytest
from job import Job
from test_act import adapt, gradients
from test_launched_jobs import LaunchedJob
from test_slow_replica import PATIENCE_S, health, is_predicted

pytestmark = pytest.mark.long("sim/test_relayout_worlds.py")

# Start without `fabric run`: its low-priority imports would take minutes on a crowded host.
LAUNCH = ["--ranks", "1:2", "--no-python", sys.executable]
ENVIRONMENT = {
    "FABRIC_REPLICAS": "2",
    "FABRIC_UNEQUAL": "1",
    "FABRIC_ADAPT": "act",
    "FABRIC_DIGEST_EVERY": "1",
}


def layouts(job: LaunchedJob, replica: str) -> list[str]:
    """The layout of each start of this replica's rank 0."""
    return [layout for rank, _, _, layout in job.notes(replica) if rank == "0"]


def knows_all_ranks(job: LaunchedJob) -> bool:
    rows = health(job)["by_step"]["rows"]
    return len(rows) == 4 and all(row.get("predicted_s") for row in rows)


def wait_event(job: Job, kind: str, about: str) -> dict:
    job.wait_for(lambda: [x for x in job.told(kind) if x["about"] == about], f"{kind} {about}", PATIENCE_S)
    return [x for x in job.told(kind) if x["about"] == about][-1]


def wait_for_part(job: LaunchedJob, replica: str) -> int:
    """Wait until the replica contributes to a step that begins after this call; return the step."""
    after = job.events("r0", "commit")[-1]["step"]

    def newer() -> list[dict]:
        return [x for x in job.events(replica, "commit") if x["contributed"] and x["step"] > after + 1]

    job.wait_for(newer, f"a part of {replica} after step {after}", PATIENCE_S)
    return newer()[0]["step"]


def test_a_slow_rank_is_left_out_by_its_launcher_and_taken_back(zygote, tmp_path):
    slow = tmp_path / "slow"
    with LaunchedJob(zygote, tmp_path / "job", replicas=2, ranks=2, environment=ENVIRONMENT) as job:
        job.trainer = "relayout_trainer.py"
        job.launch("r0", *LAUNCH)
        job.launch("r1", *LAUNCH, RELAYOUT_SLOW=str(slow))
        job.wait_for(lambda: job.events("r0", "commit"), "the first step", PATIENCE_S)
        adapt(job, "--veto", "r0")  # on a loaded host r0 may be slow for a while, too
        job.wait_for(lambda: is_predicted(job, 2), "the end of the warm-up", PATIENCE_S)
        job.wait_for(lambda: knows_all_ranks(job), "predictions by rank", PATIENCE_S)
        slow.touch()
        ordered = wait_event(job, "layout", "r1")
        assert "r1 comes back in the layout ranks=1 without 1" in ordered["why"], ordered
        job.wait_for(lambda: layouts(job, "r1")[-1] == "ranks=1", "one rank of r1", PATIENCE_S)
        step = wait_for_part(job, "r1")
        (shown,) = health(job)["layouts"]
        assert (shown["replica"], shown["layout"], shown["usual"]) == ("r1", "ranks=1 without 1", "ranks=2")
        slow.unlink()
        assert "r1" in adapt(job, "--veto", "r1")
        job.wait_for(lambda: layouts(job, "r1")[-1] == "ranks=2", "two ranks of r1", PATIENCE_S)
        wait_for_part(job, "r1")
        assert layouts(job, "r0") == ["ranks=2"], "the other replica's ranks were started once"
        assert layouts(job, "r1") == ["ranks=2", "ranks=1", "ranks=2"], job.logs()
        job.wait_for(lambda: health(job)["layouts"] == [], "the end of the order")
        both = [gradients(job, replica) for replica in ("r0", "r1")]
        common = set(both[0]) & set(both[1])
        assert step in common and all(both[0][x] == both[1][x] for x in common)
        assert not list(job.told("evicting")), job.logs()
