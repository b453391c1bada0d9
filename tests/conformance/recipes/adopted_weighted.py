"""A plain script under --adopt: WeightedRandomSampler, and epochs that the script leaves early.

A replica's part of the step in which it dies is left out, because the loop cannot compute two batches for
one step.
"""

import itertools

import recipe
import torch
from torch.utils.data import DataLoader, WeightedRandomSampler

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
UNLIKE = ("killed",)

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = WeightedRandomSampler(range(1, 241), 192, generator=torch.Generator().manual_seed(1))
loader = DataLoader(recipe.Samples(), batch_size=recipe.GLOBAL_BATCH // recipe.REPLICAS, sampler=sampler)
for _ in range(4):
    for x, y in itertools.islice(loader, recipe.STEPS // 4):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
recipe.report(model, optimizer)
