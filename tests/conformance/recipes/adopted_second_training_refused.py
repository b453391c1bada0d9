"""A plain script under --adopt that trains once for each learning rate."""

import recipe
import torch
from torch.utils.data import DataLoader

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
REFUSED = "makes a new SGD in each pass of a loop, and a job is one training"

loader = DataLoader(recipe.Samples(), batch_size=8, shuffle=True)
for lr in (0.1, 0.01):
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
