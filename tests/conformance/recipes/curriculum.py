"""A curriculum: a second data set, with another batch size and other micro-batches."""

import recipe
import torch

AREA = "Own loops"

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
loss_fn = torch.nn.functional.cross_entropy
short, long = recipe.Samples(60), recipe.Samples(90)
turn = recipe.STEPS // 2


def update():
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    first = session.loader(short, global_batch_size=24, micro_batch_size=4)
    second = session.loader(long, global_batch_size=36, micro_batch_size=3, seed=1)
    for loader, until in ((first, turn), (second, recipe.STEPS)):
        for step in session.steps(loader, until=until):
            for x, y in step:
                step.backward(loss_fn(model(x), y))
            update()
    session.close()
else:
    for _, [(x, y)] in recipe.plain_steps(short, turn):
        loss_fn(model(x), y).backward()
        update()
    stage = recipe.plain_steps(long, recipe.STEPS - turn, global_batch=36, seed=1, shown_from=turn)
    for _, [(x, y)] in stage:
        loss_fn(model(x), y).backward()
        update()
recipe.report(model, optimizer)
