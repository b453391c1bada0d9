"""A pipeline with a slow stage leaves; `fabric launch` brings it back with fewer layers at that stage, and
later in its usual split."""

import sys

import pytest
from test_act import adapt, gradients
from test_launched_jobs import LaunchedJob
from test_relayout import knows_all_ranks, layouts, wait_event, wait_for_part
from test_slow_replica import PATIENCE_S, health, is_predicted

pytestmark = pytest.mark.long("sim/test_relayout_worlds.py")

USUAL, OTHER = "ranks=2,layers=2+2", "ranks=2,layers=3+1"
# Start without `fabric run`: its low-priority imports would take minutes on a crowded host.
LAUNCH = ["--layout", USUAL, "--no-python", sys.executable]
ENVIRONMENT = {
    "FABRIC_REPLICAS": "2",
    "FABRIC_UNEQUAL": "1",
    "FABRIC_ADAPT": "act",
    "FABRIC_DIGEST_EVERY": "1",
}


def test_a_slow_stage_gets_fewer_layers_by_a_new_start_and_its_usual_layers_back(zygote, tmp_path):
    slow = tmp_path / "slow"
    with LaunchedJob(zygote, tmp_path / "job", replicas=2, ranks=2, environment=ENVIRONMENT) as job:
        job.trainer = "split_trainer.py"
        job.launch("r0", *LAUNCH)
        job.launch("r1", *LAUNCH, SPLIT_SLOW=str(slow))
        job.wait_for(lambda: job.events("r0", "commit"), "the first step", PATIENCE_S)
        adapt(job, "--veto", "r0")  # on a loaded host r0 may be slow for a while, too
        job.wait_for(lambda: is_predicted(job, 2), "the end of the warm-up", PATIENCE_S)
        job.wait_for(lambda: knows_all_ranks(job), "predictions by rank", PATIENCE_S)
        slow.touch()
        ordered = wait_event(job, "layout", "r1")["why"]
        assert f"r1 comes back in the layout {OTHER}: stage 1 of replica r1 computes at" in ordered
        assert "with the layers 3+1 and not 2+2 a step then takes" in ordered
        job.wait_for(lambda: layouts(job, "r1")[-1] == OTHER, "the other split of r1", PATIENCE_S)
        first = wait_for_part(job, "r1")
        (shown,) = health(job)["layouts"]
        assert (shown["replica"], shown["layout"], shown["usual"]) == ("r1", OTHER, USUAL)
        slow.unlink()
        adapt(job, "--mode", "advise")
        job.wait_for(lambda: layouts(job, "r1")[-1] == USUAL, "the usual split of r1", PATIENCE_S)
        last = wait_for_part(job, "r1")
        assert layouts(job, "r0") == [USUAL], "the other replica's ranks were started once"
        assert layouts(job, "r1") == [USUAL, OTHER, USUAL], job.logs()
        assert health(job)["layouts"] == []
        for both in ([gradients(job, x) for x in ("r0", "r1")], [job.states(x) for x in ("r0", "r1")]):
            common = set(both[0]) & set(both[1])
            assert {first, last} <= common and all(both[0][step] == both[1][step] for step in common)
        assert not job.told("evicting"), job.logs()
    job.check_promises()
