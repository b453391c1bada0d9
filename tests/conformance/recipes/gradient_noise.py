"""Noise on the gradients (SGLD, privacy): torch, numpy and random draw the same on all replicas.

Without fabric the update draws other numbers, so the weights agree as two runs with two seeds do.
"""

import random

import numpy as np
import recipe
import torch

AREA = "Random numbers in the update"
TOLERANCE = 0.2

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()


def update():
    with torch.no_grad():
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p), alpha=0.02)
            p.grad.add_(0.01 * np.random.randn() + 0.01 * random.gauss(0, 1))
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        update()
    session.close()
else:
    for _, [(x, y)] in recipe.plain_steps(data, recipe.STEPS):
        loss_fn(model(x), y).backward()
        update()
recipe.report(model, optimizer)
