"""A plain script under --adopt: SubsetRandomSampler, epochs with a short last batch, a whole validation.

Two samples are left for the last batch, so one of three replicas has none.

A replica's part of the step in which it dies is left out, because the loop cannot compute two batches for
one step.
"""

import recipe
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
UNLIKE = ("killed",)
QUICK = True

torch.manual_seed(0)
data = recipe.Samples(200)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = torch.nn.functional.cross_entropy
training = SubsetRandomSampler(range(0, 196, 2), generator=torch.Generator().manual_seed(1))
validation = SubsetRandomSampler(range(1, 200, 2), generator=torch.Generator().manual_seed(2))
loader = DataLoader(data, batch_size=recipe.GLOBAL_BATCH // recipe.REPLICAS, sampler=training)
held_out = DataLoader(data, batch_size=20, sampler=validation)
steps = 0
while steps < recipe.STEPS:
    for x, y in loader:
        optimizer.zero_grad()
        loss_fn(model(x), y).backward()
        optimizer.step()
        steps += 1
        if steps == recipe.STEPS:
            break
    samples = sum(len(x) for x, _ in held_out)
recipe.report(model, optimizer, steps=steps, validation_samples=samples)
