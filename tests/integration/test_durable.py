"""Jobs write durable checkpoints while they train, and begin again from them without memory."""

import json
import os
import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from job import SHORT_CONTACT, Job
from rank_job import RankJob
from safetensors.torch import load
from sharded_trainer import example
from tiny_trainer import build

from fabric.ckpt_server.durable.reader import DurableCheckpoint, list_checkpoints
from fabric.ckpt_server.durable.storage import Storage
from fabric.ckpt_server.reading import DurableState
from fabric.ckpt_server.state.training_state import capture

STEPS = 30


@pytest.fixture
def job(zygote, tmp_path):
    environment = {
        "FABRIC_DURABLE": str(tmp_path / "durable"),
        "FABRIC_DURABLE_EVERY": "10",
        "FABRIC_SNAPSHOT_EVERY": "0%",
        "TINY_STEPS": str(STEPS),
    }
    with Job(zygote, tmp_path / "job", environment=environment) as started:
        yield started


def durable(job: Job) -> list[DurableCheckpoint]:
    return list(list_checkpoints(Storage(job.environment["FABRIC_DURABLE"]).at("test"), "test").complete)


def wait_for_step(job: Job, step: int) -> None:
    job.wait_for(
        lambda: any(c.state.step >= step for c in durable(job)), f"a durable checkpoint of step {step}", 120
    )


def write_some(job: Job) -> None:
    """Train until the checkpoints of steps 10 and 20 are complete; all replicas stop at step 25."""
    job.start_all({"r0": ",".join(f"optimizer@{at}=wait:{job.folder}/go{at}" for at in (14, 24))})
    wait_for_step(job, 10)
    (job.folder / "go14").touch()
    wait_for_step(job, 20)


def kill_everything(job: Job) -> None:
    """Kill all trainers, all checkpoint servers and their child processes."""
    for replica in job.pids:
        job.kill(replica)
    for pid in job.server_pids():
        os.kill(pid, signal.SIGKILL)
    job.wait_for(lambda: not job.server_pids(), "the servers' end")
    job.wait_for(lambda: all(job.ended(r) is not None for r in job.pids), "the trainers' end")


def states(job: Job, replica: str) -> dict[int, str]:
    """Return step -> digest of the state at this replica's last visit of the step."""
    return {e["step"]: e["digest"] for e in job.events(replica, "state")}


def load_with_torch(folder: str) -> dict:
    """Load a checkpoint of the tiny trainer with plain torch."""
    model, optimizer, scheduler = build(64)
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()  # one step, so that the optimizer has state to load into
    objects = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    wanted = {name: x.state_dict() for name, x in objects.items()}
    dcp.load(wanted, checkpoint_id=folder, no_dist=True)
    for name, x in objects.items():
        x.load_state_dict(wanted[name])
    return objects


def test_plain_torch_reads_it_and_when_everything_is_killed_the_job_resumes_from_it(job):
    job.start_all({"r0": f"optimizer@14=wait:{job.folder}/go"})
    wait_for_step(job, 10)
    newest = durable(job)[-1]
    before = states(job, "r0")
    assert newest.state.digest == before[10] == states(job, "r2")[10]
    assert capture(load_with_torch(newest.storage.url), 10).digest() == before[10]
    kill_everything(job)
    job.start_all()
    job.finish()
    assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
    joins = [job.events(r, "join")[0] for r in job.pids]
    assert [(j["step"], list(j["sources"])) for j in joins] == [(10, [newest.storage.url])] * 3
    assert len({states(job, r)[STEPS] for r in job.pids}) == 1
    job.wait_for(lambda: not job.server_pids(), "the servers' end, which let the writer finish")
    final = durable(job)[-1].state
    assert (final.generation, final.step, final.digest) == (2, STEPS, states(job, "r0")[STEPS])


@pytest.mark.parametrize("trainers", [("device_trainer", "tiny_trainer"), ("tiny_trainer", "device_trainer")])
def test_a_job_resumes_on_another_kind_of_device(job, trainers):
    """A device makes other digests than the host. Each can read the other's states, and verifies them."""
    job.environment |= {"TEST_TRAINER": trainers[0], "FABRIC_DIGEST_EVERY": "1"}
    job.start_all({"r0": f"optimizer@14=wait:{job.folder}/go"})
    wait_for_step(job, 10)
    newest = durable(job)[-1]
    before = states(job, "r0")
    assert newest.state.digest == before[10] == states(job, "r2")[10]
    assert (capture(load_with_torch(newest.storage.url), 10).digest() == before[10]) == (
        trainers[0] == "tiny_trainer"
    )
    kill_everything(job)
    job.environment["TEST_TRAINER"] = trainers[1]
    job.start_all({"r1": "optimizer@12=kill"})
    job.finish()
    assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
    assert [job.events(r, "join")[0]["step"] for r in job.pids] == [10] * 3
    assert states(job, "r0")[10] == states(job, "r1")[10] != before[10]
    assert len({states(job, r)[STEPS] for r in job.pids}) == 1


@pytest.mark.long("sim/test_durable_worlds.py")
def test_a_damaged_checkpoint_is_named_and_all_replicas_load_an_older_one(job):
    write_some(job)
    kill_everything(job)
    older, newest = durable(job)[-2:]
    data = Path(newest.storage.url) / "__0_0.distcp"
    lane = json.loads((Path(newest.storage.url) / "fabric-0.json").read_text())
    _, begin, _ = next(s for s in lane["segments"] if s[0] == data.name)
    content = bytearray(data.read_bytes())
    content[begin] ^= 1
    data.write_bytes(content)
    job.start_all()
    job.finish()
    assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
    for replica in job.pids:
        assert job.events(replica, "join")[0]["step"] == older.state.step
    reasons = [e["reason"] for e in job.events("r0", "epoch")]
    assert any(f"{data} is damaged" in reason for reason in reasons), reasons


def away(tmp_path: Path, **more: str) -> dict[str, str]:
    """The environment of a job whose storage cannot be listed while its mount point is a file."""
    place = str(tmp_path / "mount" / "durable")
    return {"FABRIC_DURABLE": place, "FABRIC_DURABLE_EVERY": "1000", "FABRIC_SNAPSHOT_EVERY": "0%", **more}


def test_a_replica_comes_in_from_its_peers_while_storage_cannot_be_listed(zygote, tmp_path):
    environment = away(tmp_path, TINY_STEPS="28", TINY_PATIENT_STEPS="16")
    with Job(zygote, tmp_path / "job", replicas=2, environment=environment) as job:
        job.start_all({"r1": "optimizer@10=kill"})
        job.wait_for(lambda: job.ended("r1") is not None, "the death of r1")
        (tmp_path / "mount").rename(tmp_path / "elsewhere")
        (tmp_path / "mount").touch()
        (job.folder / "r1.log").unlink()
        job.finish()
        assert job.codes == {"r0": 0, "r1": 0}, job.logs()
        (said,) = job.said("r1").splitlines()
        assert said.startswith(f"fabric: r1: {environment['FABRIC_DURABLE']}/test could not be listed: "), (
            said
        )
        assert said.endswith(": it is read later, because other replicas hold the job's state"), said
        assert all(url.startswith("http://") for url in job.events("r1", "join")[0]["sources"])
        assert states(job, "r0")[28] == states(job, "r1")[28]


def test_a_replica_waits_for_storage_when_no_peer_holds_the_state(zygote, tmp_path):
    (tmp_path / "mount").touch()
    environment = away(tmp_path, TINY_STEPS="3")
    with Job(zygote, tmp_path / "job", replicas=1, environment=environment) as job:
        job.start("r0", **SHORT_CONTACT)
        job.wait_for(lambda: job.ended("r0") is not None, "the end of who found no storage")
        assert job.ended("r0") == 75, job.logs()
        waits, ended = job.said("r0").splitlines()
        assert waits.endswith(
            "this replica waits for it, up to 1 s, because no member holds the job's state"
        ), waits
        assert "for 1 s, and no member of the job holds its state: mend the storage" in ended, ended
        job.wait_for(lambda: not job.server_pids(), "the end of the checkpoint server")
        job.start("r0")
        job.wait_for(
            lambda: "this replica waits for it, up to 60 s" in job.said("r0"), "r0 to wait for storage"
        )
        (tmp_path / "mount").unlink()
        job.finish()
        assert job.codes == {"r0": 0}, job.logs()


@pytest.mark.long("sim/test_durable_worlds.py")
def test_another_member_writes_checkpoints_after_the_writers_death(job):
    job.start_all(
        {
            "r0": f"optimizer@12=wait:{job.folder}/go12,ring@13=kill",
            "r1": f"optimizer@24=wait:{job.folder}/go",
        }
    )
    wait_for_step(job, 10)
    (job.folder / "go12").touch()
    wait_for_step(job, 20)
    written = {c.state.step: c.manifest["replica"] for c in durable(job)}
    assert (written[10], written[20]) == ("r0", "r1")
    (job.folder / "go").touch()
    job.finish()
    assert job.codes == {"r0": 0, "r1": 0, "r2": 0}, job.logs()
    assert durable(job)[-1].state.step == STEPS, "the last state is in storage when the job has ended"


def test_the_ranks_of_a_replica_write_one_checkpoint_and_begin_again_from_it(zygote, tmp_path):
    environment = {
        "FABRIC_DURABLE": str(tmp_path / "durable"),
        "FABRIC_DURABLE_EVERY": "6",
        "FABRIC_SNAPSHOT_EVERY": "0%",
        "SHARDED": "fsdp2",
        "TINY_STEPS": "12",
    }
    with RankJob(zygote, tmp_path / "job", replicas=1, ranks=2, environment=environment) as job:
        job.start("r0", f"optimizer@8=wait:{job.folder}/go", rank=1)
        wait_for_step(job, 6)
        for rank in (0, 1):
            job.kill_rank("r0", rank)
        for pid in job.server_pids():
            os.kill(pid, signal.SIGKILL)
        job.wait_for(lambda: job.has_ended("r0") and not job.server_pids(), "the end of everything")
        found = durable(job)[-1]
        assert found.ranks == 2
        whole = example("fsdp2").build()
        wanted = {"model": whole.state_dict()}
        dcp.load(wanted, checkpoint_id=found.storage.url, no_dist=True)
        parts = []
        for rank in (0, 1):
            with closing(DurableState("durable", found, rank)) as part:
                parts.append(load(bytes(part.read(0, part.nbytes))))
        for name, tensor in wanted["model"].items():
            assert torch.equal(tensor, torch.cat([part[f"model/{name}"] for part in parts])), name
        job.start("r0")
        job.finish()
        assert set(job.codes.values()) == {0}, job.logs()
        for rank in (0, 1):
            lines = job.journal("r0", rank).read_text().splitlines()
            joined = [e for e in map(json.loads, lines) if e["event"] == "join"]
            assert [(e["step"], list(e["sources"])) for e in joined] == [(6, [found.storage.url])]


@pytest.mark.long("sim/test_durable_worlds.py")
def test_servers_that_die_while_members_wait_for_a_cold_start_make_no_checkpoint_unusable(job):
    job.replicas = 2
    write_some(job)
    kill_everything(job)
    gates = {replica: job.folder / f"{replica}.fetch" for replica in job.pids}
    for replica, gate in gates.items():
        job.start(replica, f"fetch=wait:{gate}")
    awaited = [gate.with_name(f"{gate.name}.awaited") for gate in gates.values()]
    job.wait_for(lambda: all(path.exists() for path in awaited), "everybody to be about to fetch")
    servers = job.server_pids()
    for pid in servers:
        os.kill(pid, signal.SIGKILL)
    job.wait_for(lambda: not job.server_pids(), "the servers' end")
    for gate in gates.values():
        gate.touch()
    job.finish(restart=False)
    assert set(job.codes.values()) == {0}, job.logs()
    for replica in gates:
        steps = [e["step"] for e in job.events(replica, "commit") if e["generation"] > 1]
        assert sorted(set(steps)) == list(range(20, STEPS)), replica


class Mount:
    """A folder for storage that can be taken away: then each access fails, as on a broken mount."""

    def __init__(self, folder: Path) -> None:
        self.place, self._kept = folder / "mount", folder / "kept"
        self._kept.mkdir()
        self.place.symlink_to(self.place)

    def give(self) -> None:
        self.place.unlink()
        self._kept.rename(self.place)

    def take(self) -> None:
        self.place.rename(self._kept)
        self.place.symlink_to(self.place)


def test_storage_that_goes_away_at_any_moment_of_a_jobs_life_costs_nothing_and_needs_no_person(
    zygote, tmp_path
):
    """Away at a start, in a write, at a marker, at the load of a checkpoint, and at the last checkpoint."""
    mount = Mount(tmp_path)
    environment = {
        "FABRIC_DURABLE": str(mount.place / "durable"),
        "FABRIC_DURABLE_EVERY": "10",
        "FABRIC_SNAPSHOT_EVERY": "0%",
        "TINY_STEPS": "30",
    }
    with Job(zygote, tmp_path / "job", replicas=2, environment=environment) as job:

        def gate(name: str) -> str:
            return f"wait:{job.folder}/{name}"

        def has_log(text: str) -> bool:
            return text in (job.folder / "run" / "r0" / "ckpt-server.log").read_text()

        def interrupt(name: str, step: int) -> None:
            """Take storage away while the writer stands at ``name``, until its try has failed."""
            job.wait_for((job.folder / f"{name}.awaited").exists, f"the writer at {name}")
            mount.take()
            (job.folder / name).touch()
            job.wait_for(lambda: has_log(f"the durable checkpoint of step {step}: "), "a failed try")

        writes = f"durable-data@10={gate('data')},durable-marker@20={gate('marker')}"
        steps = f"optimizer@12={gate('go12')},optimizer@22={gate('go22')}"
        job.start_all({"r0": f"{writes},{steps}"})
        job.wait_for(lambda: all("waits for it" in job.said(r) for r in job.pids), "replicas that wait")
        mount.give()
        interrupt("data", 10)
        mount.give()
        wait_for_step(job, 10)
        (job.folder / "go12").touch()
        interrupt("marker", 20)
        mount.give()
        wait_for_step(job, 20)
        kill_everything(job)
        for replica in job.pids:
            job.start(replica, f"fetch={gate(f'{replica}.fetch')},durable-data@30={gate('last')}")
        for replica in job.pids:
            job.wait_for((job.folder / f"{replica}.fetch.awaited").exists, "a fetch")
        mount.take()
        for replica in job.pids:
            (job.folder / f"{replica}.fetch").touch()
        job.wait_for(lambda: all("tries again" in job.said(r) for r in job.pids), "reads that failed")
        mount.give()
        interrupt("last", 30)
        job.wait_for(lambda: any("waits for its last durable" in job.said(r) for r in job.pids), "a wait")
        mount.give()
        job.finish()
        wait_for_step(job, 30)
        job.wait_for(lambda: not job.server_pids(), "the servers' end")
        assert job.codes == {"r0": 0, "r1": 0} and set(job.starts.values()) == {2}, job.logs()
        for replica in job.pids:
            commits = [e["step"] for e in job.events(replica, "commit") if e["generation"] > 1]
            assert commits == list(range(20, 30)), "no step since the last checkpoint is lost"
        assert durable(job)[-1].state.digest == states(job, "r0")[30] == states(job, "r1")[30]
