"""The journal lines that the control thread writes: epochs, and the contributions of this replica."""

from collections.abc import Callable

from fabric.client.process.journal import Journal
from fabric.model import Fence, Record, first_of
from fabric.protocol.messages.network import Contribution
from fabric.runtime import logs

_NAMED = 8  # a sentence names this many members and counts the others


class RoundJournal:
    """One line per epoch and one per contribution, however often the core repeats them."""

    def __init__(self, journal: Journal, tell: Callable[[str], None] = lambda _sentence: None) -> None:
        """``tell`` gets a sentence on each later epoch, for the terminal of this trainer."""
        self._journal, self._tell = journal, tell
        # Returns the samples of a step's micro-batches; the session sets it.
        self.samples: Callable[[int, tuple[int, ...]], dict[str, list[int]]] = lambda _step, _ids: {}
        self._contributed: tuple[int, int] = (0, -1)  # epoch and step of the contribution line written last
        self._fence: Fence | None = None  # fence of the epoch line written last

    def note_contribution(self, message: Contribution) -> None:
        """Journal a contribution before it leaves this process; an empty one gets no line."""
        epoch = message.fence.epoch
        if self._contributed == (epoch, message.step) or not message.micro_batches:
            return
        self._contributed = (epoch, message.step)
        self._journal.write(
            "contribute",
            generation=message.fence.generation,
            epoch=epoch,
            step=message.step,
            micro_batches=list(message.micro_batches),
            samples=self.samples(message.step, message.micro_batches),
            weight=message.weight,
        )

    def note_epoch(self, record: Record) -> None:
        """Journal an epoch when its links are made, once, even if the core asks for the links again."""
        if record.fence == self._fence:
            return
        if self._fence is not None:
            self._tell(_changed(record))
        self._fence = record.fence
        logs.describe(epoch=record.epoch, incident_id=record.incident_id)
        self._journal.write(
            "epoch",
            epoch=record.epoch,
            generation=record.generation,
            forced=record.is_forced,
            roster=list(record.names),
            data_slots={x.replica: x.data_slot for x in record.roster},
            reason=record.reason,
            incident_id=record.incident_id,
        )


def _changed(record: Record) -> str:
    """Say in one line why the members changed, or made their links again, and who goes on."""
    return f"epoch {record.epoch} with {first_of(record.names, _NAMED)}: {record.reason}"
