"""Several heads with one task in each step: the heads of other tasks rest."""

import recipe
import torch

AREA = "Own loops"

torch.manual_seed(0)
model = torch.nn.ModuleDict(
    {"body": torch.nn.Linear(16, 16), **{f"task{i}": torch.nn.Linear(16, 4) for i in range(3)}}
)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = recipe.Samples()


def loss_of(x, y, step):
    out = model[f"task{step // 4 % 3}"](torch.tanh(model["body"](x)))
    return torch.nn.functional.cross_entropy(out, y)


def update(step):
    recipe.note(step, unused=sum(p.grad is None for p in model.parameters()))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_of(x, y, step.number))
        update(step.number)
    session.close()
else:
    for number, [(x, y)] in recipe.plain_steps(data, recipe.STEPS):
        loss_of(x, y, number).backward()
        update(number)
recipe.report(model, optimizer)
