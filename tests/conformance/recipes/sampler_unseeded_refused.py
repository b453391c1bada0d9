"""A sampler with another order on every replica (from the system's random numbers)."""

import secrets

import recipe
import torch
from torch.utils.data import Sampler

import fabric.client

AREA = "Samplers and data"
REFUSED = "the sampler Unseeded gives another order each time it begins"


class Unseeded(Sampler):
    def __len__(self):
        return 48

    def __iter__(self):
        return iter(sorted(range(48), key=lambda _: secrets.randbits(32)))


model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = fabric.client.attach(model, optimizer)
data = session.loader(recipe.Samples(), global_batch_size=24, micro_batch_size=4, sampler=Unseeded())
for step in session.steps(data, until=recipe.STEPS):
    for x, y in step:
        step.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
session.close()
