"""Every replica that computes a micro-batch draws the same."""

import random

import numpy as np
import torch

from fabric.client.data.randomness import micro_batch_seed, seed_everything


def draw():
    return torch.rand(3).tolist(), np.random.rand(3).tolist(), random.random()


def test_a_micro_batch_draws_the_same_again_and_other_micro_batches_differ():
    seed_everything(1, 2, 3)
    first = draw()
    draw()
    seed_everything(1, 2, 3)
    assert draw() == first
    seeds = {micro_batch_seed(a, b, c) for a in range(3) for b in range(20) for c in range(20)}
    assert len(seeds) == 3 * 20 * 20 and max(seeds) < 2**63
