"""A trainer whose worker processes read; it prints their process ids and waits to be killed."""

import os
import signal
import sys
from pathlib import Path

import torch

import fabric.client


class Records(torch.utils.data.Dataset):
    """Opens its file at the first use, as is recommended for worker processes."""

    file = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.file is None:
            self.file = self.path.open("rb")
        self.file.seek(index)
        return torch.tensor([index, self.file.read(1)[0], os.getpid()])


def main(path: Path) -> None:
    model = torch.nn.Linear(1, 1)
    session = fabric.client.attach(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    data = session.loader(Records(path), global_batch_size=16, micro_batch_size=4, num_workers=2)
    processes: set[int] = set()
    for step in session.steps(data, until=4):
        for batch in step:
            assert batch[:, 0].tolist() == batch[:, 1].tolist()
            processes |= set(batch[:, 2].tolist())
            step.backward(model(batch[:, :1].float()).mean())
    print(*processes, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
