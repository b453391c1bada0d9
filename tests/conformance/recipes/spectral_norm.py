"""Spectral norm: all replicas take the vectors of the power iteration of one of them.

The norm that the power iteration has reached differs slightly with the number of its iterations.
"""

import recipe
import torch
from torch.nn.utils.parametrizations import spectral_norm

AREA = "Buffers that forward changes"
TOLERANCE = 0.1

torch.manual_seed(0)
model = torch.nn.Sequential(
    spectral_norm(torch.nn.Linear(16, 32)), torch.nn.LeakyReLU(), spectral_norm(torch.nn.Linear(32, 4))
)
optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.0, 0.9))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()

if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    session.close()
else:
    for _, micro_batches in recipe.plain_steps(data, recipe.STEPS, micro_batch=4):
        for x, y in micro_batches:
            (loss_fn(model(x), y) * len(x) / recipe.GLOBAL_BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
recipe.report(model, optimizer)
