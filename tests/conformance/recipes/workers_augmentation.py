"""Worker processes draw random augmentations; a replica that inherits a micro-batch draws the same."""

import random

import numpy as np
import recipe
import torch
from torch.utils.data import SequentialSampler

from fabric.client.data.randomness import seed_everything

AREA = "Samplers and data"
MICRO_BATCH = 4

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = torch.nn.functional.cross_entropy


class Augmented(recipe.Samples):
    """Noise of torch, a shift of numpy, a flip of random."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        x = x + 0.1 * torch.randn(len(x)) + 0.1 * float(np.random.randn())
        return (x.flip(0) if random.random() < 0.5 else x), y


data = Augmented()
sampler = SequentialSampler(data)


def update():
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(
        data,
        global_batch_size=recipe.GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        sampler=sampler,
        num_workers=2,
    )
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            loss = loss_fn(model(x), y)
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x))
        update()
        recipe.note(step.number, loss=step.metrics["loss"] / recipe.GLOBAL_BATCH)
    session.close()
else:
    # The documented rule: the generators are seeded from the seed, the step and the micro-batch.
    for step in range(recipe.STEPS):
        first = step * recipe.GLOBAL_BATCH
        indices = [i % len(data) for i in range(first, first + recipe.GLOBAL_BATCH)]
        recipe.saw(step, indices)
        total = 0.0
        for number in range(recipe.GLOBAL_BATCH // MICRO_BATCH):
            seed_everything(0, step, number)
            cut = indices[number * MICRO_BATCH : (number + 1) * MICRO_BATCH]
            x, y = torch.utils.data.default_collate([data[i] for i in cut])
            loss = loss_fn(model(x), y) * len(x) / recipe.GLOBAL_BATCH
            loss.backward()
            total += loss.item()
        update()
        recipe.note(step, loss=total)
recipe.report(model, optimizer)
