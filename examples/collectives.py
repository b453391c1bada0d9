"""Collectives between replicas after a step, called by the loop and through a torch process group."""

import torch
import torch.distributed as dist
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client

TIMEOUT_S = 60.0


def mean_over_replicas(session: fabric.client.Session, value: torch.Tensor) -> torch.Tensor | None:
    """Repeat the call in the next epoch when a replica was lost; leave it out when this one was."""
    for _ in range(3):
        try:
            return session.all_reduce(value, op="mean", timeout_s=TIMEOUT_S)
        except fabric.client.CollectiveFailed as error:
            print(f"again: {error}")
        except fabric.client.NotAMember:
            return None
    return None


def main() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = fabric.client.attach(model, optimizer)
    group = fabric.client.process_group(session, timeout_s=TIMEOUT_S)
    data = session.loader(Samples(), global_batch_size=24, micro_batch_size=6)
    for step in session.steps(data, until=STEPS):
        losses = [torch.zeros(())]
        for x, y in step:
            loss = loss_fn(model, x, y)
            step.backward(loss)
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        if step.replayed:  # this replica catches up, and takes part in no collective
            continue
        highest = mean_over_replicas(session, torch.stack(losses).max())
        counted = torch.ones(())
        try:
            dist.all_reduce(counted, group=group)  # as a library would
        except (fabric.client.CollectiveFailed, fabric.client.NotAMember):
            continue
        if highest is not None:
            print(f"step {step.number}: mean {highest.item():.17g} of {int(counted)} replicas", flush=True)
    session.close()


if __name__ == "__main__":
    main()
