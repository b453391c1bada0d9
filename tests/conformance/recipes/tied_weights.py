"""An output layer that has the weights of the embedding, and an input that no batch holds."""

import recipe
import torch

AREA = "Own loops"

torch.manual_seed(0)
embedding, output = torch.nn.Embedding(8, 16), torch.nn.Linear(16, 8, bias=False)
output.weight = embedding.weight
model = torch.nn.ModuleDict({"embedding": embedding, "mix": torch.nn.Linear(16, 16), "output": output})
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
data = recipe.Samples()


def loss_of(x, y):
    tokens = (x[:, :4] > 0).long() + 2 * (x[:, 4:8] > 0).long()
    hidden = torch.tanh(model["mix"](embedding(tokens).mean(1)))
    return torch.nn.functional.cross_entropy(output(hidden), y)


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
recipe.report(model, optimizer)
