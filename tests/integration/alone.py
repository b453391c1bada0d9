"""Training in one process, without fabric, to compare jobs with."""

from collections.abc import Callable

import torch
from sharded_trainer import MICRO_BATCH, example

from fabric.client.data.sample_plan import SamplePlan


def losses_alone(
    model: torch.nn.Module,
    steps: int,
    global_batch: int,
    clip: float = 0.0,
    begin: Callable[[int], object] = lambda step: None,
) -> list[float]:
    """The loss of every step of ``model`` on the sharded trainers' data. ``clip`` is the norm for gradient
    clipping, if any. ``begin`` is called before each step.
    """
    data, plan = example("fsdp2").samples(64), SamplePlan(64, global_batch, MICRO_BATCH, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        total = 0.0
        begin(step)
        for micro_batch in range(plan.micro_batches):
            rows = [data[i] for i in plan.samples(step, micro_batch)]
            x, y = torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows])
            loss = torch.nn.functional.mse_loss(model(x), y) * (MICRO_BATCH / global_batch)
            loss.backward()
            total += loss.item()
        if clip:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses
