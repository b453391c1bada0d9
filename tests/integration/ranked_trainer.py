"""A rank of a replica whose ranks wait for each other in every micro-batch.

A timed wait stands for the device that computes. While the file RANKED_SLOW exists, rank RANKED_RANK takes
RANKED_FACTOR times as long.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tiny_trainer import build

import fabric.client

WIDTH = 16
SAMPLES = 96
USUAL_S = 0.006


class Numbered(torch.utils.data.Dataset):
    """Regression data."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int):
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x[:4]


def main() -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["SHARDED_RANK"]), int(os.environ["SHARDED_RANKS"])
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['SHARDED_STORE']}", rank=rank, world_size=size
    )
    model, optimizer, scheduler = build(WIDTH)
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    data = session.loader(Numbered(), global_batch_size=8, micro_batch_size=1, seed=0)
    slow = Path(os.environ.get("RANKED_SLOW", "no-such-file"))
    is_target = str(rank) == os.environ.get("RANKED_RANK", "")
    factor = float(os.environ.get("RANKED_FACTOR", "8"))
    for step in session.steps(data, until=1_000_000):
        for x, y in step:
            time.sleep(USUAL_S * (factor if is_target and slow.exists() else 1.0))
            loss = torch.nn.functional.mse_loss(model(x), y)
            step.backward(loss)
            dist.barrier()  # the ranks of a replica wait for each other, as in tensor parallelism
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    main()
