"""A loop that lowers the rate of a Dropout after each step, by its old value."""

import recipe
import torch

import fabric.client

AREA = "Own loops"
REFUSED = "the training depends on drop.p, which dropout_schedule.py:"

torch.manual_seed(0)
drop = torch.nn.Dropout(0.5)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), drop, torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
session = fabric.client.attach(model, optimizer)
data = session.loader(recipe.Samples(), global_batch_size=24, micro_batch_size=4)
for step in session.steps(data, until=recipe.STEPS):
    for x, y in step:
        step.backward(torch.nn.functional.cross_entropy(model(x), y))
    optimizer.step()
    optimizer.zero_grad()
    drop.p = drop.p * 0.95
session.close()
