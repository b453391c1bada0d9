"""The user's loops of the data tests: policies, streams, poison, averaged buffers, a sampler.

``DATA`` names the loop, ``DATA_OPTIONS`` is JSON for ``session.loader``, ``DATA_POISON`` the data set index
that kills its reader.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from pace import leave_time
from tiny_trainer import Samples, build

import fabric.client

OPTIONS = "DATA_OPTIONS"
PAUSE_S = 0.005


class Poisonous(Samples):
    """A data set in which reading certain samples kills the process, as a corrupt file in a C decoder
    might.
    """

    def __getitem__(self, index: int):
        if str(index) == os.environ.get("DATA_POISON"):
            os.kill(os.getpid(), signal.SIGKILL)
        if str(index) == os.environ.get("DATA_BAD"):
            if "DATA_BAD_ONCE" in os.environ:
                # Only the process that makes the file meets the bad sample.
                with contextlib.suppress(FileExistsError), Path(os.environ["DATA_BAD_ONCE"]).open("x"):
                    raise ValueError("this sample cannot be decoded now")
                return super().__getitem__(index)
            raise ValueError("this sample cannot be decoded")
        return super().__getitem__(index)


class Lines(torch.utils.data.IterableDataset):
    """An iterable of samples in a fixed order; ``begun`` counts its iterations."""

    def __init__(self, size: int) -> None:
        self._samples = Samples(size)

    def __iter__(self) -> Iterator[object]:
        for i in range(len(self._samples)):
            yield self._samples[i]


class OnSomeHosts(Samples):
    """A data set of which this process can read only the shards of its loader."""

    ranges: list[tuple[int, int]] | None = None

    def __getitem__(self, index: int):
        if self.ranges is not None and not any(begin <= index < end for begin, end in self.ranges):
            raise ValueError(f"sample {index} is on other hosts")
        return super().__getitem__(index)


def model_with_statistics():
    torch.manual_seed(1)
    layers = torch.nn.Linear(16, 8), torch.nn.BatchNorm1d(8), torch.nn.ReLU(), torch.nn.Linear(8, 4)
    model = torch.nn.Sequential(*layers)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(dataset: object, after: Callable[[object], None] = lambda step: None, **attaching: object) -> None:
    """tiny_trainer's loop with ``DATA_OPTIONS``."""
    model, optimizer, scheduler = build(64) if not attaching else (*model_with_statistics(), None)
    state = {} if scheduler is None else {"scheduler": scheduler}
    session = fabric.client.attach(model, optimizer, state=state, **attaching)
    options = json.loads(os.environ.get(OPTIONS, "{}"))
    sizes = int(os.environ.get("DATA_GLOBAL", "24")), int(os.environ.get("DATA_MICRO", "2"))
    data = session.loader(dataset, global_batch_size=sizes[0], micro_batch_size=sizes[1], seed=3, **options)
    if isinstance(dataset, OnSomeHosts):
        if not session.settings.rack:
            dataset.ranges = data.shards
        model.eval()  # without dropout, so that one process can repeat the steps
    until = int(os.environ.get("TINY_STEPS", "30"))
    for step in session.steps(data, until):
        leave_time(session, until - step.number, PAUSE_S)
        if isinstance(dataset, OnSomeHosts):
            dataset.ranges = data.shards  # with racks the shards are known from the first step on
        for x, y in step:
            time.sleep(PAUSE_S)  # this pause stands for a device that computes
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        after(step)
    buffers = {name: b.double().sum().item() for name, b in model.named_buffers()}
    values = [p.detach().double().abs().sum().item() for p in model.parameters()]
    print(
        json.dumps({"values": values, "buffers": buffers, "lr": [g["lr"] for g in optimizer.param_groups]}),
        flush=True,
    )
    session.close()


def sampled() -> None:
    """A loop that fabric does not own: an ordinary DataLoader with worker processes, and ``exchange``."""
    torch.manual_seed(1)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    session = fabric.client.attach(model, optimizer)
    samples = Samples(100)
    sampler = session.sampler(len(samples), global_batch_size=24, seed=3)
    loader = torch.utils.data.DataLoader(samples, batch_size=sampler.per_step, sampler=sampler)
    until = int(os.environ.get("TINY_STEPS", "30"))
    while session.committed_step < until:
        for x, y in loader:
            time.sleep(PAUSE_S * 2)  # stands for a device that computes
            if session.members:
                leave_time(session, until - session.committed_step, PAUSE_S)
            torch.nn.functional.mse_loss(model(x), y).backward()
            session.exchange(weight=len(x))
            optimizer.step()
            optimizer.zero_grad()
            if session.committed_step >= until:
                break
    session.close()


LOOPS = {
    "map": lambda: train(Poisonous(100)),
    "stream": lambda: train(Lines(50)),
    "buffers": lambda: train(Samples(100), buffers="average"),
    "sampler": sampled,
    "local": lambda: train(OnSomeHosts(98)),
}


def main() -> None:
    torch.set_num_threads(1)
    LOOPS[os.environ.get("DATA", "map")]()


if __name__ == "__main__":
    main()
