"""The steps of a job, for a loop that a framework owns: it asks for one micro-batch after another."""

from collections.abc import Iterator
from typing import Any

from fabric.client.data.loader import Loader
from fabric.client.loop.session import Session
from fabric.client.loop.step import Step


class StepFeed:
    """Goes through ``session.steps``. A step that this replica replays has no micro-batches."""

    def __init__(self, session: Session, data: Loader, until: int) -> None:
        self.session, self.data = session, data
        self.step: Step | None = None  # the step under way; None after the job's last
        session.stale.own_loop = False
        self._steps = session.steps(data, until)
        self._micro_batches: Iterator[Any] = iter(())

    def advance(self) -> Step | None:
        """Go on to the next step of the job, which follows a load of a fetched state at any number."""
        self.step = next(self._steps, None)
        self._micro_batches = iter(self.step) if self.step is not None else iter(())
        return self.step

    def micro_batch(self) -> Any:
        """Return the step's next micro-batch; None where none is left, and ``.grad`` is the average then."""
        return next(self._micro_batches, None)

    def rest(self) -> Iterator[Any]:
        """Yield the micro-batches that are left, those of lost members included."""
        yield from self._micro_batches
