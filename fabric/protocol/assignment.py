"""Who computes which micro-batches: one pure function of (step's micro-batches, roster, shares).

The global batch of a step is a fixed list of micro-batches; a roster only changes who computes them.

Policy ``constant``: all of them, by whoever is there. Ranges are contiguous in roster order, so the
assignment is stable while the roster is, and sizes follow the shares by the largest remainder method (ties
go to the earlier member).

Policy ``shrink``: the list is cut into one part per *seat*, and a member computes the part of its seat. A
part on whose seat nobody sits is skipped. With equal shares a part never changes, whoever comes or goes.

Data that only some replicas can read (``Sharing.readers`` above 0) lie by seats too, in SPARe's layout
(`fabric.protocol.spare`). The member on seat p computes part p. While it is away another host of the part
does, so that the busiest member has as few parts as possible. A part whose hosts are all away is lost: see
``Sharing.on_loss``.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count

from fabric.model import EVERYTHING, Member, Sharing
from fabric.protocol.spare import hosts_of, settle


@dataclass(frozen=True, slots=True)
class Work:
    """A step's global batch: how many micro-batches, and how they are shared out."""

    micro_batches: int
    sharing: Sharing = EVERYTHING


def apportion(total: int, shares: Sequence[int]) -> list[int]:
    """Split ``total`` into integers proportional to ``shares`` that sum to ``total``.

    Hamilton's largest remainder method in integer arithmetic, so that every replica computes the same.
    Shares must not be negative; when all are zero the split is even.
    """
    whole = sum(shares)
    if whole <= 0:
        shares = [1] * len(shares)
        whole = len(shares)
    parts = [total * share // whole for share in shares]
    remainders = [(-(total * share % whole), i) for i, share in enumerate(shares)]
    for _, index in sorted(remainders)[: total - sum(parts)]:
        parts[index] += 1
    return parts


def assign(micro_batches: Iterable[int], members: Sequence[Member]) -> dict[str, tuple[int, ...]]:
    """Give every micro-batch to exactly one of ``members``, by their shares, in roster order.

    Raises ValueError without members.
    """
    if not members:
        raise ValueError("nobody is left to compute the micro-batches")
    ids = sorted(micro_batches)
    given: dict[str, tuple[int, ...]] = {}
    start = 0
    for member, size in zip(members, apportion(len(ids), [m.shares for m in members]), strict=True):
        given[member.replica] = tuple(ids[start : start + size])
        start += size
    return given


def spread(
    micro_batches: Iterable[int], members: Sequence[Member], load: Mapping[str, int]
) -> dict[str, tuple[int, ...]]:
    """Give the orphaned ``micro_batches`` to ``members``, least relative load first.

    ``load`` is how many each one already has in its kept gradient. Every id goes to exactly one member;
    ties go to the earlier in roster order. A share of zero counts as the smallest positive one here:
    somebody must compute what the dead left.
    """
    if not members:
        raise ValueError("nobody is left to compute the micro-batches")
    given: dict[str, list[int]] = {m.replica: [] for m in members}
    # What each would have with one more, relative to its share, and its place in the roster. Small integers'
    # quotients: floats compare as the fractions would.
    queue = [((load.get(m.replica, 0) + 1) / max(m.shares, 1), place) for place, m in enumerate(members)]
    heapq.heapify(queue)
    for micro_batch in sorted(micro_batches):
        place = queue[0][1]
        lightest = members[place]
        given[lightest.replica].append(micro_batch)
        has = load.get(lightest.replica, 0) + len(given[lightest.replica])
        heapq.heapreplace(queue, ((has + 1) / max(lightest.shares, 1), place))
    return {replica: tuple(ids) for replica, ids in given.items()}


# --- parts and seats --------------------------------------------------------------------------------


def cut(total: int, shares: Sequence[int]) -> list[range]:
    """Consecutive ranges of 0 to ``total``, one per seat, sized by ``shares``."""
    parts, start = [], 0
    for size in apportion(total, shares):
        parts.append(range(start, start + size))
        start += size
    return parts


def seat_shares(sharing: Sharing, roster: Sequence[Member]) -> list[int]:
    """The share of every seat: its member's, or the members' mean where nobody of ``roster`` sits.

    Where data lie by seats all parts are equal: they cannot move.
    """
    if sharing.readers:
        return [1] * sharing.seats
    seated = {m.seat: m.shares for m in roster if m.seat >= 0}
    seats = max(sharing.seats, *(seat + 1 for seat in seated), 1)
    mean = max(1, (2 * sum(seated.values()) + len(seated)) // (2 * len(seated))) if seated else 1
    return [seated.get(seat, mean) for seat in range(seats)]


def readers_of(part: int, sharing: Sharing) -> tuple[int, ...]:
    """The seats on which the data of ``part`` can be read, its own first."""
    return hosts_of(part, sharing.seats, min(sharing.readers, sharing.seats))


def lost_parts(sharing: Sharing, roster: Sequence[Member]) -> list[int]:
    """The parts that no member of ``roster`` can read, where others than their own seat may compute them."""
    if not sharing.readers or sharing.policy != "constant":
        return []
    present = frozenset(m.seat for m in roster if 0 <= m.seat < sharing.seats)
    owner = settle(sharing.seats, min(sharing.readers, sharing.seats), present).owner
    return [part for part, seat in enumerate(owner) if seat < 0]


def waits_for_data(sharing: Sharing, roster: Sequence[Member]) -> bool:
    """Whether these members wait for one that can read a lost part."""
    return sharing.on_loss == "wait" and bool(lost_parts(sharing, roster))


def share_out(
    work: Work, roster: Sequence[Member], able: Sequence[Member], skip: Iterable[int] = ()
) -> dict[str, tuple[int, ...]]:
    """A whole step's assignment: every micro-batch to at most one of the ``able`` of ``roster``.

    What is in ``skip`` goes to nobody; under ``constant`` without ``readers`` everything else goes to
    exactly one. Raises ValueError when nobody is able.
    """
    skipped = frozenset(skip)
    wanted = [i for i in range(work.micro_batches) if i not in skipped]
    if work.sharing.policy == "constant" and not work.sharing.readers:
        return assign(wanted, able)
    if not able:
        raise ValueError("nobody is left to compute the micro-batches")
    return _by_seat(work, roster, able, wanted)


def hand_round(
    work: Work,
    roster: Sequence[Member],
    able: Sequence[Member],
    missing: Iterable[int],
    load: Mapping[str, int],
) -> dict[str, tuple[int, ...]]:
    """A redone step's further work: who of the ``able`` computes what of ``missing``, by ``load`` (how
    many each one has already). Under ``shrink`` that is what is missing of a member's own part. A part that
    can only be read by a member that is not able yet goes to it: the others wait until it has caught up."""
    sharing = work.sharing
    if sharing.policy == "constant" and not sharing.readers:
        return spread(missing, able, load)
    if not waits_for_data(sharing, roster) and waits_for_data(sharing, able):
        able = roster
    return _by_seat(work, roster, able, sorted(missing))


def _by_seat(
    work: Work, roster: Sequence[Member], able: Sequence[Member], wanted: Sequence[int]
) -> dict[str, tuple[int, ...]]:
    sharing, on_seat = work.sharing, {m.seat: m for m in able if m.seat >= 0}
    given: dict[str, list[int]] = {m.replica: [] for m in able}
    parts = cut(work.micro_batches, seat_shares(sharing, roster))
    owner: Sequence[int] = range(len(parts))
    if sharing.policy == "constant":
        present = frozenset(seat for seat in on_seat if seat < sharing.seats)
        owner = settle(sharing.seats, min(sharing.readers, sharing.seats), present).owner
    todo = frozenset(wanted)
    for part, ids in enumerate(parts):
        if owner[part] in on_seat:
            given[on_seat[owner[part]].replica] += [i for i in ids if i in todo]
    return {replica: tuple(ids) for replica, ids in given.items()}


def seated(roster: Sequence[Member], remembered: Mapping[str, int]) -> tuple[Member, ...]:
    """``roster`` with a seat for everybody: the one it asks for, else the one it had, else the lowest free.

    No two members share a seat: of two that ask for one, the earlier in roster order gets it.
    """
    seats: dict[str, int] = {}
    taken: set[int] = set()
    for wishes in ({m.replica: m.seat for m in roster}, remembered):
        for member in roster:
            seat = wishes.get(member.replica, -1)
            if member.replica not in seats and seat >= 0 and seat not in taken:
                seats[member.replica] = seat
                taken.add(seat)
    free = (seat for seat in count() if seat not in taken)
    found = ((m, seats[m.replica] if m.replica in seats else next(free)) for m in roster)
    return tuple(m if m.seat == seat else replace(m, seat=seat) for m, seat in found)
