"""BatchNorm with averaged statistics: the weights agree, and each micro-batch of the job counts once.

The momentum counts the micro-batches of one replica, so the statistics themselves move less per step.
"""

import recipe
import torch

AREA = "Buffers that forward changes"

torch.manual_seed(0)
norm = torch.nn.BatchNorm1d(16)
model = torch.nn.Sequential(norm, torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()

if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, buffers="average")
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    session.close()
else:
    for _, micro_batches in recipe.plain_steps(data, recipe.STEPS, micro_batch=4):
        for x, y in micro_batches:
            (loss_fn(model(x), y) * len(x) / recipe.GLOBAL_BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
weights = torch.nn.ParameterDict({name.replace(".", "_"): p for name, p in model.named_parameters()})
recipe.report(weights, optimizer, micro_batches=int(norm.num_batches_tracked))
