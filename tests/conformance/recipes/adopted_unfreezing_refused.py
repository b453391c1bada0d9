"""A plain script under --adopt that unfreezes its body in a later epoch."""

import recipe
import torch
from torch.utils.data import DataLoader

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
REFUSED = "unfreezes a part of the model in a later step"

body = torch.nn.Linear(16, 16)
model = torch.nn.Sequential(body, torch.nn.Tanh(), torch.nn.Linear(16, 4))
body.requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(recipe.Samples(), batch_size=8, shuffle=True)
for epoch in range(3):
    if epoch == 1:
        body.requires_grad_(True)
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
