"""A moving average of the weights (EMA) beside the model, in the shared state."""

import recipe
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

AREA = "Own loops"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()


def update():
    optimizer.step()
    average.update_parameters(model)
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, state={"average": average})
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        update()
    session.close()
else:
    for _, [(x, y)] in recipe.plain_steps(data, recipe.STEPS):
        loss_fn(model(x), y).backward()
        update()
recipe.report({"model": model, "average": average}, optimizer)
