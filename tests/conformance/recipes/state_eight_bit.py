"""Optimizer state in eight bits, with a scale for each block."""

import recipe
import torch

AREA = "State and optimizers"
TOLERANCE = 2e-2  # a value between two codes may go to either


class EightBit(torch.optim.Optimizer):
    """Momentum as ``uint8`` codes, and an attribute that says how often it was quantised."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        self.quantised = 0

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["codes"] = torch.full(p.shape, 128, dtype=torch.uint8)
                    state["scale"] = torch.zeros((), dtype=torch.float64)
                momentum = (state["codes"].float() - 128) * state["scale"].float() * 0.9 + p.grad
                state["scale"] = momentum.abs().max().double() / 127
                state["codes"] = (momentum / state["scale"].float() + 128).round().clamp(0, 255).byte()
                p.sub_(momentum, alpha=group["lr"])
        self.quantised += 1


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()
optimizer = EightBit(model.parameters())


def update():
    optimizer.step()
    optimizer.zero_grad()


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
recipe.report(model, quantised=optimizer.quantised)
