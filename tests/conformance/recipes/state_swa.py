"""Stochastic weight averaging with SWALR from the middle of the training on."""

import recipe
import torch

AREA = "State and optimizers"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
average = torch.optim.swa_utils.AveragedModel(model)
scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.05, anneal_epochs=5)
counters = {"steps": 0}


def update():
    optimizer.step()
    optimizer.zero_grad()
    counters["steps"] += 1
    if counters["steps"] > recipe.STEPS // 2:
        average.update_parameters(model)
        scheduler.step()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(
        model, optimizer, state={"average": average, "scheduler": scheduler, "counters": counters}
    )
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        update()
    session.close()
else:
    for _, batches in recipe.plain_steps(data, recipe.STEPS, micro_batch=4):
        for x, y in batches:
            (loss_fn(model(x), y) / len(batches)).backward()
        update()
recipe.report({"model": model, "average": average}, optimizer, **counters)
