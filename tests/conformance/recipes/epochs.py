"""Epochs: a scheduler and a validation after each epoch."""

import recipe
import torch

AREA = "Own loops"
QUICK = True
PER_EPOCH = 4

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.8)
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples(96)
held_out = torch.randn(32, 16, generator=torch.Generator().manual_seed(5))


def update():
    optimizer.step()
    optimizer.zero_grad()


def validate():
    with torch.no_grad():
        return float(model(held_out).softmax(1).max(1).values.mean())


epochs = recipe.STEPS // PER_EPOCH
if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for epoch in range(epochs):
        for step in session.steps(loader, until=(epoch + 1) * PER_EPOCH):
            for x, y in step:
                step.backward(loss_fn(model(x), y))
            update()
        scheduler.step()
        validate()
    session.close()
else:
    for epoch in range(epochs):
        for _, [(x, y)] in recipe.plain_steps(data, (epoch + 1) * PER_EPOCH, start=epoch * PER_EPOCH):
            loss_fn(model(x), y).backward()
            update()
        scheduler.step()
        validate()
recipe.report(model, optimizer, rate=optimizer.param_groups[0]["lr"], validation=round(validate(), 3))
