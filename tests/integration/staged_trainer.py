"""A loop of three epochs on one data set and two on another, with a scheduler, and a validation per epoch.

STAGED_PRINT=loss prints the loss behind the micro-batches, as a step without any cannot.
"""

import os

import torch
from pace import leave_time
from tiny_trainer import Samples

import fabric.client
from fabric.errors import NotAMember

PER_EPOCH = 6
STEPS = 5 * PER_EPOCH


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    first = session.loader(Samples(60), global_batch_size=24, micro_batch_size=2, seed=3)
    second = session.loader(Samples(40), global_batch_size=20, micro_batch_size=4, seed=5)
    for epoch in range(5):
        for step in session.steps(first if epoch < 3 else second, until=(epoch + 1) * PER_EPOCH):
            leave_time(session, STEPS - session.committed_step, 0.02)
            for x, y in step:
                loss = torch.nn.functional.cross_entropy(model(x), y)
                step.backward(loss)
                session.metrics(n=len(x))
            optimizer.step()
            optimizer.zero_grad()
            if os.environ.get("STAGED_PRINT") == "loss":
                print(f"step {step.number}: {loss.item():.3f}", flush=True)
        scheduler.step()
        try:
            session.all_reduce(torch.ones(1))
        except NotAMember as error:
            print(f"validates alone: {error}", flush=True)
    session.close()
    print(f"FINAL lr {optimizer.param_groups[0]['lr']:.6f}", flush=True)
