"""A newcomer that cannot catch up enters by a blocking join, and the event gives the reason."""

import pytest
from job import Job
from test_corruption import bad
from test_failures import finish_and_check

STEPS = 170


@pytest.mark.long("sim/test_late_worlds.py")
def test_a_replica_that_replays_too_slowly_enters_by_a_blocking_join(zygote, tmp_path):
    environment = {"TINY_STEPS": str(STEPS), "TINY_STEP_S": "0.01", "TINY_PATIENT_STEPS": "120"}
    with Job(zygote, tmp_path, environment=environment) as job:
        job.start_all({"r1": "forward@8=kill"})
        job.wait_for(lambda: job.ended("r1") is not None, "the death of r1")
        job.start("r1", **bad("a slow replay"))
        finish_and_check(job, STEPS)
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}
        assert len(job.told("too slow")) == 2, "it starts again from a newer snapshot once"
        [told] = [e for e in job.told("epoch") if "while the others wait for its state" in e["why"]]
        assert "r1 joins while the others wait for its state, at most 60 s: its gap of " in told["why"]
        assert "has not shrunk for 10 steps" in told["why"]
        [awaited] = job.events("r1", "blocking-join")
        live = [e["step"] for e in job.events("r1", "commit") if e["contributed"] and e["step"] > 8]
        assert live == list(range(awaited["step"] + 1, STEPS)), (
            "it works from the step after the one it entered in"
        )


def test_without_bitwise_equality_one_setting_turns_digests_and_replay_off(zygote, tmp_path):
    """States drift apart, as on unlike devices: with FABRIC_DIGEST_EVERY=drift no member is evicted, and a
    returning replica enters by a blocking join.
    """
    environment = bad(
        "states that drift", TINY_STEPS="30", FABRIC_DIGEST_EVERY="drift", TINY_PATIENT_STEPS="20"
    )
    with Job(zygote, tmp_path, environment=environment) as job:
        job.start_all({"r1": "forward@8=kill"})
        job.finish()
        assert set(job.codes.values()) == {0}, job.logs()
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}
        [told] = [e for e in job.told("epoch") if "while the others wait for its state" in e["why"]]
        assert told["why"].endswith("its settings turn replay off")
        assert [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > 8]
        assert not [e for e in job.events("r1", "commit") if e["replay"]]
        assert not job.told("evicting")[1:], "nobody but the killed one"


def test_without_the_setting_states_that_are_not_bitwise_equal_stop_the_job(zygote, tmp_path):
    environment = bad("states that drift", TINY_STEPS="50")
    with Job(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start_all()
        job.finish()
        assert job.codes == {"r0": 1, "r1": 1}, job.logs()
        assert "disagree about the state at step 1" in (job.folder / "r0.log").read_text()
