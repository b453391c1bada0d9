"""``session.sampler``: the data order for a DataLoader of a loop that we do not own.

Policy shrink: the global batch of a step is cut into one part per seat, this replica draws the part of its
seat, and the part of an absent replica is skipped, which the commit records. A pass over the data set has
``size // global_batch_size`` steps; what is left over at its end is not used in that pass.

A DataLoader draws ahead of what is computed. The part of a seat does not depend on who else is there, so
drawing ahead is right while steps follow each other; when this replica was away and the job is further than
it thought, what was drawn for steps that are past is discarded: its gradient counts for nothing.
"""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fabric.client.data import sample_indices
from fabric.errors import ConfigError
from fabric.protocol.assignment import cut


class StepSampler(torch.utils.data.Sampler[int]):
    """The indices of this seat, from the step that is committed now to the end of the pass over the data.

    Every step gives ``per_step`` indices: the loop's batch size times its accumulation must be that.
    ``committed_step`` tells where the job is.
    """

    def __init__(
        self,
        size: int,
        global_batch_size: int,
        seed: int,
        seat: tuple[int, int],
        committed_step: Callable[[], int],
    ) -> None:
        number, seats = seat
        if not 0 < global_batch_size <= size or global_batch_size % seats:
            raise ConfigError(
                f"global_batch_size {global_batch_size} must be from 1 to the data set's size, {size}, and a "
                f"multiple of the {seats} replicas"
            )
        if seed < 0:
            raise ConfigError("the seed must not be negative")
        self.size, self.global_batch_size, self.seed = size, global_batch_size, seed
        self.seat, self.seats = number, seats
        self.steps_per_pass = size // global_batch_size
        self.per_step = global_batch_size // seats
        self._part = cut(global_batch_size, [1] * seats)[number]
        self._committed_step = committed_step
        self._drawn: deque[int] = deque()

    def __len__(self) -> int:
        """Indices of a whole pass on this seat."""
        return self.steps_per_pass * self.per_step

    def __iter__(self) -> Iterator[int]:
        self._drawn.clear()  # an abandoned iteration's batches never come
        number = self._committed_step() // self.steps_per_pass
        while True:
            step = self._committed_step() + len(self._drawn)
            if step // self.steps_per_pass != number:
                return
            self._drawn.append(step)
            yield from self.indices(step)

    def indices(self, step: int) -> list[int]:
        """The data set indices of this seat's part of ``step``."""
        number, within = divmod(step, self.steps_per_pass)
        start = number * self.size + within * self.global_batch_size
        whole = sample_indices(self.size, self.seed, start, self.global_batch_size)
        return whole[self._part.start : self._part.stop]

    def take(self, step: int) -> bool:
        """The loop exchanges for ``step`` what it drew first: whether that was drawn for this step."""
        return bool(self._drawn) and self._drawn.popleft() == step

    def describe(self) -> dict[str, Any]:
        """For the journal."""
        return {
            "policy": "shrink",
            "sampler": 1,
            "dataset_size": self.size,
            "global_batch_size": self.global_batch_size,
            "micro_batch_size": self.per_step,
            "seed": self.seed,
            "seats": self.seats,
            "micro_batches": self.seats,
        }
