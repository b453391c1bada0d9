"""Hard examples: a loop weighs each sample by the loss that it had the last time."""

import recipe
import torch

import fabric.client

AREA = "Own loops"
REFUSED = "the training depends on weights, which loss_table.py:"


class Numbered(recipe.Samples):
    def __getitem__(self, index):
        return index, *super().__getitem__(index)


torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
weights = torch.ones(240)
session = fabric.client.attach(model, optimizer)
data = session.loader(Numbered(), global_batch_size=24, micro_batch_size=4)
for step in session.steps(data, until=recipe.STEPS):
    for i, x, y in step:
        losses = torch.nn.functional.cross_entropy(model(x), y, reduction="none")
        step.backward((weights[i] * losses).mean())
        weights[i] = losses.detach()
    optimizer.step()
    optimizer.zero_grad()
session.close()
