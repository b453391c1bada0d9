"""Randomness is not state: before each micro-batch every generator is seeded from (seed, step, index), so
whoever computes the micro-batch draws the same dropout masks and augmentations."""

import random

import numpy as np
import torch
import xxhash


def micro_batch_seed(seed: int, step: int, micro_batch: int) -> int:
    """A 63-bit seed: xxh3_64 of the three numbers."""
    return xxhash.xxh3_64_intdigest(f"{seed} {step} {micro_batch}".encode()) >> 1


def seed_everything(seed: int, step: int, micro_batch: int) -> None:
    """Seed torch (CUDA too), numpy's legacy generator and ``random`` for one micro-batch."""
    value = micro_batch_seed(seed, step, micro_batch)
    torch.manual_seed(value)
    np.random.seed(value & 0xFFFFFFFF)  # users draw from the legacy generator
    random.seed(value)
