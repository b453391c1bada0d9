"""A plain script under --adopt that repeats its DataLoader by itertools.cycle."""

import itertools

import recipe
import torch
from torch.utils.data import DataLoader

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
REFUSED = (
    "the script repeats its DataLoader by itertools.cycle, which gives the batches of the first pass again"
)

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
batches = itertools.cycle(DataLoader(recipe.Samples(), recipe.GLOBAL_BATCH // recipe.REPLICAS, shuffle=True))
for _ in range(recipe.STEPS):
    x, y = next(batches)
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
recipe.report(model, optimizer)
