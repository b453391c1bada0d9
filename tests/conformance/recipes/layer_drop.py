"""Layer drop: each step leaves a layer out, whose momentum and weight decay rest in that step."""

import recipe
import torch

AREA = "Own loops"

torch.manual_seed(0)
layers = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(4))
head = torch.nn.Linear(16, 4)
model = torch.nn.ModuleDict({"layers": layers, "head": head})
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()


def forward(x, step):
    dropped = int(torch.randint(4, (), generator=torch.Generator().manual_seed(step)))
    for number, layer in enumerate(layers):
        if number != dropped:
            x = x + torch.tanh(layer(x))
    return head(x)


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_fn(forward(x, step.number), y))
        recipe.note(step.number, unused=sum(p.grad is None for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    session.close()
else:
    for number, [(x, y)] in recipe.plain_steps(data, recipe.STEPS):
        loss_fn(forward(x, number), y).backward()
        recipe.note(number, unused=sum(p.grad is None for p in model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
recipe.report(model, optimizer)
