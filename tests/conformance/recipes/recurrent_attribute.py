"""A recurrent network that keeps its hidden state in a plain attribute, from batch to batch."""

import recipe
import torch

AREA = "Buffers that forward changes"
REFUSED = "forward carries 'hidden' from one micro-batch to the next"


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.head = torch.nn.GRUCell(16, 8), torch.nn.Linear(8, 4)
        self.hidden = None

    def forward(self, x):
        if self.hidden is None:
            self.hidden = torch.zeros(len(x), 8)
        self.hidden = self.cell(x, self.hidden)
        out = self.head(self.hidden)
        self.hidden = self.hidden.detach()
        return out


torch.manual_seed(0)
model = Reader()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
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
