"""A DataLoader in a fixed order under --adopt, with worker processes.

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
data = recipe.Samples(240)
batch = recipe.GLOBAL_BATCH // recipe.REPLICAS
training = DataLoader(data, batch_size=batch, num_workers=1, persistent_workers=True)

model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
loss_fn = torch.nn.functional.cross_entropy

steps = 0
while steps < recipe.STEPS:
    for x, y in training:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        scheduler.step()
        steps += 1
        if steps == recipe.STEPS:
            break
recipe.report(model, optimizer, steps=steps, rate=scheduler.get_last_lr())
