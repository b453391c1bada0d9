"""A plain script under --adopt: shuffle=False, two batches in a step, drop_last, a learning rate by epoch.

A replica's part of the step in which it dies is left out, because the loop cannot compute two batches for
one step.
"""

import recipe
import torch
from torch.utils.data import DataLoader

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
UNLIKE = ("killed",)

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
batch_size = recipe.GLOBAL_BATCH // recipe.REPLICAS // 2
loader = DataLoader(recipe.Samples(150), batch_size=batch_size, drop_last=True)
for epoch in range(recipe.STEPS // 6):
    for group in optimizer.param_groups:
        group["lr"] = 0.2 / (1 + epoch)
    for number, (x, y) in enumerate(loader, 1):
        (torch.nn.functional.cross_entropy(model(x), y) / 2).backward()
        if number % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
recipe.report(model, optimizer, epochs=epoch + 1, batches=number)
