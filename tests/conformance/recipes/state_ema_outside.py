"""An AveragedModel that is not in state."""

import recipe
import torch

AREA = "State and optimizers"
REFUSED = "an AveragedModel averages the model and is not in state="

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ema = torch.optim.swa_utils.AveragedModel(model)


def update():
    optimizer.step()
    ema.update_parameters(model)
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
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
recipe.report(model, optimizer)
