"""A trainer with packed documents of varying length; a timed wait, by their tokens and attention, stands for
the device. While the file PACKED_SLOW exists, this replica takes PACKED_FACTOR times as long.
"""

import os
import random
import time
from pathlib import Path

import torch
from tiny_trainer import build

import fabric.client

TOKEN_S = 1e-5
PAIR_S = 1e-9
WIDTH = 16


class Packed(torch.utils.data.Dataset):
    """Each sample is the lengths of its documents, and regression data."""

    def __len__(self) -> int:
        return 1200

    def __getitem__(self, index: int):
        rng = random.Random(index)
        lengths = [float(rng.randrange(50, 1000)) for _ in range(4)]
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(WIDTH, generator=generator)
        return x, x[:4], torch.tensor(lengths)


def compute(lengths: list[float], slow: Path) -> None:
    """Wait in small pieces, so that the time of a stop adds to the wait."""
    seconds = sum(TOKEN_S * x + PAIR_S * x * x for x in lengths)
    factor = float(os.environ.get("PACKED_FACTOR", "3")) if slow.exists() else 1.0
    for _ in range(max(1, round(seconds * factor / 0.002))):
        time.sleep(0.002)


def main() -> None:
    torch.set_num_threads(1)
    model, optimizer, scheduler = build(WIDTH)
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    data = session.loader(Packed(), global_batch_size=12, micro_batch_size=1, seed=0)
    slow = Path(os.environ.get("PACKED_SLOW", "no-such-file"))
    for step in session.steps(data, until=int(os.environ["PACKED_STEPS"])):
        for x, y, lengths in step:
            documents = lengths.flatten()
            compute(documents.tolist(), slow)
            step.backward(torch.nn.functional.mse_loss(model(x), y), work=documents)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    session.close()
