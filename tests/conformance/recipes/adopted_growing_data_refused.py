"""A plain script under --adopt whose data set grows from round to round, as in active learning."""

import recipe
import torch
from torch.utils.data import DataLoader, Subset

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
REFUSED = "adds to the data in a loop"

samples = recipe.Samples(240)
labelled = Subset(samples, list(range(48)))
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(1, 4):
    for x, y in DataLoader(labelled, batch_size=8, shuffle=True):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    labelled.indices += range(48 * number, 48 * (number + 1))
