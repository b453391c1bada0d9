"""The choice of data slots by rack, so that the loss of one rack leaves every shard a reader.

SPARe's layout (`rules.spare`) says on which data slots each shard (type) is read. Where replicas name their
racks, the leader chooses data slots so that, in this order of importance,

1. as few shards as possible have no reader,
2. as few shards as possible have all their readers in one rack,
3. as few shards as possible have two readers in one rack.

The search starts from several arrangements. It exchanges the replicas of two data slots while that lowers the
cost. The tests compare its result with all arrangements of small jobs. In large jobs its effort is bounded.
"""

from collections.abc import Mapping, Sequence
from math import gcd

from fabric.protocol.rules.spare import hosts_of, stack_of

# The cost of one shard, by the racks of its readers. The cost of two readers in one rack guides the search.
_NO_READER, _ONE_RACK, _SHARED_RACK, _PAIR = 1 << 90, 1 << 60, 1 << 30, 1
# The most readers that one search looks at, over all starting arrangements: takes less than a second.
_EFFORT = 30_000
_BEGINNINGS = 48

# Data slot -> the rack of its replica: "" if the replica names none, None if the slot is free.
_Label = str | None


def place(racks: Mapping[int, str], newcomers: Sequence[str], data_slots: int, readers: int) -> list[int]:
    """Choose the data slot of each newcomer; ``newcomers`` holds their racks ("" if a newcomer names none).

    ``racks`` holds the other replicas' racks, by data slot. ``data_slots`` and ``readers`` are as in
    ``Sharing``. A newcomer without a free data slot gets the number above all data slots.
    """
    free = [slot for slot in range(data_slots) if slot not in racks]
    coming = newcomers[: len(free)]
    labels: list[_Label] = [*sorted(coming), *[None] * (len(free) - len(coming))]
    chosen = _search(racks, free, labels, data_slots, min(readers, data_slots))
    of_rack: dict[_Label, list[int]] = {}
    for slot, label in zip(free, chosen, strict=True):
        of_rack.setdefault(label, []).append(slot)
    above = max([data_slots - 1, *racks]) + 1
    more = range(above, above + len(newcomers) - len(coming))
    return [of_rack[rack].pop(0) for rack in coming] + list(more)


def _search(
    racks: Mapping[int, str], free: Sequence[int], labels: list[_Label], data_slots: int, readers: int
) -> list[_Label]:
    """Find the best order of ``labels`` for the ``free`` data slots."""
    best, least, left = labels, -1, _EFFORT // readers
    strides = [n for n in range(1, len(labels) + 1) if gcd(n, len(labels)) == 1]
    # A stride of about the number of racks puts neighbours into different racks: a good start for the search.
    strides.sort(key=lambda n: (abs(n * len(set(labels)) - len(labels)), n))
    beginnings = [(shift, stride) for shift in range(len(labels)) for stride in strides[:_BEGINNINGS]]
    for shift, stride in beginnings[: _BEGINNINGS if readers > 1 else 0]:
        order = [labels[(shift + i * stride) % len(labels)] for i in range(len(labels))]
        arrangement = _Arrangement({**racks, **dict(zip(free, order, strict=True))}, data_slots, readers)
        left = arrangement.improve(free, left)
        if least < 0 or arrangement.cost < least:
            best, least = [arrangement.labels[slot] for slot in free], arrangement.cost
        if least == 0 or left <= 0:
            break
    return best


class _Arrangement:
    """The label of every data slot, and the cost of every shard with these labels."""

    def __init__(self, labels: dict[int, _Label], data_slots: int, readers: int) -> None:
        self.labels = labels
        self._hosts = [hosts_of(shard, data_slots, readers) for shard in range(data_slots)]
        self._stacks = [stack_of(slot, data_slots, readers) for slot in range(data_slots)]
        self._costs = [self._cost_of(shard) for shard in range(data_slots)]

    @property
    def cost(self) -> int:
        return sum(self._costs)

    def _cost_of(self, shard: int) -> int:
        present = [label for slot in self._hosts[shard] if (label := self.labels.get(slot)) is not None]
        if not present:
            return _NO_READER
        named = [label for label in present if label]
        racks = set(named)
        cost = _ONE_RACK if len(racks) == 1 and len(named) == len(present) else 0
        if len(racks) < len(named):
            cost += _SHARED_RACK + _PAIR * (len(named) - len(racks))
        return cost

    def improve(self, free: Sequence[int], left: int) -> int:
        """Exchange labels of ``free`` data slots while an exchange lowers the cost; return the tries left."""
        better = True
        while better and left > 0:
            better = False
            for slot in free:
                if not any(self._costs[shard] for shard in self._stacks[slot]):
                    continue
                for other in free:
                    if self.labels[slot] == self.labels[other]:
                        continue
                    left -= 1
                    better = self._exchange(slot, other) or better
                if left <= 0:
                    break
        return left

    def _exchange(self, slot: int, other: int) -> bool:
        """Exchange the labels of two data slots if that lowers the cost."""
        labels, costs = self.labels, self._costs
        labels[slot], labels[other] = labels[other], labels[slot]
        after = {shard: self._cost_of(shard) for shard in (*self._stacks[slot], *self._stacks[other])}
        if sum(after.values()) >= sum(costs[shard] for shard in after):
            labels[slot], labels[other] = labels[other], labels[slot]
            return False
        for shard, cost in after.items():
            costs[shard] = cost
        return True
