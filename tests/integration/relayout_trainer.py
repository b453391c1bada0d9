"""One rank that `fabric launch` has started, in the layout that it is asked for: FSDP over two ranks, or one
process. A timed wait stands for the device.

While the file RELAYOUT_SLOW exists, rank 1 takes RELAYOUT_FACTOR times as long.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

os.environ["SHARDED_RANK"] = os.environ["RANK"]  # read by the modules below
from layout_trainer import make
from sharded_trainer import example

import fabric.client

# Long beside the overhead of a step on a crowded host, which hides a slow rank that computes one micro-batch.
SAMPLE_S = 0.05


def main() -> None:
    torch.set_num_threads(1)
    layout, rank = fabric.client.layout(), int(os.environ["RANK"])
    if layout.ranks > 1:
        dist.init_process_group("gloo")
    model, mesh = make("fsdp" if layout.ranks > 1 else "plain", layout.ranks, 30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = fabric.client.attach(model, optimizer)
    with Path(os.environ["LAUNCHED_NOTES"]).open("a") as notes:
        notes.write(f"{rank} {os.getpid()} {os.environ['MASTER_PORT']} {layout}\n")
    data = session.loader(
        example("fsdp2").samples(64), global_batch_size=16, micro_batch_size=2, seed=3, mesh=mesh
    )
    slow = Path(os.environ.get("RELAYOUT_SLOW", "no-such-file"))
    factor = float(os.environ.get("RELAYOUT_FACTOR", "8")) if rank == 1 else 1.0
    for step in session.steps(data, until=1_000_000):
        for x, y in step:
            time.sleep(SAMPLE_S * len(x) * (factor if slow.exists() else 1.0))
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    main()
