"""A loop that clips by the norms of its earlier gradients (AutoClip): a joining replica has no norms."""

import recipe
import torch

import fabric.client

AREA = "Own loops"
REFUSED = "the training depends on norms, which clip_history.py:"

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
session = fabric.client.attach(model, optimizer)
data = session.loader(recipe.Samples(), global_batch_size=24, micro_batch_size=4)
norms = []
for step in session.steps(data, until=recipe.STEPS):
    for x, y in step:
        step.backward(torch.nn.functional.cross_entropy(model(x), y))
    norms.append(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item())
    torch.nn.utils.clip_grad_norm_(model.parameters(), sorted(norms)[len(norms) // 10])
    optimizer.step()
    optimizer.zero_grad()
session.close()
