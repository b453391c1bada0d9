"""A loop of your own: clipping, a scheduler, the loss of each step."""

import recipe
import torch

AREA = "Own loops"
QUICK = True

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()


def update():
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            loss = loss_fn(model(x), y)
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x))
        update()
        recipe.note(step.number, loss=step.metrics["loss"] / recipe.GLOBAL_BATCH)
    session.close()
else:
    for number, [(x, y)] in recipe.plain_steps(data, recipe.STEPS):
        loss = loss_fn(model(x), y)
        loss.backward()
        update()
        recipe.note(number, loss=loss.item())
recipe.report(model, optimizer, rate=scheduler.get_last_lr()[0])
