"""A mixture of experts: AdamW does not move an expert that no sample of the step chose."""

import recipe
import torch

AREA = "Own loops"
QUICK = True

torch.manual_seed(0)


class Experts(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(16, 16)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(16, 4) for _ in range(6))

    def forward(self, x, chosen):
        x, out = torch.tanh(self.first(x)), 0
        for number, expert in enumerate(self.experts):
            mine = chosen == number
            if mine.any():
                out = out + mine[:, None] * expert(x)
        return out


model = Experts()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()


def choice(x, step):
    """Expert 0 or 1 by the sample, with one in eight samples for a third; experts 4 and 5 from step 12 on."""
    chosen = (x[:, 0] > 0).long() + torch.where(x[:, 1] > 1.15, 2, 0)
    return chosen + (2 if step >= 12 else 0)


def update(step, loss):
    unused = [e.weight.grad is None for e in model.experts]
    optimizer.step()
    optimizer.zero_grad()
    norms = {f"norm{i}": e.weight.norm().item() for i, e in enumerate(model.experts)}
    recipe.note(step, unused=sum(unused), loss=loss, **norms)


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            loss = loss_fn(model(x, choice(x, step.number)), y)
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x))
        update(step.number, step.metrics["loss"] / recipe.GLOBAL_BATCH)
    session.close()
else:
    for number, [(x, y)] in recipe.plain_steps(data, recipe.STEPS):
        loss = loss_fn(model(x, choice(x, number)), y)
        loss.backward()
        update(number, loss.item())
recipe.report(model, optimizer)
