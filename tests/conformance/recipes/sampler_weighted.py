"""WeightedRandomSampler, with a short last step in each pass."""

import recipe
import torch
from torch.utils.data import WeightedRandomSampler

AREA = "Samplers and data"

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples(120)
weights = [1.0 + 9.0 * (i % 5 == 0) for i in range(120)]
sampler = WeightedRandomSampler(weights, 100, generator=torch.Generator().manual_seed(4))


def update():
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(
        data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4, sampler=sampler, epoch_end="short"
    )
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
        indices = list(sampler)
        steps = [indices[at : at + recipe.GLOBAL_BATCH] for at in range(0, len(indices), recipe.GLOBAL_BATCH)]
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
