"""One pipeline stage that `fabric launch` has started, with the layers that its layout asks for.

A timed wait in front of each layer stands for the device: a stage with more layers takes longer. While
the file SPLIT_SLOW exists, each layer of stage 1 takes SPLIT_FACTOR times as long.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from layout_trainer import GLOBAL_BATCH, make, pipeline
from sharded_trainer import MICRO_BATCH, example

import fabric.client

# Long beside the overhead of a pass on a crowded host, which hides the slow stage.
LAYER_S = 0.02


def main() -> None:
    torch.set_num_threads(1)
    layout, rank = fabric.client.layout(), int(os.environ["RANK"])
    dist.init_process_group("gloo")
    model, _ = make("+".join(map(str, layout.layers)), layout.ranks, 30)
    assert len(model) == layout.layers[rank]
    slow = Path(os.environ.get("SPLIT_SLOW", "no-such-file"))
    factor = float(os.environ.get("SPLIT_FACTOR", "6")) if rank == 1 else 1.0

    def wait(*_) -> None:
        time.sleep(LAYER_S * (factor if slow.exists() else 1.0))

    for layer in model:
        layer.register_forward_pre_hook(wait)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = fabric.client.attach(model, optimizer)
    assert session.layout == layout
    with Path(os.environ["LAUNCHED_NOTES"]).open("a") as notes:
        notes.write(f"{rank} {os.getpid()} {os.environ['MASTER_PORT']} {layout}\n")
    data = session.loader(
        example("fsdp2").samples(64), global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH, seed=3
    )
    compute = pipeline(model, session, rank, layout.ranks)
    for step in session.steps(data, until=1_000_000):
        for x, y in step:
            compute(x, y, step)
        optimizer.step()
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    main()
