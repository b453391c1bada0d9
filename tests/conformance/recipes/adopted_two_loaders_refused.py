"""A plain script under --adopt that trains on two DataLoaders at once."""

import recipe
import torch
from torch.utils.data import DataLoader

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
REFUSED = "the script trains on batches of the DataLoader over Samples that --adopt does not deal out"

model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
labelled = DataLoader(recipe.Samples(), batch_size=8, shuffle=True)
unlabelled = DataLoader(recipe.Samples(480), batch_size=16)
for (x, y), (other, _) in zip(labelled, unlabelled, strict=False):
    optimizer.zero_grad()
    (torch.nn.functional.cross_entropy(model(x), y) + model(other).var()).backward()
    optimizer.step()
