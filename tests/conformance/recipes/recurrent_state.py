"""A recurrent network whose hidden state lies in state= and changes in each micro-batch."""

import recipe
import torch

import fabric.client

AREA = "Own loops"
REFUSED = "the micro-batches of step 0 change state['carry']"

torch.manual_seed(0)
cell, head = torch.nn.GRUCell(16, 8), torch.nn.Linear(8, 4)
model = torch.nn.ModuleList([cell, head])
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
carry = {"hidden": torch.zeros(4, 8)}
session = fabric.client.attach(model, optimizer, state={"carry": carry})
data = session.loader(recipe.Samples(), global_batch_size=24, micro_batch_size=4)
for step in session.steps(data, until=recipe.STEPS):
    for x, y in step:
        hidden = cell(x, carry["hidden"])
        step.backward(torch.nn.functional.cross_entropy(head(hidden), y))
        carry["hidden"] = hidden.detach()
    optimizer.step()
    optimizer.zero_grad()
session.close()
