"""A moving average of the weights and of BatchNorm's statistics (AveragedModel with use_buffers=True).

The statistics move by the micro-batches of one replica, so three replicas have others than one.
"""

import recipe
import torch

AREA = "State and optimizers"
UNLIKE = ("killed",)

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
mean_of = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=mean_of, use_buffers=True)
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()


def update():
    optimizer.step()
    average.update_parameters(model)
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, state={"ema": average}, buffers="average")
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        update()
    session.close()
else:
    for _, micro_batches in recipe.plain_steps(data, recipe.STEPS, micro_batch=4):
        for x, y in micro_batches:
            (loss_fn(model(x), y) * len(x) / recipe.GLOBAL_BATCH).backward()
        update()
recipe.report({"model": model, "average": average}, optimizer)
