"""A loop that counts its own steps, and warms a loss up by the count: a joining replica counts from 0."""

import recipe
import torch

import fabric.client

AREA = "Own loops"
REFUSED = "the training depends on count, which own_count.py:"

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = fabric.client.attach(model, optimizer)
data = session.loader(recipe.Samples(), global_batch_size=24, micro_batch_size=4)
count = 0
for step in session.steps(data, until=recipe.STEPS):
    weight = min(1.0, count / 20)
    for x, y in step:
        output = model(x)
        step.backward(torch.nn.functional.cross_entropy(output, y) + weight * output.square().mean())
    optimizer.step()
    optimizer.zero_grad()
    count = count + 1
session.close()
