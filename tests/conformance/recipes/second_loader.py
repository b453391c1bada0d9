"""A loop that reads unlabelled data of another DataLoader beside those of its session."""

import itertools

import recipe
import torch
from torch.utils.data import DataLoader

import fabric.client

AREA = "Own loops"
REFUSED = "the training reads unlabelled, an iterator that second_loader.py:"

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
unlabelled = itertools.cycle(DataLoader(recipe.Samples(48), batch_size=4, shuffle=True))
session = fabric.client.attach(model, optimizer)
data = session.loader(recipe.Samples(), global_batch_size=24, micro_batch_size=4)
for step in session.steps(data, until=recipe.STEPS):
    for x, y in step:
        other, _ = next(unlabelled)
        fit = torch.nn.functional.cross_entropy(model(x), y)
        step.backward(fit + 0.1 * (model(other) - model(other + 0.1)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
session.close()
