"""A replica of two pipeline stages: torch's schedule runs forward and backward. Fabric averages the gradients
of each stage with those of the same stage on other replicas.

    fabric launch --replica r0 --ranks 2 examples/pipeline.py
"""

import argparse

import torch
import torch.distributed as dist
from fsdp2 import build, samples
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import fabric.client

CHUNKS = 2


def clip_over_stages(parameters: list[torch.nn.Parameter], limit: float) -> None:
    """Clip by the norm of the whole model's averaged gradient, to which each stage adds its part."""
    squared = torch.nn.utils.get_total_norm([p.grad for p in parameters]) ** 2
    dist.all_reduce(squared)
    torch.nn.utils.clip_grads_with_norm_(parameters, limit, squared**0.5)


def train(dataset: torch.utils.data.Dataset, steps: int) -> None:
    layers, rank = list(build()), dist.get_rank()
    model = torch.nn.Sequential(*(layers[:3] if rank == 0 else layers[3:]))
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    stage = PipelineStage(model, rank, dist.get_world_size(), torch.device("cpu"))

    session = fabric.client.attach(model, optimizer)
    data = session.loader(
        dataset, global_batch_size=16, micro_batch_size=4, seed=3
    )  # all stages see all samples of each micro-batch

    # The sum over samples, so the schedule must not divide by its number of chunks (``scale_grads``).
    def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.mse_loss(output, target) * len(target)

    schedule = ScheduleGPipe(stage, n_microbatches=CHUNKS, loss_fn=loss_of, scale_grads=False)
    for step in session.steps(data, until=steps):
        for x, y in step:
            if rank == 0:
                schedule.step(x)
            else:
                losses: list[torch.Tensor] = []
                schedule.step(target=y, losses=losses)
                session.metrics(loss=sum(loss.item() for loss in losses))
            step.add_weight(weight=len(x))  # the number of samples of the gradients that the schedule added
        if rank == 0:
            print(f"loss {step.number} {step.metrics['loss'] / 16:.9g}", flush=True)
        clip_over_stages(parameters, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    dist.init_process_group("gloo")
    train(samples(64), parser.parse_args().steps)
    dist.destroy_process_group()
