"""The shares of members whose speeds differ: a pure function of (record in force, roster, speeds).

While a member is slow, the share of every member is its asked share times its speed in thousandths. A healthy
member and each newcomer have the speed 1000. While all members are healthy, every share is the asked one. So
joins, drains and deaths do not change what a share means.
"""

from collections.abc import Sequence
from dataclasses import replace

from fabric.model import Adaptation, Member, Record, Sharing

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
