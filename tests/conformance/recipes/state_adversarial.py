"""Adversarial training (FGM), which moves the embedding by .data and puts it back."""

import recipe
import torch

AREA = "State and optimizers"

torch.manual_seed(0)
embedding = torch.nn.Embedding(2000, 16, padding_idx=0)
head = torch.nn.Linear(16, 4)
model = torch.nn.ModuleDict({"embedding": embedding, "head": head})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
data = recipe.Samples()


def loss_fn(x, y):
    tokens = 1 + (x.abs() * 500).long() % 1999
    return torch.nn.functional.cross_entropy(head(embedding(tokens).mean(1)), y)


def attack(loss):
    (gradient,) = torch.autograd.grad(loss, embedding.weight, retain_graph=True)
    backup = embedding.weight.data.clone()
    embedding.weight.data.add_(gradient * (0.5 / (gradient.norm() + 1e-12)))
    return backup


def update():
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, snapshots=fabric.client.EverySteps(1))
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            loss = loss_fn(x, y)
            backup = attack(loss)
            step.backward(loss + loss_fn(x, y))
            embedding.weight.data = backup
        update()
    session.close()
else:
    for _, batches in recipe.plain_steps(data, recipe.STEPS, micro_batch=4):
        for x, y in batches:
            loss = loss_fn(x, y)
            backup = attack(loss)
            ((loss + loss_fn(x, y)) / len(batches)).backward()
            embedding.weight.data = backup
        update()
recipe.report(model, optimizer)
