"""Replicas of several real processes: one rank dies, its replica goes and returns, the lanes stay equal.

The surviving replica's losses equal those of one process that trains alone on the same data.
"""

import functools
import os
import re
import signal

import pytest
from alone import losses_alone
from long_runs import first_here
from rank_job import RankJob
from sharded_trainer import example

STEPS = 24
GLOBAL_BATCH = 16


def losses(job: RankJob, replica: str) -> list[float]:
    lines = (job.folder / f"{replica}.0.log").read_text().splitlines()
    found = [line.split() for line in lines if line.startswith("loss ")]
    assert [int(words[1]) for words in found] == list(range(len(found)))
    return [float(words[2]) for words in found]


@pytest.mark.parametrize(
    ("way", "ranks", "point", "victim"),
    first_here(
        "sim/test_rank_worlds.py",
        [
            ("fsdp2", 2, "ring@6=kill", 1),
            ("fsdp2", 2, "optimizer@6=kill", 0),
            ("fsdp2_tensor_parallel", 4, "forward@6=kill", 3),
            ("pipeline", 2, "after-barrier@6=kill", 1),
        ],
    ),
)
def test_a_rank_is_killed_and_its_replica_joins_again(zygote, tmp_path, way, ranks, point, victim):
    environment = {"SHARDED": way, "TINY_STEPS": str(STEPS), "TINY_PATIENT_STEPS": "16"}
    with RankJob(zygote, tmp_path, replicas=2, ranks=ranks, environment=environment) as job:
        job.start("r0")
        job.start("r1", point, rank=victim)
        job.finish(deadline_s=120)
        assert set(job.codes.values()) == {0}, job.logs()
        assert job.starts == {"r0": 1, "r1": 2}, job.logs()
        again = [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > 8]
        assert again, f"the killed replica never contributed again\n{job.logs()}"
        job.check_lanes(STEPS)
        alone = losses_alone(example("fsdp2").build(), STEPS, GLOBAL_BATCH, clip=0.5)
        assert losses(job, "r0") == pytest.approx(alone, rel=1e-4)


def test_ranks_with_devices_digest_their_parts_there(zygote, tmp_path):
    """The manifest of a part has two digests. Members know its state by the one that the device makes."""
    environment = {"SHARDED": "fsdp2", "TINY_STEPS": "20", "TINY_PATIENT_STEPS": "12"}
    environment |= {"TEST_TRAINER": "device_sharded_trainer", "FABRIC_DIGEST_EVERY": "1"}
    with RankJob(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start("r0")
        job.start("r1", "optimizer@6=kill", rank=1)
        job.finish(deadline_s=120)
        assert set(job.codes.values()) == {0}, job.logs()
        assert job.starts == {"r0": 1, "r1": 2}, job.logs()
        assert job.logs().count("gradients on SimulatedDevice") == 6
        job.check_lanes(20)


@pytest.fixture(scope="module")
def digests(zygote, tmp_path_factory):
    """The digests at the end of a job with this overlap, by rank. Jobs of several tests run once."""

    @functools.cache
    def run(overlap: str, sharded: str, ranks: int, exchange: str) -> list[str]:
        environment = {"SHARDED": sharded, "TINY_STEPS": "8", "SHARDED_OVERLAP": overlap}
        environment |= {"FABRIC_EXCHANGE": exchange, "FABRIC_DATA_PLANE": "tcp"}
        folder = tmp_path_factory.mktemp("overlap")
        with RankJob(zygote, folder, replicas=2, ranks=ranks, environment=environment) as job:
            job.start("r0")
            job.start("r1")
            job.finish(restart=False, deadline_s=120)
            assert set(job.codes.values()) == {0}, job.logs()
            job.check_lanes(8)
            lines = {name: (job.folder / f"{name}.log").read_text().splitlines() for name in job.pids}
            overlapped = [[x for x in found if x.startswith("overlapped")] for found in lines.values()]
            if overlap in ("proven", "handed over"):
                assert all(len(x) >= 7 and set(x) == {"overlapped True"} for x in overlapped), overlapped
            aborts = [e for e in job.events("r0", "abort") if "changed after the last backward" in e["why"]]
            assert [e["step"] for e in aborts] == ([3] if overlap == "changed@3" else [])
            return [
                job.rank_events(replica, rank, "state")[-1]["digest"]
                for replica in ("r0", "r1")
                for rank in range(ranks)
            ]

    return run


@pytest.mark.parametrize(
    ("way", "sharded", "ranks", "exchange"),
    [
        ("proven", "fsdp2", 2, "float32"),
        ("proven", "fsdp2", 2, "int8"),
        ("handed over", "pipeline", 2, "float32"),
        ("changed@3", "fsdp2", 2, "float32"),
        pytest.param(
            *("handed over", "fsdp2_tensor_parallel", 4, "float32"),
            marks=pytest.mark.long("integration/test_ranks.py"),
        ),
    ],
)
def test_sharded_gradients_end_with_equal_bits_with_and_without_overlap(
    digests, way, sharded, ranks, exchange
):
    assert digests(way, sharded, ranks, exchange) == digests("off", sharded, ranks, exchange)


@pytest.mark.parametrize(
    ("point", "victim"),
    first_here(
        "protocol/test_host_voice.py", [("ring@6=kill", 2), ("forward@6=kill", 3), ("ring@6=kill", 0)]
    ),
)
def test_a_rank_of_another_host_is_killed_also_the_voice_of_its_host(zygote, tmp_path, point, victim):
    """Two hosts of two ranks: rank 2 speaks for rank 3."""
    environment = {"SHARDED": "fsdp2", "TINY_STEPS": "18", "TINY_PATIENT_STEPS": "11"}
    with RankJob(zygote, tmp_path, 2, ranks=4, environment=environment, per_host=2) as job:
        job.start("r0")
        job.start("r1", point, rank=victim)
        job.finish(deadline_s=120)
        assert set(job.codes.values()) == {0}, job.logs()
        assert job.starts == {"r0": 1, "r1": 2}, job.logs()
        for rank in {0, 1, 2, 3} - {victim}:
            (stop,) = job.rank_events("r1", rank, "stop")
            assert stop["code"] == 75
            assert stop["reason"].startswith(f"rank {victim} of this replica is lost ("), (rank, stop)
        job.check_lanes(18)


@pytest.mark.parametrize(
    ("way", "ranks", "raises"),
    first_here(
        "protocol/test_rank_orders.py",
        [("fsdp2", 2, 1), ("pipeline", 2, 0), ("fsdp2", 4, 2), ("fsdp2", 4, 3)],
    ),
)
def test_an_exception_at_one_rank_fails_the_job(zygote, tmp_path, way, ranks, raises):
    """The other rank of its replica is stuck in a collective with it, and a rank of the other replica in user
    code that does not end; all ranks of all replicas are told. Four ranks are on two hosts."""
    environment = {"SHARDED": way, "TINY_STEPS": str(STEPS)}
    per_host = 2 if ranks == 4 else 0
    with RankJob(zygote, tmp_path, 2, ranks=ranks, environment=environment, per_host=per_host) as job:
        job.start("r0", f"forward@5=wait:{job.folder / 'never'}", rank=1)
        job.start("r1", SHARDED_RAISES=f"{raises}@5")
        job.finish(restart=False, deadline_s=120)
        assert set(job.codes.values()) == {1}, job.logs()
        where = f"rank {raises}: " if raises else ""
        why = rf"r1 failed at step 5: {where}ValueError: the user's own mistake \(at micro-batch "
        for name in job.pids:
            said = job.said(name)
            if name == f"r1.{raises}":
                assert said.count("ValueError: the user's own mistake\n") == 1, said
            else:
                lines = [line for line in said.splitlines() if line.startswith("fabric: ")]
                assert len(lines) == 1 and re.search(why, lines[0]), said
        assert max(e["step"] for e in job.events("r0", "commit")) == 4


def test_a_killed_server_takes_no_rank_with_it_and_is_started_once_for_all_ranks(zygote, tmp_path):
    environment = {"SHARDED": "fsdp2", "TINY_STEPS": str(STEPS), "FABRIC_SNAPSHOT_EVERY": "2"}
    gate, end = tmp_path / "gate", tmp_path / "end"

    def servers_of(replica: str) -> dict[int, str]:
        """The addresses of the ranks' servers that hold a state."""
        listed = [x for x in job.status()["checkpoint_servers"] if x["replica"] == replica]
        return {x["rank"]: x["ckpt"] for x in listed if x["connected"] and x["snapshots"]}

    with RankJob(zygote, tmp_path, replicas=2, ranks=2, environment=environment) as job:
        job.start("r0", f"optimizer@10=wait:{gate},optimizer@20=wait:{end}")
        job.start("r1")
        job.wait_for(gate.with_name("gate.awaited").exists, "step 10")
        job.wait_for(lambda: len(servers_of("r1")) == 2, "snapshots of both ranks")
        before = servers_of("r1")
        assert before[1] == f"{before[0]}/ranks/1#1"
        assert len(job.server_pids()) == 2, "one for each replica"
        killed = int((tmp_path / "run" / "r1" / "ckpt.lock").read_text())
        os.kill(killed, signal.SIGKILL)
        job.wait_for(lambda: not servers_of("r1"), "the lighthouse to lose both ranks' states")
        gate.touch()
        job.wait_for(end.with_name("end.awaited").exists, "step 20")
        job.wait_for(lambda: len(servers_of("r1")) == 2, "new snapshots of both ranks")
        after = servers_of("r1")
        assert after[0] != before[0] and after[1] == f"{after[0]}/ranks/1#1"
        assert len(job.server_pids()) == 2 and killed not in job.server_pids()
        end.touch()
        job.finish(deadline_s=120)
        assert set(job.codes.values()) == {0}, job.logs()
        assert job.starts == {"r0": 1, "r1": 1}, job.logs()
        job.check_lanes(STEPS)


@pytest.mark.parametrize(
    ("way", "words"),
    [
        ("alone", "trains a model of its own"),
        ("diloco", "trains a model of its own"),
        ("waits", "a backward pass has left its gradient at one rank"),
    ],
)
def test_ranks_that_do_not_average_their_gradients_are_refused(zygote, tmp_path, way, words):
    environment = {"TEST_TRAINER": "own_gradients_trainer", "TEST_WAY": way}
    with RankJob(zygote, tmp_path, replicas=2, environment=environment) as job:
        job.start("r0")
        job.start("r1")
        job.finish(restart=False, deadline_s=120)
        assert set(job.codes.values()) == {1}, job.logs()
        assert all(words in job.said(name) for name in job.pids), job.logs()
