"""Gradual unfreezing: a layer joins the optimizer in mid-training."""

import recipe
import torch

AREA = "State and optimizers"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()
optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)
counters = {"steps": 0}


def update():
    optimizer.step()
    model.zero_grad()
    counters["steps"] += 1
    if counters["steps"] == 6:
        optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, state={"counters": counters})
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
recipe.report(model, optimizer, **counters)
