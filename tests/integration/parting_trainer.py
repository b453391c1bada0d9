"""A loop whose state differs on one replica: ``PARTING`` names the thing that this process changes alone."""

import os

import torch
from tiny_trainer import Samples

import fabric.client

PARTING = os.environ.get("PARTING", "")


class Progress:
    """A callback with a state, as frameworks have it."""

    def __init__(self) -> None:
        self.seen = 0

    def state_dict(self) -> dict:
        return {"seen": self.seen}

    def load_state_dict(self, state: dict) -> None:
        self.seen = state["seen"]


def main() -> None:
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Linear(32, 8), torch.nn.Linear(8, 4))
    model.register_buffer("scale", torch.ones(8))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    progress = Progress()
    session = fabric.client.attach(model, optimizer, state={"progress": progress})
    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=2, seed=3)
    for step in session.steps(data, until=int(os.environ["TINY_STEPS"])):
        for x, y in step:
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        progress.seen += 1
        if step.number == 3:
            part(model, progress)
    session.close()


def part(model: torch.nn.Module, progress: Progress) -> None:
    with torch.no_grad():
        if PARTING == "noise in a layer":
            weight = model.get_parameter("1.weight")
            weight += torch.randn(weight.shape, generator=torch.Generator().manual_seed(os.getpid()))
        elif PARTING == "a buffer":
            model.get_buffer("scale").mul_(1.5)
        elif PARTING == "a callback":
            progress.seen += 5
        elif PARTING == "a flipped bit":
            model.get_parameter("0.weight").view(-1).view(torch.int32)[62] ^= 1  # no sample of step 4 has it


if __name__ == "__main__":
    main()
