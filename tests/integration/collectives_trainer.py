"""The tiny trainer with collectives between replicas after every commit."""

import os
import time

import torch
import torch.distributed as dist
from pace import leave_time
from tiny_trainer import Samples, build

import fabric.client
from fabric.client import CollectiveFailed


def repeat(call, *arguments, **options):
    """Call a collective until it has a result; print the failures."""
    while True:
        try:
            return call(*arguments, **options)
        except CollectiveFailed as error:
            print(f"failed {type(error).__name__}: {error}", flush=True)


def main() -> None:
    torch.set_num_threads(1)
    model, optimizer, scheduler = build(64)
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=2, seed=3)
    step_s = float(os.environ.get("TINY_STEP_S", "0.02"))
    until = int(os.environ.get("TINY_STEPS", "30"))
    group = fabric.client.process_group(session)
    replica = os.environ.get("FABRIC_REPLICA", "replica0")
    for step in session.steps(data, until):
        leave_time(session, until - step.number, step_s)
        total = torch.zeros((), dtype=torch.float64)
        for x, y in step:
            time.sleep(step_s / 4)
            loss = torch.nn.functional.mse_loss(model(x), y)
            step.backward(loss)
            total += loss.item() * len(x)
            session.metrics(loss=loss.item() * len(x))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step.replayed:
            continue
        ones = repeat(session.all_reduce, torch.ones(200_000), timeout_s=60.0)
        losses = repeat(session.all_gather, total, timeout_s=60.0)
        print(f"ones {step.number}: {int(ones.max())} {int(ones.min())}", flush=True)
        summed = sum(x.item() for x in losses.values())
        print(f"loss {step.number}: {summed:.12g} of {step.metrics['loss']:.12g}", flush=True)
        print(f"names {step.number}: {' '.join(losses)}", flush=True)
        mean = total.clone()
        repeat(dist.all_reduce, mean, op=dist.ReduceOp.AVG, group=group)
        print(f"mean {step.number}: {mean.item():.12g} {summed / len(losses):.12g}", flush=True)
        writer = repeat(session.broadcast, model[0].weight.detach(), timeout_s=60.0)
        assert torch.equal(writer, model[0].weight), f"{replica} has other parameters"
        repeat(session.barrier)
    session.close()


if __name__ == "__main__":
    main()
