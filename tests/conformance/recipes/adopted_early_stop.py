"""A plain script under --adopt that stops after three validations without a better one."""

import recipe
import torch
from torch.utils.data import DataLoader

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
REFUSED = "by bad, which is measured, and a replica that joins has not measured what the others have"

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = DataLoader(recipe.Samples(), batch_size=recipe.GLOBAL_BATCH // recipe.REPLICAS, shuffle=True)
held_out = DataLoader(recipe.Samples(48), batch_size=24)


@torch.no_grad()
def validate(model):
    model.eval()
    losses = [torch.nn.functional.cross_entropy(model(x), y) for x, y in held_out]
    model.train()
    return float(torch.stack(losses).mean())


best, bad = 1e9, 0
for _ in range(recipe.STEPS):
    for x, y in training:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    value = validate(model)
    if value < best:
        best, bad = value, 0
    else:
        bad += 1
    if bad >= 3:
        break
recipe.report(model, optimizer)
