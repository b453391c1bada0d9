"""Seeds every random generator from (seed, step, index) before each micro-batch.

Every replica that computes a micro-batch draws the same random numbers, and no generator's state is saved."""

import random
from functools import cache

import numpy as np
import torch
import xxhash


def micro_batch_seed(seed: int, step: int, micro_batch: int) -> int:
    """Return a 63-bit seed: xxh3_64 of the three numbers."""
    return xxhash.xxh3_64_intdigest(f"{seed} {step} {micro_batch}".encode()) >> 1


def seed_everything(seed: int, step: int, micro_batch: int) -> None:
    """Seed torch (CUDA too), numpy's legacy generator and ``random`` for one micro-batch."""
    value = micro_batch_seed(seed, step, micro_batch)
    if _has_devices():
        torch.manual_seed(value)
    else:
        # torch.manual_seed would keep a stack trace for each kind of device not yet initialised.
        torch.default_generator.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)  # users draw from the legacy generator
    random.seed(value)


@cache
def _has_devices() -> bool:
    return torch.accelerator.is_available()
