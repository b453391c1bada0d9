"""A `zero_grad` before each micro-batch, which drops the gradients of those before."""

import recipe
import torch

import fabric.client

AREA = "Own loops"
REFUSED = "the gradients of this step's earlier micro-batches are gone"

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
session = fabric.client.attach(model, optimizer)
data = session.loader(recipe.Samples(), global_batch_size=24, micro_batch_size=4)
for step in session.steps(data, until=recipe.STEPS):
    for x, y in step:
        optimizer.zero_grad()
        step.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
session.close()
