"""A loop of Lightning Fabric under --adopt: setup_dataloaders of a SubsetRandomSampler, accumulation.

A replica's part of the step in which it dies is left out, because the loop cannot compute two batches for
one step.
"""

import recipe
import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, SubsetRandomSampler

AREA = "Lightning"
NEEDS = ("lightning_fabric",)
LAUNCH = "--adopt"
UNLIKE = ("killed",)

torch.manual_seed(0)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
model = torch.nn.Linear(16, 4)
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
sampler = SubsetRandomSampler(range(0, 240, 2), generator=torch.Generator().manual_seed(1))
batch_size = recipe.GLOBAL_BATCH // recipe.REPLICAS // 2
loader = fabric.setup_dataloaders(DataLoader(recipe.Samples(), batch_size, sampler=sampler))
steps = 0
while steps < recipe.STEPS:
    for number, (x, y) in enumerate(loader, 1):
        with fabric.no_backward_sync(model, enabled=number % 2 == 1):
            fabric.backward(torch.nn.functional.cross_entropy(model(x), y) / 2)
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if steps == recipe.STEPS:
                break
recipe.report(model.module, optimizer.optimizer, steps=steps)
