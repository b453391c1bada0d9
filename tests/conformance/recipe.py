"""What a recipe uses: its sizes, its data, and the evidence that it leaves for the suite.

A recipe is a short training script, written as its users write it. The suite runs the recipe without fabric,
with ``FABRIC_DISABLE=1``, as a job of one replica, and as a job of three replicas of which two are killed.
This module knows the way from the environment. Only recipes import it, each in a process of its own.
"""

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

STEPS = int(os.environ["RECIPE_STEPS"])  # committed steps of the whole training
GLOBAL_BATCH = 24  # samples of a step, on all replicas together
REPLICAS = int(os.environ["RECIPE_REPLICAS"])  # with which the job starts; 1 without fabric
FABRIC = os.environ["RECIPE_WAY"] != "plain"  # false: train without fabric
OUT = Path(os.environ["RECIPE_OUT"])  # folder of the recipe's own files, shared by all replicas
_EVIDENCE = Path(os.environ["RECIPE_EVIDENCE"])  # folder of what this process reports

torch.set_num_threads(1)


class Samples(torch.utils.data.Dataset):
    """``size`` pairs (x, y): ``x`` has ``features`` numbers, ``y`` is a class below ``classes``.

    Each pair is a function of its index. Two pairs differ, so other samples give other weights.
    """

    def __init__(self, size: int = 240, features: int = 16, classes: int = 4) -> None:
        self.size, self.features, self.classes = size, features, classes

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < self.size:
            raise IndexError(index)
        x = torch.randn(self.features, generator=torch.Generator().manual_seed(index))
        return x, int(x[: self.classes].argmax())


def plain_steps(
    data: Any,
    until: int,
    *,
    start: int = 0,
    global_batch: int = GLOBAL_BATCH,
    micro_batch: int | None = None,
    seed: int = 0,
    shown_from: int = 0,
) -> Iterator[tuple[int, list[Any]]]:
    """Yield the number and the micro-batches of each step, in the documented order of ``session.loader``.

    This is the DataLoader of a recipe without fabric. By default a step is one batch. ``shown_from``: the
    step of the training at which this order begins.
    """
    size, micro_batch = len(data), micro_batch or global_batch
    for step in range(start, until):
        positions = range(step * global_batch, (step + 1) * global_batch)
        indices = [int(_pass(size, seed, p // size)[p % size]) for p in positions]
        saw(shown_from + step, indices)
        cuts = [indices[at : at + micro_batch] for at in range(0, global_batch, micro_batch)]
        yield shown_from + step, [torch.utils.data.default_collate([data[i] for i in cut]) for cut in cuts]


def saw(step: int, indices: Sequence[int]) -> None:
    """Say which samples the training without fabric used in ``step``."""
    _append("samples", {"step": step, "samples": sorted(indices)})


def note(step: int, **figures: float) -> None:
    """Say which figures the user sees after ``step``; all replicas and all ways must agree about them.

    ``step`` counts from 0. A step that a replica sees twice has the figures of the last time.
    """
    _append("notes", {"step": step, **{name: float(value) for name, value in figures.items()}})


def report(
    model: torch.nn.Module | dict[str, torch.nn.Module],
    optimizer: Any = None,
    **counters: Any,
) -> None:
    """Report the end of the training, once: the weights, the optimizer's state, and counters by name.

    Tensors are compared up to rounding with the training without fabric, and bit by bit between replicas.
    """
    modules = model if isinstance(model, dict) else {"model": model}
    weights = {
        f"{name}.{key}": value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value
        for name, module in modules.items()
        for key, value in module.state_dict().items()
    }
    optimizers = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    states = [x.state_dict() for x in optimizers if x is not None]
    body = {"weights": weights, "optimizer": states, "counters": counters}
    torch.serialization.save(body, _EVIDENCE / f"{os.getpid()}.pt")


def _append(kind: str, line: dict[str, Any]) -> None:
    with (_EVIDENCE / f"{os.getpid()}.{kind}").open("a") as file:
        file.write(json.dumps(line) + "\n")


def _pass(size: int, seed: int, number: int) -> np.ndarray:
    return np.random.Generator(np.random.PCG64([seed, number])).permutation(size)
