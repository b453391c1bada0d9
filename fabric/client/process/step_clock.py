"""Where a step's time goes, as the main thread sees it: compute, the user's update, waiting."""

import time
from dataclasses import dataclass, field

from fabric.model import StepTimes


@dataclass(slots=True)
class StepClock:
    """The main thread's times since the last report."""

    mark: float = field(default_factory=time.monotonic)  # end of the last lap
    compute_s: float = 0.0
    optimizer_s: float = 0.0
    wait_s: float = 0.0
    work: dict[int, float] = field(default_factory=dict)  # samples by micro-batch

    def lap(self) -> float:
        """End a lap; return its seconds."""
        now = time.monotonic()
        seconds, self.mark = now - self.mark, now
        return seconds

    def by_phase(self, exchange_s: float) -> dict[str, float]:
        """Return the seconds not yet reported, by phase, for the journal."""
        return {
            "compute_s": self.compute_s,
            "exchange_s": exchange_s,
            "optimizer_s": self.optimizer_s,
            "wait_s": self.wait_s,
        }

    def times(self, exchange_s: float, waiting_s: dict[str, float]) -> StepTimes:
        """Return the step's times for the lighthouse, and start the next count."""
        times = StepTimes(
            compute_s=self.compute_s,
            exchange_s=exchange_s,
            optimizer_s=self.optimizer_s,
            waiting_s=dict(waiting_s),
            work=dict(self.work),
        )
        self.compute_s = self.optimizer_s = self.wait_s = 0.0
        self.work.clear()
        return times
