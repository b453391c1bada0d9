"""One rank of a replica of several: runs the ``train`` of the example that ``SHARDED`` names, paced.

The pauses stand for a device that computes; without them the job would end before a replica rejoins.
"""

import faulthandler
import importlib.util
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

# Import this module before any fork, because the import takes a second.
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor.parallel
from pace import leave_time

import fabric.client

EXAMPLES = Path(__file__).parents[2] / "examples"
MICRO_BATCH = 4


def example(name: str):
    """Return the module of one example."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class Paced(torch.utils.data.Dataset):
    """The examples' samples; while a replica is away, rank 0 pauses to let it come back."""

    def __init__(self, samples) -> None:
        self.samples = samples
        self.step_s = float(os.environ.get("TINY_STEP_S", "0.03"))
        self.until = int(os.environ.get("TINY_STEPS", "60"))
        self.left_to = -1  # the last step in which this trainer paused for an absent replica
        rank, _, step = os.environ.get("SHARDED_RAISES", "").partition("@")
        self.raises_at = int(step) if rank == os.environ["SHARDED_RANK"] else -1
        self.sessions: list = []
        attach = fabric.client.attach
        fabric.client.attach = lambda *a, **k: self.sessions.append(attach(*a, **k)) or self.sessions[-1]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        session = self.sessions[0]
        if self.raises_at == (step := session.committed_step):
            raise ValueError("the user's own mistake")
        if os.environ["SHARDED_RANK"] == "0" and step != self.left_to:
            self.left_to = step
            leave_time(session, self.until - step, self.step_s)
        time.sleep(self.step_s / 4 / MICRO_BATCH)
        return self.samples[index]


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    rank, size = int(os.environ["SHARDED_RANK"]), int(os.environ["SHARDED_RANKS"])
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['SHARDED_STORE']}", rank=rank, world_size=size
    )
    module = example(os.environ["SHARDED"])
    samples = example("fsdp2").samples(64)
    module.train(Paced(samples), int(os.environ.get("TINY_STEPS", "60")))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
