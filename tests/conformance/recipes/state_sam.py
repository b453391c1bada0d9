"""Sharpness-aware minimisation: two passes, between which all weights move."""

import recipe
import torch

AREA = "State and optimizers"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def sharp_loss(x, y):
    """Move the weights to the worst point nearby, and return the loss there and the weights from before."""
    gradients = torch.autograd.grad(loss_fn(model(x), y), list(model.parameters()))
    norm = torch.stack([g.norm() for g in gradients]).norm() + 1e-12
    before = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p, g in zip(model.parameters(), gradients, strict=True):
            p.add_(g, alpha=float(0.05 / norm))
    return loss_fn(model(x), y), before


@torch.no_grad()
def put_back(before):
    for p, kept in zip(model.parameters(), before, strict=True):
        p.copy_(kept)


def update():
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, snapshots=fabric.client.EverySteps(1))
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            loss, before = sharp_loss(x, y)
            step.backward(loss)
            put_back(before)
        update()
    session.close()
else:
    for _, batches in recipe.plain_steps(data, recipe.STEPS, micro_batch=4):
        for x, y in batches:
            loss, before = sharp_loss(x, y)
            (loss / len(batches)).backward()
            put_back(before)
        update()
recipe.report(model, optimizer)
