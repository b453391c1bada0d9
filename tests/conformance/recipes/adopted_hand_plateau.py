"""A plain script under --adopt that halves its learning rate where a validation is worse than the best."""

import recipe
import torch
from torch.utils.data import DataLoader

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
REFUSED = "the training depends on best, which adopted_hand_plateau.py:"

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
training = DataLoader(recipe.Samples(), batch_size=recipe.GLOBAL_BATCH // recipe.REPLICAS, shuffle=True)
held_out = DataLoader(recipe.Samples(48), batch_size=24)

best = 1e9
for _ in range(2):
    for x, y in training:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        value = sum(torch.nn.functional.cross_entropy(model(x), y).item() for x, y in held_out)
    if value > 0.95 * best:
        optimizer.param_groups[0]["lr"] *= 0.5
    best = min(best, value)
recipe.report(model, optimizer)
