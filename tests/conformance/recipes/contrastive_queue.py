"""A queue of keys and a second encoder that forward moves (MoCo): all replicas take those of one of them.

The queue has the keys of one replica, so the weights of a job of three differ from those without fabric.
"""

import recipe
import torch

AREA = "Buffers that forward changes"
TOLERANCE = 0.5

torch.manual_seed(0)


class Contrast(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key = torch.nn.Linear(16, 8), torch.nn.Linear(16, 8)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.randn(8, 96))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        with torch.no_grad():
            for key, query in zip(self.key.parameters(), self.query.parameters(), strict=True):
                key.data = key.data * 0.99 + query.data * 0.01
            keys = torch.nn.functional.normalize(self.key(x + 0.1))
        queries = torch.nn.functional.normalize(self.query(x))
        positive = (queries * keys).sum(1, keepdim=True)
        negative = queries @ self.queue.clone()
        with torch.no_grad():
            at = int(self.pointer)
            self.queue[:, at : at + len(x)] = keys.T
            self.pointer[0] = (at + len(x)) % 96
        logits = torch.cat([positive, negative], 1) / 0.5
        return torch.nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.int64))


model = Contrast()
optimizer = torch.optim.SGD(model.query.parameters(), lr=0.05)
data = recipe.Samples()

if recipe.FABRIC:
    import fabric.client

    choices = {"queue": "first", "pointer": "first", "key.*": "first"}
    session = fabric.client.attach(model, optimizer, buffers=choices)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, _ in step:
            step.backward(model(x))
        recipe.note(step.number, unused=sum(p.grad is None for p in model.query.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    session.close()
else:
    for number, micro_batches in recipe.plain_steps(data, recipe.STEPS, micro_batch=4):
        for x, _ in micro_batches:
            (model(x) * len(x) / recipe.GLOBAL_BATCH).backward()
        recipe.note(number, unused=0)
        optimizer.step()
        optimizer.zero_grad()
recipe.report({"query": model.query, "key": model.key}, optimizer)
