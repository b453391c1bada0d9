"""Seeds every random generator from (seed, step, index) before each micro-batch, and before each update.

Every replica that computes a micro-batch draws the same random numbers, and no generator's state is saved.
All replicas draw the same random numbers in an update (stochastic rounding, noise on gradients), however many
they drew before. Ranks of one replica draw the same numbers where the script has seeded them alike.
"""

import random
from collections.abc import Callable, Iterable
from functools import cache

import numpy as np
import torch
import xxhash
from torch.utils.hooks import RemovableHandle


def micro_batch_seed(seed: int, step: int, micro_batch: int, draws: int = 0) -> int:
    """Return a 63-bit seed: xxh3_64 of the numbers. ``draws``: that of the rank, see ``RankGroup``."""
    return xxhash.xxh3_64_intdigest(f"{seed} {step} {micro_batch}{_of_rank(draws)}".encode()) >> 1


def _of_rank(draws: int) -> str:
    return f" rank {draws}" if draws else ""


def seed_everything(seed: int, step: int, micro_batch: int, draws: int = 0) -> None:
    """Seed torch (CUDA too), numpy's legacy generator and ``random`` for one micro-batch."""
    seed_all(micro_batch_seed(seed, step, micro_batch, draws))


class UpdateRandomness:
    """Seeds the generators when a gradient is handed over.

    In ``session.steps`` each micro-batch is seeded, so the generators stay as the update leaves them. In a
    loop of the user's own the random numbers between updates are the user's: the first optimizer's step gives
    the generators back, as they were. A further optimizer's step is seeded again.
    """

    seed = 0
    gives_back = True  # false where the loop seeds the generators itself after each update

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer], draws: int = 0) -> None:
        """``draws``: that of this rank, see ``RankGroup``."""
        self.draws = draws
        self._in_steps = False
        self._step = -1  # of the newest hand-over
        self._parts = 0  # optimizers whose steps have begun since then
        self._give_back: Callable[[], None] | None = None
        self._hooks: list[RemovableHandle] = []
        for optimizer in optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(self._before))
            self._hooks.append(optimizer.register_step_post_hook(lambda *_: self.end()))

    def follow_steps(self, seed: int) -> None:
        """Take ``seed``. From now on each micro-batch is seeded too."""
        self.seed, self._in_steps = seed, True
        self._give_back = None
        while self._hooks:
            self._hooks.pop().remove()

    def begin(self, step: int) -> None:
        """Seed the generators for the update of ``step``."""
        self._step, self._parts = step, 0
        self._seed(0)

    def end(self) -> None:
        """Give the generators back to a loop of the user's own."""
        if self._give_back is not None:
            self._give_back()
            self._give_back = None

    def _seed(self, part: int) -> None:
        """Seed the generators for the update. ``part``: the number of optimizers before this one."""
        if self.gives_back and not self._in_steps and self._give_back is None:
            self._give_back = keep_generators()
        words = f"{self.seed} {self._step} update {part}{_of_rank(self.draws)}"
        seed_all(xxhash.xxh3_64_intdigest(words.encode()) >> 1)

    def _before(self, *_: object) -> None:
        if self._step >= 0 and self._parts:
            self._seed(self._parts)
        self._parts += 1


def keep_generators() -> Callable[[], None]:
    """Return what gives back the generators that ``seed_all`` seeds, as they are now."""
    initialised = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = torch.cuda.get_rng_state_all() if initialised else []
    cpu, legacy, python = torch.get_rng_state(), np.random.get_state(), random.getstate()

    def give_back() -> None:
        torch.set_rng_state(cpu)
        if devices:
            torch.cuda.set_rng_state_all(devices)
        np.random.set_state(legacy)
        random.setstate(python)

    return give_back


def seed_all(value: int) -> None:
    """Seed the generators of torch, for each device, of numpy and of random."""
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
