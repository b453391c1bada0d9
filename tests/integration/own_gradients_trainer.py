"""A rank whose gradients its replica's other rank does not get. ``TEST_WAY``: ``alone``, ``waits``,
or ``diloco``.
"""

import contextlib
import os

import torch
import torch.distributed as dist
from fsdp2 import build, samples
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import fabric.client


def main() -> None:
    torch.set_num_threads(1)
    rank, size = int(os.environ["SHARDED_RANK"]), int(os.environ["SHARDED_RANKS"])
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['SHARDED_STORE']}", rank=rank, world_size=size
    )
    waits = os.environ["TEST_WAY"] == "waits"
    model = DistributedDataParallel(build()) if waits else build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if os.environ["TEST_WAY"] == "diloco":
        train_locally(model, optimizer, rank)
        return
    session = fabric.client.attach(model, optimizer)
    mesh = init_device_mesh("cpu", (size,))
    data = session.loader(samples(64), global_batch_size=16, micro_batch_size=4, mesh=mesh)
    for step in session.steps(data, until=8):
        for number, (x, y) in enumerate(step):
            # Right without fabric: the last of this replica's two micro-batches averages both.
            with model.no_sync() if waits and number == 0 else contextlib.nullcontext():
                step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    dist.destroy_process_group()


def train_locally(model: torch.nn.Module, inner: torch.optim.Optimizer, rank: int) -> None:
    """Inner steps of this rank alone, on samples of its own."""
    outer = torch.optim.SGD(model.parameters(), lr=0.7)
    loop = fabric.client.diloco(model, inner, outer, every=2, until=8)
    data = samples(64)
    rows = [data[i] for i in range(4 * rank, 4 * rank + 4)]
    x, y = (torch.stack(part) for part in zip(*rows, strict=True))
    while loop.committed_step < 8:
        torch.nn.functional.mse_loss(model(x), y).backward()
        inner.step()
        inner.zero_grad()
    loop.close()
