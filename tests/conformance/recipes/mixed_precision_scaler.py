"""Mixed precision with a GradScaler: a loss that overflows skips the update on all replicas."""

import recipe
import torch

AREA = "Own loops"
TOLERANCE = 2e-2  # half precision rounds a batch otherwise than its micro-batches


class Outlier(recipe.Samples):
    """One sample is too large for half precision."""

    def __getitem__(self, index):
        x, y = super().__getitem__(index)
        return (x * 1e6 if index == 77 else x), y


torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6, growth_interval=5)
loss_fn = torch.nn.functional.cross_entropy
data = Outlier()


def forward(x, y):
    with torch.autocast("cpu", dtype=torch.float16):
        return loss_fn(model(x), y)


def update():
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer, state={"scaler": scaler})
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(scaler.scale(forward(x, y)))
        update()
        recipe.note(step.number, scale=scaler.get_scale())
    session.close()
else:
    for number, micro_batches in recipe.plain_steps(data, recipe.STEPS, micro_batch=4):
        for x, y in micro_batches:
            scaler.scale(forward(x, y) * len(x) / recipe.GLOBAL_BATCH).backward()
        update()
        recipe.note(number, scale=scaler.get_scale())
recipe.report(model, optimizer, scaler=scaler.state_dict())
