"""An unchanged script whose data set counts the items that it has given, and adds noise by the count."""

import recipe
import torch
from torch.utils.data import DataLoader

AREA = "Plain scripts under --adopt"
LAUNCH = "--adopt"
REFUSED = "the data depend on self.given, which Noisy.__getitem__ keeps from call to call"


class Noisy(recipe.Samples):
    given = 0

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        self.given += 1
        return x + 0.01 * self.given, y


torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(Noisy(), batch_size=recipe.GLOBAL_BATCH // recipe.REPLICAS, shuffle=True)
for _ in range(3):
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
recipe.report(model, optimizer)
