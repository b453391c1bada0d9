"""The progress of the main thread through the training loop. The parts of a session share it."""

import sys
from dataclasses import dataclass, field

from fabric.errors import SessionOver
from fabric.model import DataPlan


@dataclass(slots=True)
class LoopProgress:
    """One per session; only the main thread writes it."""

    state_step: int = 0  # number of committed optimizer steps in the state in memory
    begin: int = -1  # the first step of the present call of ``session.steps``; -1: the loop makes none
    until: int = sys.maxsize  # the step at which this call ends
    news: DataPlan | None = None  # the data plan of this call, until the core knows it
    bare: bool = False  # whether the newest step of the user's code has no micro-batch
    source: str = ""  # where the loaded state came from
    left: SessionOver | None = None  # the error with which this process left the job before its end
    finished: bool = False  # whether the job is complete
    behind: bool = False  # true from a load or a replayed step until this replica contributes again
    at: tuple[int, int] | None = None  # the step and micro-batch that user code computes
    metrics: dict[str, float] = field(default_factory=dict)  # the user's sums of this step
    samples: dict[int, list[int]] = field(default_factory=dict)  # this step's samples by micro-batch
    loads: int = 0  # how often this process has loaded a fetched state

    def take_news(self) -> DataPlan | None:
        """Return the data plan that the core does not know yet; None where it knows it."""
        news, self.news = self.news, None
        return news

    def micro_batch(self) -> int:
        """Return the micro-batch that user code computes, or -1."""
        return self.at[1] if self.at is not None else -1
