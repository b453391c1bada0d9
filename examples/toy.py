"""A tiny model and tiny data in place of yours, so that the examples run anywhere.

``EXAMPLE_STEPS`` is the number of steps of a job. Every micro-batch sleeps ``EXAMPLE_PAUSE_S`` seconds, so
that a job of this size is not over before a restarted replica is back.
"""

import os
import time

import torch

STEPS = int(os.environ.get("EXAMPLE_STEPS", "200"))
PAUSE_S = float(os.environ.get("EXAMPLE_PAUSE_S", "0.01"))


class Samples(torch.utils.data.Dataset):
    """Inputs and the outputs of a fixed linear map."""

    def __init__(self, size: int = 256) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 16, generator=generator)
        self.y = self.x @ torch.randn(16, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def make_model() -> torch.nn.Module:
    """Make a model with the same initial weights on every replica."""
    torch.set_num_threads(1)
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))


def loss_fn(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the mean loss over the micro-batch."""
    time.sleep(PAUSE_S)
    return torch.nn.functional.mse_loss(model(x), y)
