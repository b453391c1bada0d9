"""A learnable temperature beside the model."""

import recipe
import torch

AREA = "State and optimizers"
REFUSED = "that is not in the model, so its gradient is not averaged"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()
temperature = torch.nn.Parameter(torch.ones(()))
optimizer = torch.optim.SGD([*model.parameters(), temperature], lr=0.1)


def update():
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_fn(model(x) * temperature, y))
        update()
    session.close()
else:
    for _, batches in recipe.plain_steps(data, recipe.STEPS, micro_batch=4):
        for x, y in batches:
            (loss_fn(model(x) * temperature, y) / len(batches)).backward()
        update()
recipe.report(model, optimizer)
