"""Stochastic rounding of bf16 weights: the update draws random numbers, the same on all replicas.

Without fabric the update draws other numbers, so the weights agree as two runs with two seeds do.
"""

import recipe
import torch

AREA = "Random numbers in the update"
TOLERANCE = 0.2

torch.manual_seed(0)


class RoundedSGD(torch.optim.SGD):
    """SGD of bf16 weights, which are rounded up or down at random."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                exact = p.float() - group["lr"] * p.grad.float()
                bits = exact.view(torch.int32) + torch.randint_like(p, 1 << 16, dtype=torch.int32)
                p.copy_((bits & -65536).view(torch.float32).to(torch.bfloat16))


model = torch.nn.Linear(16, 4).to(torch.bfloat16)
optimizer = RoundedSGD(model.parameters(), lr=1e-2)
data = recipe.Samples()


def loss_of(x, y):
    return torch.nn.functional.cross_entropy(model(x.to(torch.bfloat16)).float(), y)


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_of(x, y))
        optimizer.step()
        optimizer.zero_grad()
    session.close()
else:
    for _, [(x, y)] in recipe.plain_steps(data, recipe.STEPS):
        loss_of(x, y).backward()
        optimizer.step()
        optimizer.zero_grad()
recipe.report(model)
