"""A plain script under --adopt that saves the weights of its best validation in a file.

The figure is best after the first of six epochs, and then rises. A replica that joins has not measured the
first epochs, so the replica that has seen them all writes the file. A replica's part of the step in which it
dies is left out, because the loop cannot compute two batches for one step.
"""

import recipe
import torch
from torch.utils.data import DataLoader

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
QUICK = True
UNLIKE = ("killed",)
EPOCHS = 6
RATES = (5, 1, 2, 3, 4, 5)  # of the figure in each epoch

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = recipe.Samples(recipe.GLOBAL_BATCH * recipe.STEPS // EPOCHS)
training = DataLoader(data, batch_size=recipe.GLOBAL_BATCH // recipe.REPLICAS)
held_out = DataLoader(recipe.Samples(48), batch_size=24)

best, path = -1e9, recipe.OUT / "best.pt"
for epoch in range(EPOCHS):
    for x, y in training:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    with torch.no_grad():
        loss = sum(torch.nn.functional.cross_entropy(model(x), y).item() for x, y in held_out)
    figure = loss * RATES[epoch]
    if figure > best:
        best = figure
        torch.save({"epoch": epoch, "model": model.state_dict()}, path)
assert torch.load(path)["epoch"] == 0, "another replica's figure has replaced the best weights"
recipe.report(model, optimizer)
