"""A plain script under --adopt that keeps the weights of its best validation, and loads them at its end."""

import copy

import recipe
import torch
from torch.utils.data import DataLoader

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
REFUSED = "keeps the weights that measure best, and a replica that joins has not measured"

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
training = DataLoader(recipe.Samples(), batch_size=recipe.GLOBAL_BATCH // recipe.REPLICAS, shuffle=True)
held_out = DataLoader(recipe.Samples(48), batch_size=24)

best, best_weights = 1e9, model.state_dict()
for _ in range(2):
    for x, y in training:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        value = sum(torch.nn.functional.cross_entropy(model(x), y).item() for x, y in held_out)
    if value < best:
        best, best_weights = value, copy.deepcopy(model.state_dict())
model.load_state_dict(best_weights)
recipe.report(model, optimizer)
