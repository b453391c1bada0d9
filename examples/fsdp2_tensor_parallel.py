"""A replica of four ranks or more: FSDP2 over one dimension of a mesh, tensor parallel over the other.

Start it like examples/fsdp2.py, with --ranks 4.
"""

import argparse

import torch
import torch.distributed as dist
from fsdp2 import build, samples
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fabric.client

PLAN = {"0": ColwiseParallel(), "2": RowwiseParallel(), "4": ColwiseParallel(output_layouts=Replicate())}


def train(dataset: torch.utils.data.Dataset, steps: int) -> None:
    model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], PLAN)
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    session = fabric.client.attach(model, optimizer)
    # Samples are divided over "dp" alone: tensor parallel ranks see the same samples.
    data = session.loader(dataset, global_batch_size=16, micro_batch_size=4, seed=3, mesh=mesh["dp"])
    for step in session.steps(data, until=steps):
        for x, y in step:
            loss = torch.nn.functional.mse_loss(model(x), y)
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x))
        if dist.get_rank() == 0:
            print(f"loss {step.number} {step.metrics['loss'] / 16:.9g}", flush=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    dist.init_process_group("gloo")
    train(samples(64), parser.parse_args().steps)
    dist.destroy_process_group()
