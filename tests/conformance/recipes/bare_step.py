"""A loop that prints the last loss behind its micro-batches: a joining replica's first step has none."""

import recipe
import torch

import fabric.client

AREA = "Own loops"
REFUSED = "reads loss, which only the loop over the micro-batches sets"

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
session = fabric.client.attach(model, optimizer)
data = session.loader(recipe.Samples(), global_batch_size=24, micro_batch_size=4)
for step in session.steps(data, until=recipe.STEPS):
    for x, y in step:
        loss = torch.nn.functional.cross_entropy(model(x), y)
        step.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    if step.number % 5 == 0:
        print(f"step {step.number}: loss {loss.item():.4f}", flush=True)
session.close()
