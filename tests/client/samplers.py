"""Samplers without a session."""

from collections.abc import Callable

from fabric.client.data.sampler import StepSampler
from fabric.runtime.config import Settings


def step_sampler(
    size: int,
    global_batch_size: int,
    seed: int,
    part: tuple[int, int],
    step: Callable[[], int],
    alone: bool = False,
) -> StepSampler:
    """Return the sampler of data slot ``part[0]`` of ``part[1]``, whose job is at ``step()``."""
    number, replicas = part
    sampler = StepSampler(
        size,
        global_batch_size=global_batch_size,
        seed=seed,
        settings=Settings(replica=f"r{number}", replicas=str(replicas), disable=alone),
    )
    sampler.bind(step)
    return sampler
