"""A buffer that forward changes and that no choice names is refused, with the buffer's name."""

import recipe
import torch

AREA = "Buffers that forward changes"
REFUSED = "forward has changed 'seen', and each replica would change them differently: choose for each"
QUICK = True

torch.manual_seed(0)


class Counting(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x):
        self.seen += x.square().mean().detach()
        return self.layer(x)


model = Counting()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = recipe.Samples()

if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    session.close()
