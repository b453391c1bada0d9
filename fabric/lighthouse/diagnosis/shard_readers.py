"""For data that only some replicas can read: which member reads and computes which shards, and which shards
have only one reader left."""

from collections.abc import Iterable
from typing import Any

from fabric.model import Member, Record, Sharing, first_of
from fabric.protocol.rules.assignment import readers_of
from fabric.protocol.rules.spare import settle, stack_of

# The consequence when no member can read a shard, by ``Sharing.on_loss``.
_LOSSES = {
    "wait": "the job waits for a replica that can read it",
    "shrink": "its part of each step is skipped",
    "stop": "the job stops",
}
_NAMED = 4  # a sentence names this many shards and counts the other shards


def shard_readers(record: Record | None) -> dict[str, Any] | None:
    """Return SPARe's layout in this epoch as JSON values; None where every replica can read all data.

    ``redundancy``: how many data slots read each shard. ``depth``: how many parts the busiest member
    computes. ``last_reader``: shard number -> replica, for each shard that only one member reads. ``lost``:
    the shards that no member can read. ``warning``: a sentence on the shards with one reader, empty where
    there are none or the redundancy is 1.
    """
    if record is None or not record.sharing.readers:
        return None
    sharing, on_data_slot = record.sharing, {m.data_slot: m for m in record.roster}
    readers = {
        shard: [on_data_slot[slot].replica for slot in readers_of(shard, sharing) if slot in on_data_slot]
        for shard in range(sharing.data_slots)
    }
    members = [_member_view(member, sharing, on_data_slot) for member in record.roster]
    last_reader = {str(shard): names[0] for shard, names in readers.items() if len(names) == 1}
    return {
        "redundancy": sharing.readers,
        "shards": sharing.data_slots,
        "on_loss": sharing.on_loss,
        "depth": max((len(view["computes"]) for view in members), default=0),
        "members": members,
        "last_reader": last_reader,
        "lost": [shard for shard, names in readers.items() if not names],
        "warning": _warning(last_reader, sharing) if sharing.readers > 1 else "",
    }


def _member_view(member: Member, sharing: Sharing, present: Iterable[int]) -> dict[str, Any]:
    """Return the shards that ``member`` reads, and those it computes beside the ``present`` data slots."""
    slot, owner = member.data_slot, list(range(sharing.data_slots))
    if sharing.policy == "constant":
        seated = frozenset(x for x in present if 0 <= x < sharing.data_slots)
        owner = list(settle(sharing.data_slots, sharing.readers, seated).owner)
    has_shard = 0 <= slot < sharing.data_slots
    return {
        "replica": member.replica,
        "data_slot": slot,
        "rack": member.rack,
        "reads": sorted(stack_of(slot, sharing.data_slots, sharing.readers)) if has_shard else [],
        "computes": [shard for shard, computed_on in enumerate(owner) if computed_on == slot],
    }


def _warning(last_reader: dict[str, str], sharing: Sharing) -> str:
    if not last_reader:
        return ""
    named = first_of([f"{shard} ({replica})" for shard, replica in last_reader.items()], _NAMED)
    shards = f"shard {named} has" if len(last_reader) == 1 else f"shards {named} have"
    return (
        f"{shards} one reader left: when it dies, {_LOSSES[sharing.on_loss]}; bring back a replica that "
        "reads the same data"
    )
