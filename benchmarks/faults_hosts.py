"""``faults.py --hosts N``: a replica of two hosts loses a rank of its head host, and a host; N rounds.

r0 is two tensor parallel ranks on one host, r1 one on each of two hosts. A host is a launcher, a checkpoint
server and a folder of its own. r1's head host, r0 and the lighthouse share a network namespace; r1's other
host and the spare hosts share a second one. A wait in each sample stands for the device. Each round has two
jobs, one with a tiny model and one with a state of 1 GB:

Faults come once every host has its standbys.

- *start*: from the start of r1's launchers to its first contribution, while r0 waits, without any state;
- *rank* (tiny model): SIGKILL to rank 0 of r1, until its next process contributes;
- *host*: SIGKILL to all of r1's other host while a spare host stands by, until r1 contributes. The *stall*
  is r0's longest step around the loss, over its median step alone right after: in both it computes the
  micro-batches of both replicas.

A ratio is a return's time over that of the start in the same job.
"""

import contextlib
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import common
import faults_unequal
from faults_fleet import stands_by
from job import Zygote
from namespaces import ADDRESSES, Cable
from test_hosts import Hosts
from test_launched_jobs import LaunchedJob

# A sample takes a sixteenth of this; each replica has eight samples of a step.
STEP_S = 0.4
# Widths of the model; the second one has 84 million parameters: 1 GB with AdamW's state.
TINY, LARGE = 30, 4_200_000
ENVIRONMENT = {
    "FABRIC_REPLICAS": "2",
    "FABRIC_ADAPT": "off",
    "SHARDED": "tp",
    "TEST_FAILURES": "0",  # the benchmark kills replicas on purpose
    "TINY_GO_ON": "/",  # r0 does not pause for r1
    "TINY_STEP_S": str(STEP_S),
    "TINY_STEPS": "1000000",
}


class HostsJob:
    """A running job of both replicas, with a spare host; ``start_s`` is how long r1's first start took."""

    def __init__(self, job: LaunchedJob, hosts: Hosts) -> None:
        self.job, self._hosts, self._lost = job, hosts, 0
        job.start("r0", TEST_TRAINER="layout_trainer")
        job.wait_for(lambda: job.events("r0", "start"), "r0 to wait", faults_unequal.PATIENCE_S)
        job.groups["r1"] = ["r1.0", "r1.1"]
        began = time.monotonic()
        hosts.start("host-0", 0, "--node", "0")
        hosts.start("host-1", 1, "--node", "1")
        self.start_s = self._contributed(began) - began

    def _contributed(self, since: float) -> float:
        """Wait for the first contribution of a process of r1's rank 0 that starts after ``since``."""

        def times() -> list[float]:
            started = [x["mono"] for x in self.job.events("r1", "start") if x["mono"] > since]
            given = self.job.events("r1", "contribute") if started else []
            return [x["mono"] for x in given if x["mono"] > started[0]]

        self.job.wait_for(times, "a contribution of r1", faults_unequal.PATIENCE_S)
        return times()[0]

    def _wait_for_standbys(self) -> None:
        """Wait until each launcher's child stands by, which it starts some time after its ranks."""
        living = [x.pid for x in self.job.launchers.values() if x.poll() is None]

        def all_stand_by() -> bool:
            return all(any(map(stands_by, children_of(pid))) for pid in living)

        self.job.wait_for(all_stand_by, "the standbys", faults_unequal.PATIENCE_S)

    def kill_rank(self) -> float:
        """Kill rank 0 of r1; return the seconds until r1 contributes again."""
        self._wait_for_standbys()
        faults_unequal.settle(self.job)
        killed = time.monotonic()
        os.kill(self.job.pid("r1", 0), signal.SIGKILL)
        return self._contributed(killed) - killed

    def lose_host(self) -> tuple[float, float, int]:
        """Lose the host of rank 1; return the seconds until r1 contributes again and of r0's stall, and the
        committed steps that r0 lost."""
        self._lost += 1
        spare = f"host-{self._lost + 1}"
        self._hosts.start(spare, 1, "--node", "spare")
        log = self.job.folder / f"{spare}.log"
        self.job.wait_for(lambda: "stands by" in log.read_text(), f"{spare} to stand by")
        self._wait_for_standbys()
        lost: list[float] = []

        def lose() -> None:
            lost.append(time.monotonic())
            self._hosts.lose(f"host-{self._lost}")

        stall, _ = faults_unequal.kill_and_join(self.job, lose)
        [at] = lost
        journals = [self.job.events(replica, "commit") for replica in ("r0", "r1")]
        committed = max(x["step"] + 1 for journal in journals for x in journal if x["mono"] < at)
        resumed = next(x["step"] for x in self.job.events("r0", "resume") if x["mono"] > at)
        return self._contributed(at) - at, stall, max(0, committed - resumed)


def children_of(pid: int) -> list[int]:
    """The children of a process with one thread that starts any."""
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@contextlib.contextmanager
def running(zygote: Zygote, width: int) -> Iterator[HostsJob]:
    """A job whose model has this width."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Cable() as cable,
        LaunchedJob(
            zygote,
            Path(folder),
            replicas=2,
            ranks=2,
            environment=ENVIRONMENT | {"LAYOUT_WIDTH": str(width)},
            bind=ADDRESSES[0],
            network=cable.names[0],
        ) as job,
    ):
        job.environment |= {"TEST_NETNS": cable.names[0], "FABRIC_BIND": ADDRESSES[0]}
        yield HostsJob(job, Hosts(job, cable, forked=False))


def measure(rounds: int) -> dict[str, float]:
    """Print and return the figures; without namespaces, end the benchmark."""
    if problem := Cable.problem():
        common.absent(problem)
    ranks, hosts, stalls = list[float](), list[float](), list[float]()
    lost = 0
    with contextlib.closing(Zygote()) as zygote:
        for _ in range(rounds):
            for width in (TINY, LARGE):
                with running(zygote, width) as job:
                    common.say(f"width {width:,}: start {job.start_s:.2f} s")
                    if width == TINY:
                        back_s = job.kill_rank()
                        ranks.append(back_s / job.start_s)
                        common.say(f"  rank 0 killed: back after {back_s:.2f} s")
                    back_s, stall, steps = job.lose_host()
                    if width == TINY:
                        stalls.append(stall)
                    else:
                        hosts.append(back_s / job.start_s)
                    lost += steps
                    common.say(
                        f"  host lost: back after {back_s:.2f} s; stall {stall:.3f} s, {steps} steps lost"
                    )
    figures = {
        "lost_host_stall_s": statistics.median(stalls),
        "lost_host_stall_max_s": max(stalls),
        "steps_lost": lost,
        "rank_of_head_host_back_ratio": statistics.median(ranks),
        "lost_host_back_ratio": statistics.median(hosts),
    }
    common.say("")
    common.verdict("stall at a lost host, median, s", figures["lost_host_stall_s"], at_most=0.25)
    common.verdict("stall at a lost host, worst, s", figures["lost_host_stall_max_s"], at_most=0.6)
    common.verdict("steps lost", lost, at_most=0)
    common.verdict("rank 0 killed: back / start", figures["rank_of_head_host_back_ratio"], at_most=1.1)
    common.verdict("host lost, 1 GB: back / start", figures["lost_host_back_ratio"], at_most=1.3)
    return figures
