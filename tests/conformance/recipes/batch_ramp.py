"""A batch ramp: the global batch doubles twice, with a call of `session.steps` for each size."""

import recipe
import torch

AREA = "Own loops"

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (1 + step) / 8))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples(360)
ramp = [(recipe.STEPS // 3, 12), (2 * recipe.STEPS // 3, 24), (recipe.STEPS, 48)]  # until, samples of a step


def update():
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    for stage, (until, size) in enumerate(ramp):
        loader = session.loader(data, global_batch_size=size, micro_batch_size=4, seed=stage)
        for step in session.steps(loader, until=until):
            for x, y in step:
                loss = loss_fn(model(x), y)
                step.backward(loss)
                session.metrics(loss=loss.item() * len(x))
            update()
            recipe.note(step.number, loss=step.metrics["loss"] / size)
    session.close()
else:
    start = 0
    for stage, (until, size) in enumerate(ramp):
        steps = recipe.plain_steps(data, until - start, global_batch=size, seed=stage, shown_from=start)
        for number, [(x, y)] in steps:
            loss = loss_fn(model(x), y)
            loss.backward()
            update()
            recipe.note(number, loss=loss.item())
        start = until
recipe.report(model, optimizer, rate=scheduler.get_last_lr()[0])
