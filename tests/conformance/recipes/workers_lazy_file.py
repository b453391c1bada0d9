"""Four worker processes read a file that the data set opens at its first use."""

import os
import struct

import recipe
import torch
from torch.utils.data import Dataset, SequentialSampler

AREA = "Samplers and data"
QUICK = True

torch.manual_seed(0)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
loss_fn = torch.nn.functional.cross_entropy
path = recipe.OUT / "records"
if not path.exists():
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(b"".join(struct.pack("<i", i) + bytes(4092) for i in range(240)))
    unfinished.rename(path)


class Records(Dataset):
    file = None

    def __len__(self):
        return 240

    def __getitem__(self, index):
        if self.file is None:
            self.file = path.open("rb")
        self.file.seek(index * 4096)
        (number,) = struct.unpack("<i", self.file.read(4))
        assert number == index, f"asked for record {index}, and read {number}"
        x = torch.randn(16, generator=torch.Generator().manual_seed(number))
        return x, int(x[:4].argmax())


data = Records()
sampler = SequentialSampler(data)


def update():
    optimizer.step()
    optimizer.zero_grad()


if recipe.FABRIC:
    import fabric.client

    session = fabric.client.attach(model, optimizer)
    loader = session.loader(
        data, global_batch_size=recipe.GLOBAL_BATCH, micro_batch_size=4, sampler=sampler, num_workers=4
    )
    for step in session.steps(loader, until=recipe.STEPS):
        for x, y in step:
            loss = loss_fn(model(x), y)
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x), samples=len(x))
        update()
        recipe.note(step.number, loss=step.metrics["loss"] / step.metrics["samples"])
    session.close()
else:
    number = epoch = 0
    while number < recipe.STEPS:
        indices = list(sampler)
        steps = [indices[at : at + recipe.GLOBAL_BATCH] for at in range(0, len(indices), recipe.GLOBAL_BATCH)]
        for indices in steps[: recipe.STEPS - number]:
            recipe.saw(number, indices)
            x, y = torch.utils.data.default_collate([data[i] for i in indices])
            loss = loss_fn(model(x), y)
            loss.backward()
            update()
            recipe.note(number, loss=loss.item())
            number += 1
        epoch += 1
recipe.report(model, optimizer)
