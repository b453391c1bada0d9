"""A GradScaler that is not in state."""

import recipe
import torch

import fabric.client

AREA = "Own loops"
REFUSED = "a GradScaler scales the loss and is not in state="

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
session = fabric.client.attach(model, optimizer)
data = session.loader(recipe.Samples(), global_batch_size=24, micro_batch_size=4)
for step in session.steps(data, until=recipe.STEPS):
    for x, y in step:
        step.backward(scaler.scale(torch.nn.functional.cross_entropy(model(x), y)))
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
session.close()
