"""Whole jobs on every data plane: the default choice, and failures in the midst of an exchange."""

import os
import signal
from urllib.error import HTTPError
from urllib.parse import urlsplit

import pytest
from job import Job
from long_runs import first_here
from test_failures import finish_and_check

pytestmark = pytest.mark.integration
PORTS = range(23100, 23200)  # outside the range from which the kernel gives ports


def planes(job: Job, replica: str, epoch: int) -> set[tuple[str, str]]:
    """Return the transports of ``replica``'s links in ``epoch``, as (next, previous)."""
    found = [e for e in job.events(replica, "plane") if e["epoch"] == epoch]
    return {(e["next"], e["previous"]) for e in found if "next" in e}


def server_port(job: Job, replica: str) -> int:
    """Return the port of the replica's checkpoint server, or 0 before it is a member."""
    try:
        members = job.status()["members"]
    except HTTPError:
        return 0  # the lighthouse does not know the job yet
    return next((urlsplit(m["ckpt"]).port for m in members if m["replica"] == replica and m["ckpt"]), 0)


def settled(job: Job) -> int:
    """Return the last epoch with all three replicas."""
    return max(e["epoch"] for e in job.events("r0", "epoch") if len(e["roster"]) == job.replicas)


@pytest.mark.long("integration/test_planes.py")
def test_members_on_one_host_share_memory_by_themselves_and_survive_a_kill_in_the_ring(zygote, tmp_path):
    with Job(zygote, tmp_path) as job:
        job.start_all({"r1": "ring@12=kill"})
        finish_and_check(job)
        assert settled(job) > 1
        for replica in ("r0", "r1", "r2"):
            assert planes(job, replica, settled(job)) == {("shm", "shm")}
        assert planes(job, "r0", 1) == {("shm", "shm")}


@pytest.mark.parametrize("exchange", first_here("integration/test_outer_steps.py", ["bfloat16", "int8"]))
def test_replicas_in_fewer_bytes_end_in_equal_states_after_a_kill_in_the_ring(zygote, tmp_path, exchange):
    """r2 is set to TCP: two links carry fewer bytes, and the third one shares memory."""
    with Job(zygote, tmp_path, environment={"FABRIC_EXCHANGE": exchange}) as job:
        job.start("r0")
        job.start("r1", points="ring@12=kill")
        job.start("r2", FABRIC_DATA_PLANE="tcp")
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}, job.logs()
        assert {side for pair in planes(job, "r2", settled(job)) for side in pair} == {"tcp"}


def test_a_replica_of_another_exchange_type_is_refused_by_name(zygote, tmp_path):
    with Job(zygote, tmp_path, replicas=1, environment={"TINY_STEPS": "100000"}) as job:
        job.start("r0")
        job.wait_for(lambda: server_port(job, "r0"), "r0 to be a member")
        job.start("r1", FABRIC_EXCHANGE="int8")
        job.wait_for(lambda: job.ended("r1") is not None, "the end of r1")
        assert job.ended("r1") == 1, job.logs()
        assert "(FABRIC_EXCHANGE is int8 here and float32 there)" in job.said("r1")


@pytest.mark.parametrize("action", first_here("integration/test_drill.py", ["kill", "stop"]))
def test_a_ring_may_be_mixed_and_loses_a_member_in_the_midst_of_an_exchange(zygote, tmp_path, action):
    """r2 is set to TCP, so its two links use TCP, and the link between r0 and r1 uses shared memory."""
    with Job(zygote, tmp_path) as job:
        job.start("r0")
        job.start("r1", points=f"ring@12={action}")
        job.start("r2", FABRIC_DATA_PLANE="tcp", FABRIC_BIND=f"127.0.0.1:{PORTS[0]}-{PORTS[-1]}")
        found = []
        job.wait_for(lambda: found.append(server_port(job, "r2")) or found[-1], "r2 to be a member")
        assert found[-1] in PORTS
        if action == "stop":
            job.wait_for(
                lambda: any("r1" not in e["roster"] for e in job.events("r0", "epoch")),
                "the eviction of the stopped replica",
            )
            os.kill(job.pids["r1"], signal.SIGCONT)
        finish_and_check(job)
        sides = [side for r in ("r0", "r1", "r2") for pair in planes(job, r, settled(job)) for side in pair]
        assert sorted(sides) == ["shm", "shm", "tcp", "tcp", "tcp", "tcp"]
