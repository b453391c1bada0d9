"""Checks that the journals explain every micro-batch that a commit leaves out.

There are two reasons. Poison: two processes died at a micro-batch, and the record excludes it. Data slots:
under policy ``shrink`` a part of the batch belongs to one data slot, and data that only some replicas can
read belongs to their slots. It is left out if no replica with such a slot contributed. The commit itself must
list every skipped micro-batch.
"""

from collections.abc import Iterable, Mapping

from fabric.audit.journal import JournalLine, RecordedRun, lines_of
from fabric.audit.sample_order import StagedOrder
from fabric.protocol.rules.spare import hosts_of


class SkippedSamples:
    """The reasons that the journals of one run give."""

    def __init__(self, run: RecordedRun, order: StagedOrder) -> None:
        data = order.at(0).data
        self._poison: set[tuple[int, int]] = set()  # (step, micro-batch) of each poisoned micro-batch
        self._seats: dict[int, Mapping[str, int]] = {}  # epoch -> replica -> data slot
        self._policy = data.get("policy", "constant")
        self._readers = _integer(data, "redundancy")
        self._waits = data.get("on_loss", "shrink") != "shrink"
        self._count = _integer(data, "data_slots")
        self._order = order
        for journal in run.journals.values():
            for line in lines_of(journal.lines, "epoch"):
                self._seats[line.integer("epoch")] = line.fields.get("data_slots") or {}
            for line in lines_of(journal.lines, "poison"):
                step = line.integer("step")
                self._poison |= {(step, i) for i in line.fields["micro_batches"]}

    def unexplained(self, commit: JournalLine, missing: Iterable[int]) -> list[str]:
        """Return a sentence for every micro-batch of ``missing`` that ``commit`` omits without a reason."""
        step, recorded = commit.integer("step"), set(commit.fields.get("skipped", ()))
        broken = []
        for micro_batch in sorted(missing):
            if micro_batch not in recorded:
                broken.append(f"Micro-batch {micro_batch} of step {step} is counted 0 times.")
            elif (step, micro_batch) not in self._poison and not self._nobody_there(commit, micro_batch):
                broken.append(f"Micro-batch {micro_batch} of step {step} is skipped without a reason.")
        counted = {i for ids in commit.fields["contributions"].values() for i in ids}
        broken += [
            f"Micro-batch {i} of step {step} is counted and recorded as skipped."
            for i in sorted(recorded & counted)
        ]
        return broken

    def _nobody_there(self, commit: JournalLine, micro_batch: int) -> bool:
        """Whether no replica that may compute the micro-batch contributed to this commit."""
        if self._policy != "shrink" and (not self._readers or self._waits):
            return False
        data_slots = self._seats.get(commit.integer("epoch"), {})
        there = {data_slots.get(name, -1) for name, ids in commit.fields["contributions"].items() if ids}
        count = max(self._count, *(data_slot + 1 for data_slot in data_slots.values()), 1)
        home = _part_of(micro_batch, self._order.at(commit.integer("step")).micro_batches, count)
        hosts = hosts_of(home, count, self._readers) if self._policy == "constant" else (home,)
        return there.isdisjoint(hosts)


def _part_of(micro_batch: int, total: int, parts: int) -> int:
    """Return the number of a micro-batch's part, of ``parts`` even parts with the larger parts first."""
    size, larger = divmod(total, parts)
    if micro_batch < larger * (size + 1):
        return micro_batch // (size + 1)
    return larger + (micro_batch - larger * (size + 1)) // size


def _integer(data: Mapping[str, object], name: str) -> int:
    value = data.get(name, 0)
    return value if isinstance(value, int) else 0
