"""bfloat16 weights with float32 masters that the loop keeps in state."""

import recipe
import torch

AREA = "State and optimizers"
TOLERANCE = 5e-2  # bfloat16 weights round their sums

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()
model.to(torch.bfloat16)
masters = [torch.nn.Parameter(p.detach().float()) for p in model.parameters()]
optimizer = torch.optim.AdamW(masters, lr=1e-2)


def update():
    for p, master in zip(model.parameters(), masters, strict=True):
        master.grad = p.grad.float()
    optimizer.step()
    with torch.no_grad():
        for p, master in zip(model.parameters(), masters, strict=True):
            p.copy_(master)
    optimizer.zero_grad()
    model.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, state={"masters": {"weights": masters}})
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_fn(model(x.bfloat16()).float(), y))
        update()
    session.close()
else:
    for _, batches in recipe.plain_steps(data, recipe.STEPS, micro_batch=4):
        for x, y in batches:
            (loss_fn(model(x.bfloat16()).float(), y) / len(batches)).backward()
        update()
recipe.report(model, optimizer)
