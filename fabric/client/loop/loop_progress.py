"""Where the main thread stands; the parts of a session share it."""

import sys
from dataclasses import dataclass, field


@dataclass(slots=True)
class LoopProgress:
    """One per session; only the main thread writes it."""

    state_step: int = 0  # committed optimizer steps that the state in memory has
    until: int = sys.maxsize  # the step at which the user's loop ends
    finished: bool = False  # the job is complete
    behind: bool = False  # from a loaded state or a replayed step to the next round that we contribute to
    at: tuple[int, int] | None = None  # the step and micro-batch that user code computes
    metrics: dict[str, float] = field(default_factory=dict)  # the user's sums of this step
    samples: dict[int, list[int]] = field(default_factory=dict)  # this step's samples by micro-batch
