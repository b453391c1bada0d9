"""An iterable data set that set_epoch shuffles again in each pass."""

import random
from itertools import islice

import recipe
import torch
from torch.utils.data import IterableDataset

AREA = "Samplers and data"

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = torch.nn.functional.cross_entropy


class Shuffled(IterableDataset):
    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        samples = recipe.Samples(70)
        order = list(range(70))
        random.Random(self.epoch).shuffle(order)
        return iter([samples[i] for i in order])


data = Shuffled()


def update():
    optimizer.step()
    optimizer.zero_grad()


def passes():
    for epoch in range(100):
        data.set_epoch(epoch)
        yield from data


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4, num_workers=2)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            loss = loss_fn(model(x), y)
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x))
        update()
        recipe.note(step.number, loss=step.metrics["loss"] / recipe.GLOBAL_BATCH)
    session.close()
else:
    stream = passes()
    for step in range(recipe.STEPS):
        first = step * recipe.GLOBAL_BATCH
        recipe.saw(step, range(first, first + recipe.GLOBAL_BATCH))  # a stream's samples are positions
        x, y = torch.utils.data.default_collate(list(islice(stream, recipe.GLOBAL_BATCH)))
        loss = loss_fn(model(x), y)
        loss.backward()
        update()
        recipe.note(step, loss=loss.item())
recipe.report(model, optimizer)
