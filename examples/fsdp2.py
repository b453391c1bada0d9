"""A replica of several ranks: FSDP2 shards the model within it, fabric averages between replicas.

    fabric launch --replica r0 --ranks 2 examples/fsdp2.py
    FABRIC_DISABLE=1 fabric launch --ranks 2 examples/fsdp2.py     # one replica, without services

Each replica has its own launcher and torch.distributed world. When a rank dies, its whole replica restarts,
each rank fetches its part of the live state, and the replica joins the others.
"""

import argparse

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fabric.client


def build() -> torch.nn.Sequential:
    torch.manual_seed(1)
    layers = torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32), torch.nn.ReLU()
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 4))


def samples(size: int) -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(size, 16, generator=generator)
    return torch.utils.data.TensorDataset(x, x @ torch.randn(16, 4, generator=generator))


def train(dataset: torch.utils.data.Dataset, steps: int) -> None:
    model = build()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    session = fabric.client.attach(model, optimizer)
    # Every rank gets its slice of each micro-batch.
    data = session.loader(dataset, global_batch_size=16, micro_batch_size=4, seed=3, mesh=mesh)
    for step in session.steps(data, until=steps):
        for x, y in step:
            loss = torch.nn.functional.mse_loss(model(x), y)
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x))
        if dist.get_rank() == 0:
            print(f"loss {step.number} {step.metrics['loss'] / 16:.9g}", flush=True)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # norm over all shards
        optimizer.step()
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    dist.init_process_group("gloo")
    train(samples(64), parser.parse_args().steps)
    dist.destroy_process_group()
