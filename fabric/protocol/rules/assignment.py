"""The division of a step's micro-batches: a pure function of (micro-batches, roster, shares).

The global batch of a step is a fixed list of micro-batches. A roster only changes which member computes each.

Policy ``constant``: the members of the roster compute all micro-batches, each a contiguous range in roster
order. Sizes follow the shares by the largest remainder method (ties go to the earlier member).

Policy ``shrink``: the list is cut into one part per *data slot*, and a member computes the part of its data
slot. A part whose data slot has no member is skipped. With equal shares a part is the same in every roster.

Data that only some replicas can read (``Sharing.readers`` above 0) lie by data slots too, in SPARe's layout
(`rules.spare`). The member on data slot p computes part p. While that member is away, another member that can
read the part computes it, so that the busiest member has as few parts as possible. A part that no present
member can read is lost: see ``Sharing.on_loss``.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from math import gcd

from msgspec.structs import replace

from fabric.model import EVERYTHING, Adaptation, Member, Record, Sharing, Value, apportion
from fabric.protocol.rules.spare import hosts_of, settle, stack_of

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

    SPARe's layout (`rules.spare`) says on which data slots each shard (type) is read. Where replicas name
    their racks, the leader chooses data slots so that, in this order of importance,

    1. as few shards as possible have no reader,
    2. as few shards as possible have all their readers in one rack,
    3. as few shards as possible have two readers in one rack.

    The search starts from several arrangements. It exchanges the replicas of two data slots while that lowers
    the cost. The tests compare its result with all arrangements of small jobs. In large jobs its effort is
    bounded.
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


_MOST = 1 << 53  # larger than the number of any data slot


class Work(Value):
    """A step's global batch: its number of micro-batches, and the rules that assign them."""

    micro_batches: int
    sharing: Sharing = EVERYTHING


def assign(micro_batches: Iterable[int], members: Sequence[Member]) -> dict[str, tuple[int, ...]]:
    """Give every micro-batch to exactly one of ``members``, by their shares, in roster order.

    Raise ValueError without members.
    """
    if not members:
        raise ValueError("no member is left to compute the micro-batches")
    ids = sorted(micro_batches)
    parts = cut(len(ids), [m.shares for m in members])
    return {m.replica: tuple(ids[x.start : x.stop]) for m, x in zip(members, parts, strict=True)}


def spread(
    micro_batches: Iterable[int], members: Sequence[Member], load: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Give the orphaned ``micro_batches`` to ``members``, least relative load first.

    ``load`` is how many micro-batches each member has in its kept gradient. Every id goes to exactly one
    member; ties go to the earlier in roster order. A share of zero counts as 1, because some member must
    compute the orphans.
    """
    if not members:
        raise ValueError("no member is left to compute the micro-batches")
    has = [load.get(m.replica, 0) for m in members]
    shares = [max(m.shares, 1) for m in members]
    given: list[list[int]] = [[] for _ in members]
    # A member's load with one micro-batch more, relative to the member's share, and its place in the roster.
    # Quotients of small integers have the same order as floats and as fractions.
    queue = [((has[place] + 1) / shares[place], place) for place in range(len(members))]
    heapq.heapify(queue)
    for micro_batch in sorted(micro_batches):
        _, place = queue[0]
        given[place].append(micro_batch)
        has[place] += 1
        heapq.heapreplace(queue, ((has[place] + 1) / shares[place], place))
    return {member.replica: tuple(ids) for member, ids in zip(members, given, strict=True)}


# --- parts and data slots --------------------------------------------------------------------------------


def cut(total: int, shares: Sequence[int]) -> list[range]:
    """Consecutive ranges of 0 to ``total``, one per data slot, sized by ``shares``."""
    parts, start = [], 0
    for size in apportion(total, shares):
        parts.append(range(start, start + size))
        start += size
    return parts


def data_slot_shares(sharing: Sharing, roster: Sequence[Member]) -> list[int]:
    """The share of every data slot: that of its member, or without a member the mean of all members' shares.

    Where only some replicas can read a part's data all parts are equal, because data cannot move.
    """
    if sharing.readers:
        return [1] * sharing.data_slots
    seated = {m.data_slot: m.shares for m in roster if m.data_slot >= 0}
    data_slots = max(sharing.data_slots, *(data_slot + 1 for data_slot in seated), 1)
    mean = max(1, (2 * sum(seated.values()) + len(seated)) // (2 * len(seated))) if seated else 1
    return [seated.get(data_slot, mean) for data_slot in range(data_slots)]


def readers_of(part: int, sharing: Sharing) -> tuple[int, ...]:
    """The data slots on which the data of ``part`` can be read, data slot ``part`` first."""
    return hosts_of(part, sharing.data_slots, min(sharing.readers, sharing.data_slots))


def lost_parts(sharing: Sharing, roster: Sequence[Member]) -> list[int]:
    """The parts that no member of ``roster`` can read; empty where every member can read all data."""
    if not sharing.readers or sharing.policy != "constant":
        return []
    present = frozenset(m.data_slot for m in roster if 0 <= m.data_slot < sharing.data_slots)
    owner = settle(sharing.data_slots, min(sharing.readers, sharing.data_slots), present).owner
    return [part for part, data_slot in enumerate(owner) if data_slot < 0]


def waits_for_data(sharing: Sharing, roster: Sequence[Member]) -> bool:
    """Whether the members of ``roster`` wait for a replica that can read a lost part."""
    return sharing.on_loss == "wait" and bool(lost_parts(sharing, roster))


def widened(sharing: Sharing, roster: Sequence[Member], able: Sequence[Member]) -> Sequence[Member]:
    """Return ``able``, or ``roster`` where only a member that is still behind can read a part.

    The others then wait until this member has caught up. A part is left out only if nobody can read it.
    """
    lost = set(lost_parts(sharing, able))
    return roster if lost and lost - set(lost_parts(sharing, roster)) else able


def share_out(
    work: Work, roster: Sequence[Member], able: Sequence[Member], skip: Iterable[int] = ()
) -> dict[str, tuple[int, ...]]:
    """Assign a whole step: every micro-batch goes to at most one of the ``able`` of ``roster``.

    Leave out the micro-batches in ``skip``. Under ``constant`` without ``readers`` every other micro-batch
    goes to exactly one member. Raise ValueError without ``able`` members.
    """
    skipped = frozenset(skip)
    wanted = [i for i in range(work.micro_batches) if i not in skipped]
    if work.sharing.policy == "constant" and not work.sharing.readers:
        return assign(wanted, able)
    if not able:
        raise ValueError("no member is left to compute the micro-batches")
    return _by_data_slot(work, roster, able, wanted)


def hand_round(
    work: Work,
    roster: Sequence[Member],
    able: Sequence[Member],
    missing: Iterable[int],
    load: Mapping[str, int],
) -> dict[str, tuple[int, ...]]:
    """Assign the ``missing`` micro-batches of a redone step to the ``able``, by ``load`` (how many each has).

    Under ``shrink`` a member gets only micro-batches of its own part. The ``able`` are `widened` first.
    """
    if work.sharing.policy == "constant" and not work.sharing.readers:
        return spread(missing, able, load)
    return _by_data_slot(work, roster, widened(work.sharing, roster, able), sorted(missing))


def _by_data_slot(
    work: Work, roster: Sequence[Member], able: Sequence[Member], wanted: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    sharing, on_data_slot = work.sharing, {m.data_slot: m for m in able if m.data_slot >= 0}
    given: dict[str, list[int]] = {m.replica: [] for m in able}
    parts = cut(work.micro_batches, data_slot_shares(sharing, roster))
    owner: Sequence[int] = range(len(parts))
    if sharing.policy == "constant":
        present = frozenset(data_slot for data_slot in on_data_slot if data_slot < sharing.data_slots)
        owner = settle(sharing.data_slots, min(sharing.readers, sharing.data_slots), present).owner
    todo = frozenset(wanted)
    for part, ids in enumerate(parts):
        if owner[part] in on_data_slot:
            given[on_data_slot[owner[part]].replica] += [i for i in ids if i in todo]
    return {replica: tuple(ids) for replica, ids in given.items()}


def seated(
    roster: Sequence[Member], remembered: Mapping[str, int], sharing: Sharing = EVERYTHING
) -> tuple[Member, ...]:
    """Give each member a data slot: the one that it asks for, else the one that it had, else a free one.

    No two members share a data slot: if two ask for the same one, the earlier in roster order gets it. A free
    data slot is the lowest free one. If replicas name their racks, `rules.data_slot_placement` chooses it.
    Then a member on a data slot without a shard moves to the next data slot that is free.
    """
    by_rack = sharing.readers > 0 and any(m.rack for m in roster)
    end = sharing.data_slots if by_rack else _MOST
    data_slots: dict[str, int] = {}
    taken: set[int] = set()
    for wishes in ({m.replica: m.data_slot for m in roster}, remembered):
        for member in roster:
            data_slot = wishes.get(member.replica, -1)
            if member.replica not in data_slots and 0 <= data_slot < end and data_slot not in taken:
                data_slots[member.replica] = data_slot
                taken.add(data_slot)
    others = [m for m in roster if m.replica not in data_slots]
    free: Iterable[int] = (data_slot for data_slot in count() if data_slot not in taken)
    if by_rack and others:
        racks = {data_slots[m.replica]: m.rack for m in roster if m.replica in data_slots}
        free = place(racks, [m.rack for m in others], sharing.data_slots, sharing.readers)
    data_slots.update(zip((m.replica for m in others), free, strict=False))
    return tuple(
        m if m.data_slot == data_slots[m.replica] else replace(m, data_slot=data_slots[m.replica])
        for m in roster
    )


FULL_SPEED = 1000


def asked_share(record: Record, member: Member) -> int:
    """The share that this process asked for; ``member`` is its entry in ``record``, or a newcomer's."""
    if not record.adaptation.speeds or not record.lists(member.replica, member.incarnation):
        return member.shares
    slow = {x.process: x.asked for x in record.adaptation.speeds}
    return slow.get(member.process, member.shares // FULL_SPEED)


def for_roster(adaptation: Adaptation, roster: Sequence[Member]) -> Adaptation:
    """Leave out the processes that are not in ``roster``: their next processes may be healthy."""
    listed = {x.process for x in roster}
    speeds = tuple(x for x in adaptation.speeds if x.process in listed)
    if speeds == adaptation.speeds:
        return adaptation
    return replace(adaptation, speeds=speeds) if speeds else adaptation.with_asked_shares


def with_shares(roster: Sequence[Member], asked: Sequence[int], adaptation: Adaptation) -> tuple[Member, ...]:
    """Give each member of ``roster`` its share, from the ``asked`` shares in the same order.

    Each slow member keeps at least one micro-batch, or its speed would no longer be measured.
    """
    shares = list(asked)
    if adaptation.speeds:
        speeds = {x.process: x.speed for x in adaptation.speeds}
        full, others = FULL_SPEED * sum(asked), adaptation.micro_batches - 1
        for place, (member, share) in enumerate(zip(roster, asked, strict=True)):
            least = -(-(full - FULL_SPEED * share) // others) if others > 0 and share else 0
            wanted = share * speeds.get(member.process, FULL_SPEED)
            shares[place] = min(max(wanted, least), share * FULL_SPEED)
    return tuple(
        member if member.shares == share else replace(member, shares=share)
        for member, share in zip(roster, shares, strict=True)
    )


def objection_to_shares(sharing: Sharing) -> str:
    """Why the members of a job with this data policy must keep equal shares, in a sentence, or empty."""
    if sharing.readers:
        return (
            f"each replica reads only its part of the data (redundancy {sharing.readers}), and its parts are "
            "equal: drain the slow replica instead"
        )
    if sharing.policy != "constant":
        return (
            f"the data policy {sharing.policy} skips the part of an absent replica: other parts would skip "
            "other samples: drain the slow replica instead"
        )
    return ""
