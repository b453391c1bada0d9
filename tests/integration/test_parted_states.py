"""A dispute about states names what differs, its likely source and what to do, and not the hosts' memory."""

import pytest
from job import Job

NAMED = {
    "noise in a layer": (
        "the first tensor that differs is model/1.weight; likely an update with random numbers of each "
        "replica's own"
    ),
    "a buffer": "the first tensor that differs is model/scale; likely forward changes this buffer",
    "a callback": "they differ in progress/seen: 4 on r0, 9 on r1; likely a callback, a counter",
    "a flipped bit": "so only a few bytes differ: check these hosts' memory",
}


@pytest.mark.parametrize("what", NAMED)
def test_two_members_stop_and_say_what_differs(zygote, tmp_path, what):
    environment = {"TEST_TRAINER": "parting_trainer", "TINY_STEPS": "30", "FABRIC_DIGEST_EVERY": "1"}
    with Job(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start("r0")
        job.start("r1", PARTING=what)
        job.finish()
        assert job.codes == {"r0": 1, "r1": 1}, job.logs()
        for replica in ("r0", "r1"):
            said = job.said(replica)
            assert "disagree about the state at step 4" in said
            assert "restart the job from a checkpoint" in said
            assert NAMED[what] in said, said
            assert ("memory" in said) == (what == "a flipped bit")


def test_the_majority_says_what_differs_on_the_replica_that_it_leaves_out(zygote, tmp_path):
    environment = {"TEST_TRAINER": "parting_trainer", "TINY_STEPS": "30", "FABRIC_DIGEST_EVERY": "1"}
    with Job(zygote, tmp_path, environment=environment) as job:
        job.start("r0")
        job.start("r1", PARTING="noise in a layer")
        job.start("r2")
        job.wait_for(lambda: job.events("r0", "commit"), "the first step")
        job.wait_for(lambda: job.told("evicting"), "the verdict")
        why = job.told("evicting")[0]["why"]
        assert why.startswith("r1 disagrees with the majority about the state at step 4; the first tensor")
        assert NAMED["noise in a layer"] in why
        job.finish()
        assert set(job.codes.values()) == {0}, job.logs()
