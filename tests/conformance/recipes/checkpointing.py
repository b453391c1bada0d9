"""Gradient checkpointing, with several optimizers."""

import recipe
import torch
from torch.utils.checkpoint import checkpoint

AREA = "Own loops"

torch.manual_seed(0)
body, head = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh()), torch.nn.Linear(32, 4)
model = torch.nn.Sequential(body, head)
optimizers = [
    torch.optim.AdamW(body.parameters(), lr=1e-2),
    torch.optim.SGD(head.parameters(), lr=1e-1, momentum=0.9),
]
data = recipe.Samples()


def loss_of(x, y):
    return torch.nn.functional.cross_entropy(head(checkpoint(body, x, use_reentrant=False)), y)


def update():
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizers)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_of(x, y))
        update()
    session.close()
else:
    for _, [(x, y)] in recipe.plain_steps(data, recipe.STEPS):
        loss_of(x, y).backward()
        update()
recipe.report(model, optimizers)
