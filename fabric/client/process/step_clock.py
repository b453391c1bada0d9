"""How the main thread spends a step's time: compute, the user's update, waiting."""

import time
from dataclasses import dataclass, field

from fabric.health.work import WorkAmount
from fabric.model import StepTimes


@dataclass(slots=True)
class StepClock:
    """The main thread's times since the last report."""

    mark: float = field(default_factory=time.monotonic)  # end of the last lap
    compute_s: float = 0.0
    optimizer_s: float = 0.0
    wait_s: float = 0.0
    work: dict[int, float] = field(default_factory=dict)  # micro-batch -> its work
    samples: float = 0.0
    squares: float = 0.0
    micro_batches: int = 0

    def lap(self) -> float:
        """End a lap; return its seconds."""
        now = time.monotonic()
        seconds, self.mark = now - self.mark, now
        return seconds

    def count(self, micro_batch: int, amount: WorkAmount) -> None:
        """Note that this micro-batch has been computed; a recomputation counts too."""
        self.work[micro_batch] = self.work.get(micro_batch, 0.0) + amount.tokens
        self.samples += amount.samples
        self.squares += amount.squares
        self.micro_batches += amount.micro_batches

    def leave_out(self, seconds: float) -> None:
        """Exclude the last ``seconds`` from the lap under way."""
        self.mark = min(time.monotonic(), self.mark + seconds)

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
            samples=self.samples,
            squares=self.squares,
            micro_batches=self.micro_batches,
        )
        self.compute_s = self.optimizer_s = self.wait_s = self.samples = self.squares = 0.0
        self.micro_batches = 0
        self.work.clear()
        return times
