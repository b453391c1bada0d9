"""A job over two hosts with networks of their own: the cable between them is pulled, and loses one way. The
host with the lighthouse goes on, and the replica on the other host comes back without a restart.
"""

import pytest
from job import Job
from namespaces import ADDRESSES, Cable
from test_failures import finish_and_check

PROBLEM = Cable.problem()
STEPS = 150

pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


def start_on_two_hosts(job: Job, cable: Cable) -> None:
    """r0 and r1 are on the lighthouse's host, r2 is on the other one."""
    for replica, side in (("r0", 0), ("r1", 0), ("r2", 1)):
        job.start(replica, TEST_NETNS=cable.names[side], FABRIC_BIND=ADDRESSES[side])


def rosters(job: Job) -> list[list[str]]:
    return [sorted(e["roster"]) for e in job.events("r0", "epoch")]


def links(job: Job, replica: str) -> tuple[str, str]:
    """Return the transports of a replica's first ring links, to the next and from the previous member."""
    first = job.events(replica, "plane")[0]
    return first["next"], first["previous"]


def last_step(job: Job, replica: str) -> int:
    return max((e["step"] for e in job.events(replica, "commit") if e["contributed"]), default=-1)


def goes_on_without_r2(job: Job) -> None:
    job.wait_for(lambda: rosters(job)[-1] == ["r0", "r1"], "the epoch without r2")
    at = last_step(job, "r0")
    job.wait_for(lambda: last_step(job, "r0") > at + 1, "steps without r2")
    assert last_step(job, "r2") <= at + 1


def has_r2_again(job: Job) -> None:
    at = last_step(job, "r0")
    job.wait_for(lambda: last_step(job, "r2") > at, "r2's return")


def test_a_job_survives_a_pulled_cable_and_a_cable_that_loses_one_direction(zygote, tmp_path):
    environment = {"TINY_STEPS": str(STEPS), "TINY_STEP_S": "0.05", "FABRIC_EXCHANGE_S": "2"}
    with (
        Cable() as cable,
        Job(zygote, tmp_path, environment=environment, bind=ADDRESSES[0], network=cable.names[0]) as job,
    ):
        start_on_two_hosts(job, cable)
        job.wait_for(lambda: last_step(job, "r2") >= 2, "the first steps")
        # In the ring r0, r1, r2 neighbours on one host share memory, and other neighbours use TCP.
        assert links(job, "r0") == ("shm", "tcp") and links(job, "r2") == ("tcp", "tcp")
        cable.pull()
        goes_on_without_r2(job)
        cable.plug()
        has_r2_again(job)
        cable.lose(0)
        goes_on_without_r2(job)
        cable.lose_nothing(0)
        has_r2_again(job)
        finish_and_check(job, STEPS)
        assert job.starts == {"r0": 1, "r1": 1, "r2": 1}


def test_a_host_that_loses_large_packets_is_left_out_until_they_pass(zygote, tmp_path):
    """Small packets pass: every heartbeat, vote and greeting arrives."""
    environment = {"TINY_STEPS": str(STEPS), "TINY_STEP_S": "0.05", "TINY_WIDTH": "1024"}
    with (
        Cable() as cable,
        Job(zygote, tmp_path, environment=environment, bind=ADDRESSES[0], network=cable.names[0]) as job,
    ):
        start_on_two_hosts(job, cable)
        job.wait_for(lambda: last_step(job, "r2") >= 2, "the first steps")
        cable.lose_large()
        goes_on_without_r2(job)
        why = job.events("r0", "epoch")[-1]["reason"]
        assert why == "r2 evicted: it and r0, r1 cannot exchange messages of 16384 bytes"
        lost = "small messages pass between it and r0, r1, and messages of 16384 bytes are lost"
        job.wait_for(lambda: lost in str(job.events("r2", "kept-out")), "the leader's sentence")
        at = last_step(job, "r0")
        job.wait_for(lambda: last_step(job, "r0") > at + 10, "steps while r2 may not join")
        for side in (0, 1):
            cable.lose_nothing(side)
        has_r2_again(job)
        finish_and_check(job, STEPS)
        whole = ["r0", "r1", "r2"]
        assert rosters(job) == [whole, ["r0", "r1"], whole], "one stall, and one return"
        assert job.starts == {"r0": 1, "r1": 1, "r2": 1}


def test_members_do_not_wait_for_the_state_of_a_newcomer_that_loses_large_packets(zygote, tmp_path):
    """Without replay the others stand still while r2 fetches its state, at most FABRIC_EXCHANGE_S."""
    environment = {"TINY_STEPS": str(STEPS), "TINY_STEP_S": "0.05", "TINY_WIDTH": "1024"}
    environment |= {"FABRIC_DIGEST_EVERY": "drift", "FABRIC_EXCHANGE_S": "900"}
    with (
        Cable() as cable,
        Job(zygote, tmp_path, environment=environment, bind=ADDRESSES[0], network=cable.names[0]) as job,
    ):
        start_on_two_hosts(job, cable)
        job.wait_for(lambda: last_step(job, "r2") >= 2, "the first steps")
        job.kill("r2")
        goes_on_without_r2(job)
        more = {"TEST_NETNS": cable.names[1], "FABRIC_BIND": ADDRESSES[1]}
        job.start("r2", f"fetch=wait:{job.folder}/fetch", **more)
        job.wait_for((job.folder / "fetch.awaited").exists, "the others to wait for r2's state")
        assert rosters(job)[-1] == ["r0", "r1", "r2"]
        cable.lose_large()
        (job.folder / "fetch").touch()
        goes_on_without_r2(job)
        why = job.events("r0", "epoch")[-1]["reason"]
        assert why == "r2 evicted: it and r0, r1 cannot exchange messages of 16384 bytes"
        for side in (0, 1):
            cable.lose_nothing(side)
        has_r2_again(job)
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()


def test_hosts_of_one_name_train_together_without_an_advertised_address(zygote, tmp_path):
    """Both hosts have this machine's name, which names neither of them, as after a clone."""
    with Cable() as cable:
        given = {"TINY_STEPS": "20", "FABRIC_BIND": "0.0.0.0"}
        with Job(zygote, tmp_path, 2, environment=given, bind=ADDRESSES[0], network=cable.names[0]) as job:
            for replica, name in zip(("r0", "r1"), cable.names, strict=True):
                job.start(replica, TEST_NETNS=name)
            job.finish()
            assert set(job.codes.values()) == {0} and set(job.starts.values()) == {1}, job.logs()
            assert rosters(job) == [["r0", "r1"]], "they trained together from the first step on"
            assert links(job, "r0") == links(job, "r1") == ("tcp", "tcp")
