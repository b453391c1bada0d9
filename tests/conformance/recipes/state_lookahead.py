"""Lookahead around another optimizer, with a learning rate schedule."""

import recipe
import torch

AREA = "State and optimizers"


class Lookahead(torch.optim.Optimizer):
    """As published: it shares the inner optimizer's groups and writes both states."""

    def __init__(self, inner, k=3, alpha=0.5):
        self.inner, self.k, self.alpha = inner, k, alpha
        super().__init__(inner.param_groups, {})
        self.param_groups, self.fast_state = inner.param_groups, inner.state
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self):
        self.inner.step()
        for group in self.param_groups:
            group["counter"] += 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().clone())
                if group["counter"] % self.k == 0:
                    slow += (p - slow) * self.alpha
                    p.copy_(slow)

    def state_dict(self):
        return {**self.inner.state_dict(), "slow": super().state_dict()["state"]}

    def load_state_dict(self, state):
        groups = state["param_groups"]
        super().load_state_dict({"state": state["slow"], "param_groups": groups})
        self.inner.load_state_dict({"state": state["state"], "param_groups": groups})
        self.fast_state = self.inner.state


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()
optimizer = Lookahead(torch.optim.AdamW(model.parameters(), lr=1e-2))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 10))


def update():
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
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
recipe.report(model, optimizer, rate=optimizer.inner.param_groups[0]["lr"])
