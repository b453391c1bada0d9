"""A split by SubsetRandomSampler under --adopt, in epochs, with accumulation and a validation in eval mode.

A replica's part of the step in which it dies is left out, because the loop cannot compute two batches for
one step.
"""

import recipe
import torch
from torch.utils.data import DataLoader, SubsetRandomSampler

AREA = "Plain scripts with --adopt"
LAUNCH = "--adopt"
UNLIKE = ("killed",)

torch.manual_seed(0)
data = recipe.Samples(240)
even, odd = range(0, 240, 2), range(1, 240, 2)
sampler = SubsetRandomSampler(even, generator=torch.Generator().manual_seed(5))
batch = recipe.GLOBAL_BATCH // recipe.REPLICAS // 2
training = DataLoader(data, batch_size=batch, sampler=sampler)
validation = DataLoader(data, batch_size=30, sampler=SubsetRandomSampler(odd))

model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=8, gamma=0.5)
loss_fn = torch.nn.functional.cross_entropy

steps = 0
while steps < recipe.STEPS:
    for number, (x, y) in enumerate(training):
        (loss_fn(model(x), y) / 2).backward()
        if number % 2:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            steps += 1
        if steps == recipe.STEPS:
            break
    model.eval()
    right = [(model(x).argmax(dim=1) == y).sum().item() for x, y in validation]
    model.train()
recipe.report(model, optimizer, steps=steps, validated=sum(right), rate=scheduler.get_last_lr())
