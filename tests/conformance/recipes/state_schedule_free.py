"""A schedule-free optimizer, with its modes for training and evaluation."""

import recipe
import torch

AREA = "State and optimizers"


class ScheduleFree(torch.optim.Optimizer):
    """As published: ``y`` is trained, ``z`` moves by the gradient, ``x`` is their average."""

    def __init__(self, params, lr=0.1, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train_mode": True})

    @torch.no_grad()
    def move(self, train):
        for group in self.param_groups:
            if group["train_mode"] != train:
                for p in group["params"]:
                    if "z" in self.state[p]:
                        beta = group["beta"] if train else 1 / group["beta"]
                        p.lerp_(self.state[p]["z"], 1 - beta)
            group["train_mode"] = train

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            weight = 1 / (group["k"] + 1)
            for p in group["params"]:
                z = self.state[p].setdefault("z", p.clone())
                p.lerp_(z, weight).add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - weight) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()
optimizer = ScheduleFree(model.parameters())


def update():
    optimizer.step()
    optimizer.zero_grad()
    optimizer.move(train=False)  # an evaluation after each step sees the average
    with torch.no_grad():
        loss_fn(model(data[0][0][None]), torch.tensor([data[0][1]]))
    optimizer.move(train=True)


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_fn(model(x), y))
        update()
    session.close()
else:
    for _, batches in recipe.plain_steps(data, recipe.STEPS, micro_batch=4):
        for x, y in batches:
            (loss_fn(model(x), y) / len(batches)).backward()
        update()
recipe.report(model, optimizer)
