"""torchft under the faults of ``faults.py``: the same model, timer and signals, its manager and gloo.

torchft's time limits are as short as possible without false evictions: heartbeats every 50 ms that may be
missing for 0.5 s, 0.5 s for a quorum, 3 s for a collective. The replicas start alike, so nothing is sent at
the start. A failed collective drops the step and its work: counted.

Run with ``--member`` this file is the trainer.
"""

import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path

import common
from faults_fleet import DEADLINE_S, HERE, POLL_S, REPLICAS, AppendedLines, durations

KILLS, STOPS = 3, 1
UNDISTURBED_STEPS = 3
HEARTBEAT_S, MISSING_S, JOIN_S, COLLECTIVE_S = 0.05, 0.5, 0.5, 3.0
HEAL_S = 60.0  # torchft's default, and enough for a state of 1 GB
COMPUTE_S = 0.5


def member() -> None:
    """One replica: step, exchange, commit or drop, and a line for each."""
    import torch
    from faults_model import MatrixModel
    from torchft import Manager, ProcessGroupGloo

    torch.set_num_threads(1)
    name, folder = os.environ["FABRIC_REPLICA"], Path(os.environ["FAULTS_DIR"])
    model = MatrixModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def load(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=COLLECTIVE_S)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=1,
        timeout=timedelta(seconds=HEAL_S),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        replica_id=name,
        hostname="127.0.0.1",
        heartbeat_interval=timedelta(seconds=HEARTBEAT_S),
        init_sync=False,
    )
    with (folder / f"{name}.steps").open("a", buffering=1) as log:
        while True:
            manager.start_quorum()
            optimizer.zero_grad()
            time.sleep(COMPUTE_S)
            model(0.1).backward()
            for work in [manager.allreduce(p.grad) for p in model.parameters()]:
                work.wait()
            members, committed = manager.num_participants(), manager.should_commit()
            line = {"end": time.monotonic(), "committed": committed, "members": members, "pid": os.getpid()}
            log.write(json.dumps(line) + "\n")
            if committed:
                optimizer.step()


class TorchftTrainers:
    """Three torchft trainers and their lighthouse, which lives in this process."""

    def __init__(self, folder: Path) -> None:
        from torchft._torchft import LighthouseServer

        self._folder = folder
        self._lighthouse = LighthouseServer(
            bind="127.0.0.1:0",
            min_replicas=1,
            join_timeout_ms=int(JOIN_S * 1000),
            quorum_tick_ms=20,
            heartbeat_timeout_ms=int(MISSING_S * 1000),
        )
        self._lines = {name: AppendedLines(folder / f"{name}.steps") for name in REPLICAS}
        self.trainers: dict[str, subprocess.Popen[bytes]] = {}
        for name in REPLICAS:
            self.start(name)

    def start(self, name: str) -> None:
        """Start a trainer, or another one in its place."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "TORCHFT_LIGHTHOUSE": self._lighthouse.address(),
            "FABRIC_REPLICA": name,
            "FAULTS_DIR": str(self._folder),
        }
        with (self._folder / f"{name}.log").open("ab") as log:
            command = [sys.executable, str(HERE / "faults_torchft.py"), "--member"]
            self.trainers[name] = subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    def steps(self, name: str) -> list[dict]:
        """Return the lines that a replica wrote about its steps, dropped ones too."""
        return self._lines[name].read()

    def settle(self, members: int, count: int) -> bool:
        """Wait for ``count`` committed steps of ``members``; False when they do not come."""
        begun, end = time.monotonic(), time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            recent = [self.steps(name)[-count:] for name in REPLICAS]
            good = [x for x in recent if len(x) == count and all(_is_step(s, members, begun) for s in x)]
            if len(good) >= members:
                return True
            time.sleep(POLL_S)
        return False

    def close(self) -> None:
        """End everything."""
        for process in self.trainers.values():
            process.kill()
            process.wait()
        self._lighthouse.shutdown()


def _is_step(step: dict, members: int, after: float) -> bool:
    return step["committed"] and step["members"] == members and step["end"] > after


def measure(seed: int) -> dict[str, float]:
    """Disturb torchft; its figures, printed too."""
    chance = random.Random(seed)
    found: dict[str, list[float]] = {"kill": [], "stop": []}
    dropped = 0
    with tempfile.TemporaryDirectory(prefix="faults-torchft-") as folder:
        peers = TorchftTrainers(Path(folder))
        try:
            for kind in ["kill"] * KILLS + ["stop"] * STOPS:
                fault = _fault(peers, kind, chance)
                if fault is None:
                    common.say(f"  torchft did not go on after a {kind} within {DEADLINE_S:g} s")
                    break
                found[kind].append(fault[0])
                dropped += fault[1]
        finally:
            peers.close()
    return _report(found, dropped)


def _fault(peers: TorchftTrainers, kind: str, chance: random.Random) -> tuple[float, int] | None:
    """(stall of the survivor that it cost most, steps dropped), or None where it did not go on."""
    if not peers.settle(len(REPLICAS), UNDISTURBED_STEPS):
        return None
    victim = chance.choice(REPLICAS)
    survivors = [name for name in REPLICAS if name != victim]
    steps = peers.steps(survivors[0])
    median = statistics.median(seconds for seconds, _ in durations(steps[-UNDISTURBED_STEPS:]))
    time.sleep(max(0.0, steps[-1]["end"] + chance.random() * median - time.monotonic()))
    at = time.monotonic()
    peers.trainers[victim].send_signal(signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    if not peers.settle(len(REPLICAS) - 1, 1):
        return None
    stalls, dropped = [], 0
    for name in survivors:
        steps = peers.steps(name)
        last = next(s for s in steps if _is_step(s, len(REPLICAS) - 1, at))
        between = [s for s in steps if at < s["end"] <= last["end"]]
        before = max(s["end"] for s in steps if s["end"] <= at)
        whole = sum(s["committed"] for s in between) * median
        stalls.append(last["end"] - before - whole)
        dropped = max(dropped, sum(not s["committed"] for s in between))
    peers.trainers[victim].kill()
    peers.trainers[victim].wait()
    common.say(f"  torchft, {kind} {victim}: stall {max(stalls):.2f} s, {dropped} steps dropped")
    peers.start(victim)
    return max(stalls), dropped


def _report(found: dict[str, list[float]], dropped: int) -> dict[str, float]:
    result: dict[str, float] = {}
    if found["kill"]:
        result["torchft_sigkill_stall_s"] = statistics.median(found["kill"])
        result["torchft_sigkill_stall_max_s"] = max(found["kill"])
        result["torchft_steps_lost"] = dropped
    if found["stop"]:
        result["torchft_sigstop_stall_s"] = statistics.median(found["stop"])
    common.table(
        "torchft, the same faults (its short time limits)",
        ["fault", "count", "stall"],
        [[kind, len(x), common.describe(x, "s", 1.0)] for kind, x in found.items() if x],
    )
    return result


if __name__ == "__main__":
    member()
