"""What a job loses when its platform takes all hosts away with 30 s notice, and storage is configured.

    python benchmarks/notice.py
    python benchmarks/notice.py --rounds 1    # one notice, to try the benchmark

Three replicas of 84 million float32 parameters with AdamW (1.0 GB of state), steps of half a second, no
checkpoint before. All trainers get SIGTERM at once, and SIGKILL 30 s later. *Lost*: steps that a replica has
committed and that the newest complete checkpoint lacks. *Complete*: from SIGTERM to this checkpoint.
"""

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import common
from fleet import Fleet

REPLICAS, JOB = ("r0", "r1", "r2"), "default"
NOTICE_S, START_S, STEPS_BEFORE = 30.0, 300.0, 8
STEP_S, MICRO_BATCHES = 0.5, 3  # each replica computes one micro-batch


def train() -> None:
    """Train as a device would: a timer, then real gradients."""
    import torch
    from faults_model import MatrixModel

    import fabric.client

    torch.set_num_threads(1)
    model = MatrixModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    session = fabric.client.attach(model, optimizer)
    data = session.loader(torch.arange(6000.0), global_batch_size=MICRO_BATCHES, micro_batch_size=1, seed=1)
    for step in session.steps(data, until=1_000_000):
        for batch in step:
            time.sleep(STEP_S)
            step.backward(model(float(batch[0]) / 6000))
        optimizer.step()
        optimizer.zero_grad()
    session.close()


class NoticedFleet(Fleet):
    """Three trainers with storage, and what they have committed and saved."""

    def begin(self) -> None:
        """Start all replicas; return when each has committed some steps."""
        for replica in REPLICAS:
            durable, journal = str(self.folder / "durable"), str(self.journal(replica))
            self.start(replica, FABRIC_JOURNAL=journal, FABRIC_DURABLE=durable)
        self.wait(lambda: all(self.committed(r) >= STEPS_BEFORE for r in REPLICAS), START_S, "no steps")

    def journal(self, replica: str) -> Path:
        return self.folder / "journal" / f"{replica}.jsonl"

    def committed(self, replica: str) -> int:
        """Return the step of the replica's newest state."""
        path, newest = self.journal(replica), 0
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                event = json.loads(line)
            except ValueError:  # a line that is being written
                continue
            if event["event"] == "commit":
                newest = max(newest, event["step"] + 1)
        return newest

    def saved(self) -> int:
        """Return the step of the newest complete checkpoint; -1 without one."""
        from fabric.ckpt_server.durable.reader import list_checkpoints
        from fabric.ckpt_server.durable.storage import Storage

        complete = list_checkpoints(Storage(f"{self.folder}/durable").at(JOB), JOB).complete
        return max((checkpoint.state.step for checkpoint in complete), default=-1)

    def wait(self, condition: Callable[[], bool], within_s: float, why: str) -> None:
        """Poll; end the benchmark after ``within_s``."""
        deadline = time.monotonic() + within_s
        while not condition():
            if time.monotonic() > deadline:
                self.fail(why)
            time.sleep(0.05)


def notice() -> dict[str, float]:
    """Start a job, give notice to all, and return the figures."""
    environment = {"FABRIC_DURABLE_EVERY": "1h", "FABRIC_JOB": JOB}
    with NoticedFleet(__file__, len(REPLICAS), environment) as fleet:
        fleet.begin()
        began, complete_s = time.monotonic(), 0.0
        for process in fleet.trainers.values():
            process.send_signal(signal.SIGTERM)
        while any(process.poll() is None for process in fleet.trainers.values()):
            if not complete_s and fleet.saved() >= 0:
                complete_s = time.monotonic() - began
            if time.monotonic() - began > NOTICE_S:
                for process in fleet.trainers.values():
                    process.kill()
            time.sleep(0.05)
        ended_s = time.monotonic() - began
        complete_s = complete_s or ended_s
        saved = max(fleet.saved(), 0)  # without a checkpoint all steps are lost
        lost = max(map(fleet.committed, REPLICAS)) - saved
        codes = sorted({process.returncode for process in fleet.trainers.values()})
        common.say(
            f"step {saved} is saved after {complete_s:.1f} s, all end with {codes} after {ended_s:.1f} s"
        )
        return {"lost_steps": lost, "complete_s": round(complete_s, 2), "ended_s": round(ended_s, 2)}


def main() -> int:
    """Give notice to some jobs, one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--member", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.member:
        train()
        return 0
    common.begin()
    rounds = [notice() for _ in range(arguments.rounds)]
    worst = {name: max(figures[name] for figures in rounds) for name in rounds[0]}
    met = common.verdict("committed steps lost", worst["lost_steps"], at_most=0)
    met &= common.verdict("seconds until all have ended", worst["ended_s"], at_most=NOTICE_S)
    common.finish(worst)
    return 0 if met else 1


if __name__ == "__main__":
    os.chdir(Path(__file__).parent)
    sys.exit(main())
