"""A recurrent network whose hidden state the loop resets before each micro-batch."""

import recipe
import torch

AREA = "Buffers that forward changes"


class Reader(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.head = torch.nn.LSTM(4, 8, batch_first=True), torch.nn.Linear(8, 4)
        self.hidden = None

    def forward(self, x):
        out, self.hidden = self.lstm(x, self.hidden)
        return self.head(out[:, -1])


torch.manual_seed(0)
model = Reader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
loss_fn = torch.nn.functional.cross_entropy
data = recipe.Samples()


def loss_of(x, y):
    model.hidden = None
    first, second = x.view(len(x), 4, 4).split(2, dim=1)  # two parts of the sequence, one after the other
    return (loss_fn(model(first), y) + loss_fn(model(second), y)) / 2


def update():
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4)
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            step.backward(loss_of(x, y))
        update()
    session.close()
else:
    for _, [(x, y)] in recipe.plain_steps(data, recipe.STEPS):
        loss_of(x, y).backward()
        update()
recipe.report(model, optimizer)
