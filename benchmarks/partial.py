"""How long a job stands still when the network is only partly there.

    python benchmarks/partial.py
    python benchmarks/partial.py --quick --only cut_pair     # shorter faults, and this one alone

Four replicas, each on a host of its own (a network namespace with a silent switch between them), steps of
100 ms, default settings, one lighthouse that all of them reach. Each fault lasts half a minute; then
everything is healed, and the next one waits until all four are members again.

*Without a commit*: the longest time between two commits of the job, from the beginning of a fault to its end.
*All back*: from the end of a fault to the first step of all four members, the longest of the faults of links.
*Large lost*: one host passes packets of up to 1000 bytes to and from it, and loses larger ones without a
word, as where networks have unequal MTUs.
*Slow link*: 200 ms each way and 5 % lost between two replicas. A step needs that way a few times: the figure
is the longest time without a commit over eight times the round trip of that link.

It needs root, network namespaces and tunnel devices: elsewhere it prints "not possible here", and why.
"""

import argparse
import contextlib
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import common
from faults_fleet import AppendedLines
from fleet import Fleet
from partial_network import PartialNetwork, both_ways, problem

JOB = "partial"
REPLICAS = ("r0", "r1", "r2", "r3")
LIGHTHOUSE = "lighthouse"
STEP_S, MICRO_BATCHES = 0.1, 8
FAULT_S, QUICK_S = 30.0, 12.0
STOPPED_S = 26.0
DELAY_S, LOSS = 0.2, 0.05
MOST_BYTES = 1000
BACK_S = 90.0
SETTLED_STEPS = 20
HALVES = tuple((a, b) for a in REPLICAS[:2] for b in REPLICAS[2:])

# Figure -> its aim.
AIMS = {
    "cut_pair_s": 3.0,
    "split_2_2_s": 5.0,
    "one_way_s": 5.0,
    "large_lost_s": 10.0,
    "slow_link_ratio": 1.0,
    "server_stopped_s": 1.0,
    "all_killed_one_missing_s": 10.0,
    "all_back_s": 20.0,
}
SCENES = (
    "cut_pair",
    "split_2_2",
    "one_way",
    "large_lost",
    "slow_link",
    "flapping",
    "server_stopped",
    "all_killed_one_missing",
)


class PartialFleet(Fleet):
    """Four trainers and a lighthouse, each in a namespace."""

    failures = 3  # the default: broken links must not count as failures of a replica

    def __init__(self, network: PartialNetwork) -> None:
        super().__init__(str(Path(__file__).resolve()), len(REPLICAS), {"FABRIC_JOB": JOB})
        self._network = network
        self.bind = network.address[LIGHTHOUSE]
        self._steps = {name: AppendedLines(self.folder / f"{name}.steps") for name in REPLICAS}
        self._said = AppendedLines(self.folder / "status.lines")

    def inside(self, replica: str) -> list[str]:
        """In its namespace."""
        return self._network.inside(replica or LIGHTHOUSE)

    def begin(self, name: str) -> None:
        """Start a trainer, or another one in its place."""
        self.start(name, FABRIC_BIND=self._network.address[name], PARTIAL_DIR=str(self.folder))

    def watch(self) -> None:
        """Write down what the lighthouse says that the job waits for."""
        environment = {**os.environ, "PARTIAL_DIR": str(self.folder), "PARTIAL_URL": self._url}
        command = [*self.inside(""), sys.executable, str(Path(__file__).resolve()), "--watch"]
        self.trainers["watch"] = subprocess.Popen(command, env=environment)

    def steps(self, name: str) -> list[dict[str, float]]:
        """Return the lines that the trainers of this replica wrote about their steps."""
        return [x for x in self._steps[name].read() if "step" in x]

    def attached(self, name: str, since: float) -> float:
        """Return when a process of the replica started after ``since`` had attached; 0 if none has."""
        return next((x["attached"] for x in self._steps[name].read() if x.get("attached", 0.0) > since), 0.0)

    def commits(self) -> list[float]:
        """The times of all commits by anybody, in order."""
        return sorted(x["end"] for name in REPLICAS for x in self.steps(name))

    def are_together(self, since: float) -> float:
        """When the last of all four had made a step of four members after ``since``; 0 before that."""
        ends = [
            next((x["end"] for x in self.steps(name) if x["end"] > since and x["members"] == 4), 0.0)
            for name in REPLICAS
        ]
        return max(ends) if all(ends) else 0.0

    def waiting_for(self, since: float, until: float) -> list[str]:
        """Return the lighthouse's sentences of that time, each once."""
        said = [x["waiting_for"] for x in self._said.read() if since <= x["t"] <= until]
        return list(dict.fromkeys(said))

    def come(self, condition: Callable[[], object], what: str, within_s: float) -> bool:
        """Poll until ``condition``; whether it came in time. A trainer that ends ends the benchmark."""
        end = time.monotonic() + within_s
        while not condition():
            for name, process in self.trainers.items():
                if process.poll() not in (None, -signal.SIGKILL):
                    self.fail(f"{name} ended with {process.poll()}")
            if time.monotonic() > end:
                common.say(f"  {what} did not come within {within_s:g} s")
                return False
            time.sleep(0.02)
        return True


@dataclass
class ScenePlayer:
    """Plays one scene after the other, and keeps what was measured."""

    fleet: PartialFleet
    network: PartialNetwork
    fault_s: float
    figures: dict[str, float | None] = field(default_factory=dict)
    back_s: list[float | None] = field(default_factory=list)

    def settle(self) -> None:
        """Wait until all four replicas are members and have made some steps."""
        since = time.monotonic()
        if not self.fleet.come(lambda: self.fleet.are_together(since), "a step of all four", BACK_S):
            self.fleet.fail("the four replicas do not come together")
        count = len(self.fleet.commits()) + SETTLED_STEPS * len(REPLICAS)
        self.fleet.come(lambda: len(self.fleet.commits()) >= count, "some steps", BACK_S)

    def gap_s(self, since: float, until: float) -> float:
        """The longest time without a commit."""
        ends = [since, *(x for x in self.fleet.commits() if since < x < until), until]
        return max(b - a for a, b in itertools.pairwise(ends))

    def strike(self, name: str, begin: Callable[[], None], seconds: float) -> tuple[float, float]:
        """Play a network fault for some time; return the longest gap, and the time until all replicas are
        back.
        """
        self.settle()
        began = time.monotonic()
        begin()
        time.sleep(seconds)
        ended = time.monotonic()
        gap_s = self.gap_s(began, ended)
        count = sum(began < x < ended for x in self.fleet.commits())
        self.network.heal()
        self.fleet.come(lambda: self.fleet.are_together(ended), "a step of all four", BACK_S)
        back = self.fleet.are_together(ended)
        after_s = self.gap_s(ended, back) if back else None
        self.back_s.append(back - ended if back else None)
        common.say(
            f"  {name}: {gap_s:.1f} s without a commit in {ended - began:.0f} s, {count} commits by anybody"
        )
        if back:
            common.say(f"      all back after {back - ended:.1f} s, at most {after_s:.1f} s without a commit")
        for said in self.fleet.waiting_for(began, time.monotonic()):
            common.say(f"      {said[:160]}")
        return gap_s, back - ended if back else BACK_S

    # --- the scenes --------------------------------------------------------------------------------

    def cut_pair(self) -> None:
        """Cut the link between two replicas."""
        cut = both_ways(("r0", "r1"))
        self.figures["cut_pair_s"], _ = self.strike("cut pair", lambda: self.network.cut(*cut), self.fault_s)

    def split_2_2(self) -> None:
        """Cut the network into two halves."""
        cut = both_ways(*HALVES)
        self.figures["split_2_2_s"], _ = self.strike(
            "split 2:2", lambda: self.network.cut(*cut), self.fault_s
        )

    def one_way(self) -> None:
        """Bytes from r2 to r1 are lost."""
        self.figures["one_way_s"], _ = self.strike(
            "one way", lambda: self.network.cut(("r2", "r1")), self.fault_s
        )

    def large_lost(self) -> None:
        """Packets of more than MOST_BYTES are lost to and from r3, smaller ones pass."""
        self.figures["large_lost_s"], _ = self.strike(
            "large lost", lambda: self.network.narrow("r3", MOST_BYTES), self.fault_s
        )

    def slow_link(self) -> None:
        """A slow and lossy link."""
        gap_s, _ = self.strike(
            "slow link", lambda: self.network.slow("r0", "r1", DELAY_S, LOSS), self.fault_s
        )
        self.figures["slow_link_ratio"] = gap_s / (8 * 2 * DELAY_S)

    def flapping(self) -> None:
        """Cut for three seconds, whole for three, again and again."""

        def flap() -> None:
            for _ in range(int(self.fault_s // 6)):
                self.network.cut(*both_ways(("r0", "r1")))
                time.sleep(3)
                self.network.heal()
                time.sleep(3)

        self.strike("flapping", flap, 0.0)

    def server_stopped(self) -> None:
        """The checkpoint server of r1 is stopped, its trainer is not."""
        self.settle()
        server = int((self.fleet.folder / "run" / "r1" / "ckpt.lock").read_text().split()[0])
        began = time.monotonic()
        os.kill(server, signal.SIGSTOP)
        try:
            time.sleep(STOPPED_S if self.fault_s == FAULT_S else self.fault_s)
        finally:
            os.kill(server, signal.SIGCONT)
        gap_s = self.gap_s(began, time.monotonic())
        self.figures["server_stopped_s"] = gap_s
        common.say(f"  checkpoint server stopped: {gap_s:.1f} s without a commit")

    def all_killed_one_missing(self) -> None:
        """All trainers are killed at once, and r3 does not come back until the others step."""
        self.settle()
        began = time.monotonic()
        for name in REPLICAS:
            self.fleet.trainers[name].kill()
        for name in REPLICAS:
            self.fleet.trainers[name].wait()
        there = REPLICAS[:3]
        for name in there:
            self.fleet.begin(name)
        self.fleet.come(lambda: all(self.fleet.attached(n, began) for n in there), "their start", BACK_S)
        known = max(self.fleet.attached(name, began) for name in there)
        stepped = self.fleet.come(lambda: self.fleet.commits()[-1] > known, "a step without r3", 130.0)
        first = next((x for x in self.fleet.commits() if x > known), 0.0)
        self.figures["all_killed_one_missing_s"] = first - known if stepped else None
        common.say(f"  all killed, one missing: a step {first - known:.1f} s after the others were there")
        for said in self.fleet.waiting_for(known, max(first, known)):
            common.say(f"      {said[:160]}")
        self.fleet.begin("r3")


def member() -> None:
    """One trainer: compute is a timer, and each step writes a line."""
    import torch

    import fabric.client

    torch.set_num_threads(1)
    folder, name = Path(os.environ["PARTIAL_DIR"]), os.environ["FABRIC_REPLICA"]
    log = os.open(folder / f"{name}.steps", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    session = fabric.client.attach(model, optimizer)
    os.write(log, json.dumps({"attached": time.monotonic()}).encode() + b"\n")
    data = session.loader(torch.randn(800, 64), global_batch_size=MICRO_BATCHES, micro_batch_size=1, seed=1)
    for step in session.steps(data, until=1_000_000):
        for batch in step:
            time.sleep(STEP_S * len(REPLICAS) / MICRO_BATCHES)
            step.backward(model(batch).square().mean())
        line = {"step": step.number, "end": time.monotonic(), "members": len(session.members)}
        os.write(log, json.dumps(line).encode() + b"\n")
        optimizer.step()
        optimizer.zero_grad()


def watch() -> None:
    """Write down every half second what the job waits for, by the lighthouse's word."""
    import urllib.request

    folder, url = Path(os.environ["PARTIAL_DIR"]), os.environ["PARTIAL_URL"]
    token = (folder / "token").read_text().strip()
    request = urllib.request.Request(  # noqa: S310  (our own lighthouse)
        f"{url}/v1/jobs/{JOB}", headers={"Authorization": f"Bearer {token}"}
    )
    with (folder / "status.lines").open("a", buffering=1) as out:
        while os.getppid() != 1:
            with contextlib.suppress(OSError, ValueError):
                with urllib.request.urlopen(request, timeout=2) as answer:  # noqa: S310
                    said = json.load(answer)["waiting_for"]
                out.write(json.dumps({"t": time.monotonic(), "waiting_for": said}) + "\n")
            time.sleep(0.5)


def measure(scenes: Sequence[str], fault_s: float, logs: str) -> dict[str, float | None]:
    """Play the scenes; return their figures."""
    with PartialNetwork([*REPLICAS, LIGHTHOUSE]) as network, PartialFleet(network) as fleet:
        play = ScenePlayer(fleet, network, fault_s)
        for name in REPLICAS:
            fleet.begin(name)
        fleet.watch()
        try:
            for scene in scenes:
                getattr(play, scene)()
        finally:
            if logs:
                ignored = shutil.ignore_patterns("*.sock")
                shutil.copytree(fleet.folder, logs, ignore=ignored, dirs_exist_ok=True)
        ends = [x["end"] for x in fleet.steps("r0")][: 2 * SETTLED_STEPS]
        common.say(
            f"  undisturbed steps took {statistics.median(b - a for a, b in itertools.pairwise(ends)):.2f} s"
        )
    figures = {name: round(x, 2) if x is not None else None for name, x in play.figures.items()}
    if play.back_s:
        whole = [x for x in play.back_s if x is not None]
        figures["all_back_s"] = round(max(whole), 2) if len(whole) == len(play.back_s) else None
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=SCENES, action="append")
    parser.add_argument("--quick", action="store_true", help=f"faults of {QUICK_S:g} s")
    parser.add_argument("--logs", default="", help="keep the folder of logs and journals here")
    parser.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--watch", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.member or arguments.watch:
        (member if arguments.member else watch)()
        return 0
    common.begin()
    if why := problem():
        common.say(f"not possible here: {why}")
        return 0
    figures = measure(arguments.only or SCENES, QUICK_S if arguments.quick else FAULT_S, arguments.logs)
    met = [common.verdict(name, value, at_most=AIMS[name]) for name, value in figures.items()]
    common.finish(figures)
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
