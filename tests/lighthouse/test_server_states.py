"""The lighthouse's sentences about silent checkpoint servers of living trainers, and about failing durable
checkpoints.
"""

import pytest
from protocol.test_leader import Lighthouse, started

from fabric.lighthouse.diagnosis.status_text import SILENT_S, CheckpointServers, silence, waiting_for
from fabric.model import SnapshotRef
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m


class Looking:
    """A job in virtual time, whose checkpoint servers the watch examines every quarter of a second."""

    def __init__(self, lighthouse: Lighthouse) -> None:
        self.lighthouse = lighthouse
        self.servers = CheckpointServers()
        self.noted: list[tuple[str, str, str]] = []

    def look(self) -> None:
        core, now = self.lighthouse.core, self.lighthouse.now
        self.servers.look(core, now, lambda *event: self.noted.append(event))

    def wait(self, seconds: float) -> None:
        until = self.lighthouse.now + seconds
        while self.lighthouse.now < until:
            self.lighthouse.wait(0.25)
            self.lighthouse.do(*self.lighthouse.statuses.values())
            for name in self.lighthouse.record.names:
                self.lighthouse.beat(name, 5)
            self.look()

    def says(self, name: str) -> str:
        member = self.lighthouse.record.member(name)
        return silence(self.lighthouse.core.state.liveness, member, self.lighthouse.now)


@pytest.fixture
def job():
    return Looking(started("a b"))


def test_a_silent_server_of_a_living_trainer_is_reported_once_and_so_is_its_return(job):
    job.wait(SILENT_S + 5)
    assert job.noted == [] and job.says("a") == ""
    status = job.lighthouse.statuses.pop("a")
    job.wait(SILENT_S - 1)
    assert job.noted == []
    job.wait(20)
    said = f"its checkpoint server has not answered for {SILENT_S:.0f} s"
    assert job.noted == [("server silent", "a", said)]
    assert job.says("a").startswith("its checkpoint server has not answered for 2") and job.says("b") == ""
    assert job.servers.silent == {"a"} and job.lighthouse.record.names == ("a", "b")
    job.lighthouse.statuses["a"] = status
    job.wait(1)
    assert job.noted[1:] == [("server heard", "a", "its checkpoint server answers again")]
    assert job.says("a") == "" and job.servers.silent == set()


def test_a_silent_server_of_a_dead_trainer_is_a_death_and_nothing_else(job):
    job.lighthouse.lose("a")
    job.lighthouse.wait(20)
    job.look()
    assert job.lighthouse.record.names == ("b",) and job.noted == []


def test_the_waiting_sentence_mentions_a_silent_server(job):
    job.lighthouse.statuses.pop("a")
    job.wait(SILENT_S + 2)
    late = m.Heartbeat(2, job.lighthouse.record.epoch, 1, 5, waiting_for=("a",))
    job.lighthouse.say("b", late)
    for _ in range(8):
        job.lighthouse.wait(0.25)
        job.lighthouse.beat("a", 5)
        job.lighthouse.say("b", late)
    said = waiting_for(job.lighthouse.core, job.lighthouse.now)
    assert said.startswith("a, in user code") and "its checkpoint server has not answered for" in said


def durable(job: Looking, name: str, *steps: int, error: str = "") -> None:
    """Make a status with its complete checkpoints and the error of its last checkpoint."""
    refs = tuple(SnapshotRef(1, step, f"d{step}") for step in steps)
    status = m.TrainerStatus(name, 1, "running", 1, f"http://{name}", durable=refs, durable_error=error)
    job.lighthouse.statuses[name] = io.TrainerStatusSeen(status)
    job.lighthouse.do(job.lighthouse.statuses[name])
    job.look()


def test_storage_that_takes_nothing_is_failing_until_anybody_has_written_a_checkpoint(job):
    assert job.servers.failing == {}
    durable(job, "a", error="step 10: no space left")
    assert job.servers.failing == {"a": "step 10: no space left"}
    durable(job, "a", error="step 20: no space left")
    assert job.servers.failing == {"a": "step 20: no space left"}
    # The first writer died; when the next replica writes a checkpoint, the first writer's error is over.
    durable(job, "b", 30)
    assert job.servers.failing == {}
    durable(job, "b", 30, error="step 40: no space left")
    assert job.servers.failing == {"b": "step 40: no space left"}
    durable(job, "b", 30, 50)
    assert job.servers.failing == {}
