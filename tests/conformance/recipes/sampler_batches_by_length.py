"""A batch sampler that sorts samples by length into batches of unequal sizes."""

import recipe
import torch
from torch.utils.data import Sampler

AREA = "Samplers and data"

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples(120)


class ByLength(Sampler):
    """Twelve batches, of eight long samples or of twelve short ones, in random order."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(2)

    def __len__(self):
        return 12

    def __iter__(self):
        order = torch.randperm(12, generator=self.generator).tolist()
        batches = [list(range(i * 8, i * 8 + 8)) for i in range(6)]
        batches += [list(range(48 + i * 12, 60 + i * 12)) for i in range(6)]
        return iter([batches[i] for i in order])


sampler = ByLength()


def update():
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=3, micro_batch_size=1, batch_sampler=sampler)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            loss = loss_fn(model(x), y)
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x), samples=len(x))
        update()
        recipe.note(step.number, loss=step.metrics["loss"] / step.metrics["samples"])
    session.close()
else:
    number = epoch = 0
    while number < recipe.STEPS:
        batches = list(sampler)
        steps = [[i for batch in batches[at : at + 3] for i in batch] for at in range(0, 12, 3)]
        for indices in steps[: recipe.STEPS - number]:
            recipe.saw(number, indices)
            x, y = torch.utils.data.default_collate([data[i] for i in indices])
            loss = loss_fn(model(x), y)
            loss.backward()
            update()
            recipe.note(number, loss=loss.item())
            number += 1
        epoch += 1
recipe.report(model, optimizer)
