"""Preconditioners in lists beside bfloat16 weights, as SOAP and Shampoo keep them."""

import recipe
import torch

AREA = "State and optimizers"
TOLERANCE = 5e-2  # bfloat16 weights round their sums


class Preconditioned(torch.optim.Optimizer):
    def __init__(self, params, lr=0.02):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                g = p.grad.float().reshape(p.shape[0], -1)
                state = self.state[p]
                if not state:
                    sides = [torch.eye(g.shape[0]), torch.eye(g.shape[1])]
                    state.update(step=0, GG=sides, Q={"side": (torch.zeros_like(g), None), "kind": "shampoo"})
                state["step"] += 1
                state["GG"][0].lerp_(g @ g.T, 0.1)
                state["GG"][1].lerp_(g.T @ g, 0.1)
                state["Q"]["side"][0].lerp_(g, 0.1)
                scale = state["GG"][0].trace() * state["GG"][1].trace()
                moved = state["Q"]["side"][0] / (1 + scale.sqrt())
                p.copy_((p.float().reshape(g.shape) - group["lr"] * moved).reshape(p.shape))


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()
model.to(torch.bfloat16)
optimizer = Preconditioned(model.parameters())


def update():
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
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
