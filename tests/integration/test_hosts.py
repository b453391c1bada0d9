"""A replica of two hosts with networks of their own, under ``fabric launch``: one host is lost."""

import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from alone import losses_alone
from forked_processes import NETWORK, enter_network, start_supervisor
from job import HERE, SEARCH_PATH
from layout_trainer import GLOBAL_BATCH, build
from long_runs import first_here
from namespaces import ADDRESSES, Cable
from test_launched_jobs import LaunchedJob

PROBLEM = Cable.problem()
STEPS = 40
HELD_AT = 6

pytestmark = pytest.mark.skipif(bool(PROBLEM), reason=PROBLEM)


class Hosts:
    """The hosts of replica r1, each with a launcher and a folder of its own, on one side of the cable.

    A benchmark that measures how long a process takes to import its modules starts them by ``exec``.
    """

    def __init__(self, job: LaunchedJob, cable: Cable, forked: bool = True) -> None:
        self.job, self.cable, self.forked = job, cable, forked

    def start(self, host: str, side: int, *options: str, **more: str) -> None:
        own = {
            NETWORK: self.cable.names[side],
            "FABRIC_BIND": ADDRESSES[side],
            "FABRIC_RUN_DIR": str(self.job.folder / "run" / host),
            "GLOO_SOCKET_IFNAME": "cable",
            "LAUNCHED_NOTES": str(self.job.folder / "r1.notes"),
            "PYTHONPATH": SEARCH_PATH,
            "OMP_NUM_THREADS": "1",
            **more,
        }
        ranks = str(self.job.ranks // 2)
        program = ["launch", "--nodes", "2", "--ranks", ranks, *options, str(HERE / self.job.trainer)]
        environment = {**os.environ, **self.job.trainer_environment("r1", **own)}
        with (self.job.folder / f"{host}.log").open("ab") as log:
            if self.forked:
                self.job.launchers[host] = start_supervisor(*program, log=log, environment=environment)
                return
            inside = ["ip", "netns", "exec", self.cable.names[side], sys.executable, "-m", "fabric.cli.main"]
            self.job.launchers[host] = subprocess.Popen(
                [*inside, *program],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def lose(self, host: str) -> None:
        """Kill everything that runs on this host: its launcher, and its checkpoint server."""
        self.job.launchers[host].kill()
        folder = str(self.job.folder / "run" / host).encode()
        for pid in self.job.server_pids():
            if folder in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(
    ("layout", "lost"), first_here("integration/test_hosts.py", [("tp", "host-0"), ("fsdp", "host-1")])
)
def test_a_spare_host_takes_the_place_of_a_lost_one_and_the_job_loses_no_step(zygote, tmp_path, layout, lost):
    """Rank 0 runs on host-0, and the spare host is on the other side of the cable."""
    environment = {
        "TINY_STEPS": str(STEPS),
        "TINY_PATIENT_STEPS": "30",
        "FABRIC_REPLICAS": "2",
        "SHARDED": layout,
    }
    with (
        Cable() as cable,
        LaunchedJob(
            zygote, tmp_path, 2, ranks=2, environment=environment, bind=ADDRESSES[0], network=cable.names[0]
        ) as job,
    ):
        hosts = Hosts(job, cable)
        job.environment |= {"TEST_NETNS": cable.names[0], "FABRIC_BIND": ADDRESSES[0]}
        job.start("r0", TEST_TRAINER="layout_trainer")
        job.groups["r1"] = ["r1.0", "r1.1"]
        hosts.start("host-0", 0, "--node", "0")
        hosts.start("host-1", 1, "--node", "1")
        hosts.start("host-2", 1, "--node", "spare")
        job.wait_for(lambda: any(e["step"] >= 6 for e in job.events("r1", "commit")), "step 6 of r1")
        hosts.lose(lost)
        codes = job.end_codes()
        ends = {"host-0": 0, "host-1": 0, "host-2": 0, lost: -9}
        assert codes == {"r0.0": 0, "r0.1": 0, **ends}, job.logs()
        again = [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > 12]
        assert again, f"the replica never contributed again\n{job.logs()}"
        job.check_lanes(STEPS)
        assert job.losses("r0") == pytest.approx(
            dict(enumerate(losses_alone(build(), STEPS, GLOBAL_BATCH))), rel=1e-4
        )


# Each fault in one of the two ways; only `make long` has all four pairs.
@pytest.mark.parametrize(
    ("lost", "waits"),
    [
        ("rank", False),
        ("host", True),
        *(
            pytest.param(*pair, marks=pytest.mark.long("integration/test_hosts.py"))
            for pair in (("rank", True), ("host", False))
        ),
    ],
)
def test_healthy_hosts_start_from_their_own_memory_and_only_a_lost_one_fetches(zygote, tmp_path, lost, waits):
    """Every server holds the snapshot of the step in which r1 dies. r0 waits there, or stands two steps on,
    and takes no snapshot."""
    replicas = "2:2" if waits else "2"
    environment = {"TINY_STEPS": "12", "FABRIC_REPLICAS": replicas, "FABRIC_SNAPSHOT_EVERY": str(HELD_AT)}
    begun, held, gate = tmp_path / "begun", tmp_path / "held", tmp_path / "gate"
    with (
        Cable() as cable,
        LaunchedJob(
            zygote, tmp_path, 2, ranks=2, environment=environment, bind=ADDRESSES[0], network=cable.names[0]
        ) as job,
    ):
        hosts = Hosts(job, cable)
        job.environment |= {"TEST_NETNS": cable.names[0], "FABRIC_BIND": ADDRESSES[0]}
        job.start_beside("r0", "" if waits else f"forward@{HELD_AT + 2}=wait:{gate}")
        job.groups["r1"] = ["r1.0", "r1.1"]
        # While the snapshot of step 0 is copied, that of step HELD_AT would be left out.
        points = {"FABRIC_TEST_POINTS": f"forward@1=wait:{begun},before-ring@{HELD_AT}=wait:{held}"}
        hosts.start("host-0", 0, "--node", "0", **points)
        hosts.start("host-1", 1, "--node", "1", **points)
        hosts.start("host-2", 1, "--node", "spare", **points)
        job.wait_for(Path(f"{begun}.awaited").exists, "step 1 of r1")
        job.wait_for(lambda: len(holders(job, cable, 0)) == 4, "snapshots of step 0 in all servers")
        begun.touch()
        job.wait_for(Path(f"{held}.awaited").exists, f"step {HELD_AT} of r1")
        job.wait_for(
            lambda: len(holders(job, cable, HELD_AT)) == 4, f"snapshots of step {HELD_AT} in all servers"
        )
        servers = holders(job, cable, HELD_AT)
        with os.fdopen(os.pidfd_open(job.pid("r1", 1))) as rank:
            if lost == "host":
                hosts.lose("host-1")
            else:
                os.kill(job.pid("r1", 1), signal.SIGKILL)
            job.wait_for(lambda: select.select([rank], [], [], 0)[0], "the end of rank 1, still held")
        held.touch()
        job.wait_for(lambda: len(job.notes("r1")) >= 4, "both ranks of r1 to start again")
        if not waits:
            job.wait_for(
                lambda: any(x["why"] == "r1 joins" for x in within(cable, job.told, "epoch")),
                "r1 to join while r0 stands in its step",
            )
            gate.touch()
        codes = {"r0.0": 0, "r0.1": 0, "host-0": 0, "host-1": -9 if lost == "host" else 0, "host-2": 0}
        assert job.end_codes() == codes, job.logs()  # a spare host that nobody needs leaves a complete job
        joins = [[e for e in job.rank_events("r1", rank, "join") if e["step"] == HELD_AT] for rank in (0, 1)]
        assert list(joins[0][-1]["sources"]) == ["own memory"], joins
        source = servers["r0", 1].partition("#")[0] if lost == "host" else "own memory"
        assert list(joins[1][-1]["sources"]) == [source], joins
        (served,) = within(cable, job.told, "serves")
        # r0 may still be on its way to the step in which it stands.
        gradients = ["0 gradients"] if waits else ["1 gradient", "2 gradients"]
        assert served["why"] in [f"step {HELD_AT} from its own hosts' memory, and {x}" for x in gradients]
        job.check_lanes(12)


def test_a_host_that_is_cut_off_loses_its_place_and_stands_by_when_it_returns(zygote, tmp_path):
    """No process gets an error when the cable is pulled. The spare host is on the side of all others."""
    environment = {"TINY_STEPS": "60", "TINY_PATIENT_STEPS": "50", "FABRIC_REPLICAS": "2", "SHARDED": "tp"}
    with (
        Cable() as cable,
        LaunchedJob(
            zygote, tmp_path, 2, ranks=2, environment=environment, bind=ADDRESSES[0], network=cable.names[0]
        ) as job,
    ):
        hosts = Hosts(job, cable)
        job.environment |= {"TEST_NETNS": cable.names[0], "FABRIC_BIND": ADDRESSES[0]}
        job.start("r0", TEST_TRAINER="layout_trainer")
        job.groups["r1"] = ["r1.0", "r1.1"]
        hosts.start("host-0", 0, "--node", "0")
        hosts.start("host-1", 1, "--node", "1")
        hosts.start("host-2", 0, "--node", "spare")
        job.wait_for(lambda: any(e["step"] >= 6 for e in job.events("r1", "commit")), "step 6 of r1")
        cable.pull()
        job.wait_for(lambda: job.events("r1", "joined"), "r1 to be back without the host")
        cable.plug()
        ends = {"host-0": 0, "host-1": 0, "host-2": 0}
        assert job.end_codes() == {"r0.0": 0, "r0.1": 0, **ends}, job.logs()
        (stop,) = job.rank_events("r1", 0, "stop")
        assert "rank 1 of this replica is lost" in stop["reason"], stop
        job.check_lanes(60)


@pytest.mark.parametrize("lost", first_here("integration/test_hosts.py", ["voice", "host"]))
def test_the_voice_of_a_host_is_lost_and_all_ranks_start_again(zygote, tmp_path, lost):
    """Each host of r1 has two ranks; rank 2 speaks for rank 3. A spare host takes the place of a lost one."""
    environment = {"TINY_STEPS": "24", "TINY_PATIENT_STEPS": "16", "FABRIC_REPLICAS": "2"}
    with (
        Cable() as cable,
        LaunchedJob(
            zygote, tmp_path, 2, ranks=4, environment=environment, bind=ADDRESSES[0], network=cable.names[0]
        ) as job,
    ):
        hosts = Hosts(job, cable)
        job.environment |= {"TEST_NETNS": cable.names[0], "FABRIC_BIND": ADDRESSES[0]}
        job.start_beside("r0")
        job.groups["r1"] = [f"r1.{rank}" for rank in range(4)]
        hosts.start("host-0", 0, "--node", "0", SHARDED="fsdp")
        hosts.start("host-1", 1, "--node", "1", SHARDED="fsdp")
        if lost == "host":
            hosts.start("host-2", 1, "--node", "spare", SHARDED="fsdp")
        job.wait_for(lambda: any(e["step"] >= 6 for e in job.events("r1", "commit")), "step 6 of r1")
        if lost == "voice":
            os.kill(job.pid("r1", 2), signal.SIGKILL)
        else:
            hosts.lose("host-1")
        ends = {"host-0": 0, "host-1": 0} if lost == "voice" else {"host-0": 0, "host-1": -9, "host-2": 0}
        assert job.end_codes() == {f"r0.{rank}": 0 for rank in range(4)} | ends, job.logs()
        for rank in (0, 1):
            (stop,) = job.rank_events("r1", rank, "stop")
            assert "rank 2 of this replica is lost" in stop["reason"], stop
        assert any(e["contributed"] and e["step"] > 12 for e in job.events("r1", "commit")), job.logs()
        job.check_lanes(24)


def holders(job: LaunchedJob, cable: Cable, step: int) -> dict[tuple[str, int], str]:
    """Return the servers that hold the snapshot of ``step``, by replica and rank."""
    return {
        (x["replica"], x["rank"]): x["ckpt"]
        for x in within(cable, job.status)["checkpoint_servers"]
        if any(snapshot["step"] == step for snapshot in x["snapshots"])
    }


def within(cable: Cable, ask: Callable[..., Any], *arguments: str) -> Any:
    """Ask in the network of the lighthouse."""
    with ThreadPoolExecutor(1, initializer=enter_network, initargs=(cable.names[0],)) as inside:
        return inside.submit(ask, *arguments).result()
