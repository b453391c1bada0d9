"""A collate function that counts its calls, and masks more of each batch by the count."""

import recipe
import torch
from torch.utils.data import default_collate

import fabric.client

AREA = "Samplers and data"
REFUSED = "the data depend on self.calls, which Masker.__call__ keeps from call to call (collator_memory.py:"


class Masker:
    def __init__(self):
        self.calls = 0

    def __call__(self, samples):
        self.calls += 1
        x, y = default_collate(samples)
        x[:, : min(8, self.calls // 10)] = 0
        return x, y


torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = fabric.client.attach(model, optimizer)
data = session.loader(recipe.Samples(), global_batch_size=24, micro_batch_size=4, collate_fn=Masker())
for step in session.steps(data, until=recipe.STEPS):
    for x, y in step:
        step.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
session.close()
