"""Packed sequences weighted by their tokens; some micro-batches have no token."""

import recipe
import torch

AREA = "Own loops"
QUICK = True

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = recipe.Samples()


def masked(x, y):
    """Most samples have a token to predict; whole micro-batches may have none."""
    return torch.where(x[:, 0] > 0.8, y, torch.full_like(y, -100))


def update():
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=2)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            y = masked(x, y)
            tokens = int((y != -100).sum())
            step.backward(torch.nn.functional.cross_entropy(model(x), y), weight=tokens)
        update()
    session.close()
else:
    for _, [(x, y)] in recipe.plain_steps(data, recipe.STEPS):
        y = masked(x, y)
        if (y != -100).any():
            torch.nn.functional.cross_entropy(model(x), y).backward()
        update()
recipe.report(model, optimizer)
