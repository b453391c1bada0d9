"""Several losses, each with a backward of its own."""

import recipe
import torch

AREA = "Own loops"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = recipe.Samples()


def losses(x, y):
    out = model(x)
    return torch.nn.functional.cross_entropy(out, y), 0.1 * out.square().mean()


def update():
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            first, second = losses(x, y)
            step.backward(first, retain_graph=True)
            step.backward(second)
        update()
    session.close()
else:
    for _, [(x, y)] in recipe.plain_steps(data, recipe.STEPS):
        first, second = losses(x, y)
        first.backward(retain_graph=True)
        second.backward()
        update()
recipe.report(model, optimizer)
