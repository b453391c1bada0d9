"""An exponential moving average of the weights by torch's AveragedModel."""

import recipe
import torch

AREA = "State and optimizers"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
ema = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))


def update():
    optimizer.step()
    ema.update_parameters(model)
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, state={"ema": ema})
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
recipe.report({"model": model, "ema": ema}, optimizer)
