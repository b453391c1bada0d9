"""Sentences for a job that fails: the error of the user's loop, and the samples of poison."""

from collections.abc import Callable, Iterable

import torch

from fabric.model import Poison, first_of, shortened

# Seconds for which a process whose loop has raised waits until the lighthouse acknowledges the error.
TELL_S = 5.0
_MOST_SAMPLES = 32
_MOST_CHARACTERS = 200


def is_device_fault(error: BaseException) -> bool:
    """Whether the error is a failure of the device, not of the program: then only this replica dies."""
    return isinstance(error, torch.AcceleratorError)


def describe(error: BaseException, at: tuple[int, int] | None, samples: Iterable[int]) -> str:
    """Return the exception in one line. ``at``: the step and micro-batch at which it was raised."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    text = shortened(text, _MOST_CHARACTERS)
    return text if at is None else f"{text} (at micro-batch {at[1]}, {_listed(list(samples))})"


def name_samples(poison: Iterable[Poison], samples: Callable[[int, int], list[int]]) -> str:
    """Return a sentence with the samples of every poisonous micro-batch, or an empty string."""
    parts = [
        f"micro-batch {micro_batch} of step {p.step} is {_listed(samples(p.step, micro_batch))}"
        for p in poison
        for micro_batch in p.micro_batches
    ]
    return f"; {'; '.join(parts)}" if parts else ""


def _listed(samples: list[int]) -> str:
    return f"samples {first_of(samples, _MOST_SAMPLES)}"
