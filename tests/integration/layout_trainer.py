"""One model in any layout: ``SHARDED`` is ``plain`` (one process), ``fsdp`` or ``tp`` (over all ranks), or
``2+2``, the number of layers in each pipeline stage.

``LAYOUT_WIDTH`` changes the model's width. With ``LAYOUT_BUFFERS`` the model also has running statistics of
its input, which are averaged and printed at the end. With ``LAYOUT_SOMETIMES`` it has a layer that forward
uses in half of the steps; the updates of its parameters are printed. The pace is the sharded trainer's.
"""

import faulthandler
import functools
import importlib
import json
import os
import signal
from collections import OrderedDict

import torch
import torch.distributed as dist
from sharded_trainer import MICRO_BATCH, Paced, example
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fabric.client
import fabric.ftar.lanes
from fabric.ftar.buckets import FlatGradients, lay_out

GLOBAL_BATCH = 16
MOMENTUM = 0.1


class Statistics(torch.nn.Module):
    """Passes its input on, and keeps running statistics of it, as BatchNorm does."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.running_mean.lerp_(x.mean(0), MOMENTUM)
            self.num_batches_tracked.add_(1)
        return x


class Sometimes(torch.nn.Module):
    """A layer that forward uses in two steps of four. A second rank of FSDP2 holds nothing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.step = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.layer(x) if self.step % 4 < 2 else x


def with_sometimes(model: torch.nn.Module) -> torch.nn.Module:
    torch.manual_seed(6)
    return torch.nn.Sequential(OrderedDict(model.named_children()) | {"sometimes": Sometimes()})


def build(width: int = 30) -> torch.nn.Module:
    """Build the whole model, which is equal in every layout."""
    torch.manual_seed(5)
    return torch.nn.Sequential(
        torch.nn.Linear(16, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 4, bias=False),
        torch.nn.LayerNorm(4),
    )


def make(layout: str, ranks: int, width: int) -> tuple[torch.nn.Module, object]:
    """The model in this layout, and the mesh over which samples are cut (None: all ranks see all)."""
    model, mesh = build(width), None
    if os.environ.get("LAYOUT_BUFFERS"):
        statistics = OrderedDict(statistics=Statistics(16))
        model = torch.nn.Sequential(statistics | OrderedDict(model.named_children()))
    if os.environ.get("LAYOUT_SOMETIMES"):
        model = with_sometimes(model)
    if layout == "fsdp":
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        fully_shard(model, mesh=mesh)
    elif layout == "tp":
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        parallelize_module(model, init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",)), plan)
    elif "+" in layout:
        counts = [int(n) for n in layout.split("+")]
        first = sum(counts[: dist.get_rank()])
        own = list(model.named_children())[first : first + counts[dist.get_rank()]]
        model = torch.nn.Sequential(OrderedDict(own))  # each layer keeps its name in the whole model
    return model, mesh


def summed_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.mse_loss(output, target) * len(target)


def pipeline(model: torch.nn.Module, session, rank: int, ranks: int):
    """A function that computes one micro-batch in all stages."""
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, n_microbatches=2, loss_fn=summed_loss, scale_grads=False)

    def compute(x: torch.Tensor, y: torch.Tensor, step) -> None:
        if rank == 0:
            schedule.step(x)
        else:
            losses: list[torch.Tensor] = []
            schedule.step(target=y, losses=losses)
            session.metrics(loss=sum(loss.item() for loss in losses))
        step.add_weight(weight=len(x))

    return compute


def main() -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    rank, ranks = int(os.environ["SHARDED_RANK"]), int(os.environ["SHARDED_RANKS"])
    layout = os.environ["SHARDED"]
    if layout != "plain":
        store = f"file://{os.environ['SHARDED_STORE']}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    if size := int(os.environ.get("LAYOUT_BUCKET_BYTES", "0")):
        # import by name, because the package has a function ``attach`` too
        attaching = importlib.import_module("fabric.client.attach")
        attaching.FlatGradients = functools.partial(FlatGradients, bucket_bytes=size)
        fabric.ftar.lanes.lay_out = functools.partial(lay_out, bucket_bytes=size)
    model, mesh = make(layout, ranks, int(os.environ.get("LAYOUT_WIDTH", "30")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data_set = Paced(example("fsdp2").samples(64))
    buffers = "average" if os.environ.get("LAYOUT_BUFFERS") else "refuse"
    session = fabric.client.attach(model, optimizer, buffers=buffers)
    data = session.loader(
        data_set, global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH, seed=3, mesh=mesh
    )

    def compute(x: torch.Tensor, y: torch.Tensor, step) -> None:
        loss = torch.nn.functional.mse_loss(model(x), y)
        step.backward(loss)
        session.metrics(loss=loss.item() * len(x))

    if "+" in layout:
        compute = pipeline(model, session, rank, ranks)
    sometimes = [module for module in model.modules() if isinstance(module, Sometimes)]
    for step in session.steps(data, until=int(os.environ["TINY_STEPS"])):
        for module in sometimes:
            module.step = step.number
        for x, y in step:
            compute(x, y, step)
        if rank == 0:
            print(f"loss {step.number} {step.metrics['loss'] / GLOBAL_BATCH:.9g}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    for name, buffer in model.named_buffers():
        print(f"buffer {name} {json.dumps(buffer.tolist())}", flush=True)
    for parameter in (p for module in sometimes for p in module.parameters()):
        print(f"updates {int(optimizer.state[parameter]['step'])}", flush=True)
    if layout != "plain":
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
