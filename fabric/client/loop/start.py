"""How a session begins to talk: alone, or as one rank of a replica whose ranks first tell each other what
they are. Rank 0 then speaks for the replica, and the others follow it.
"""

import secrets
from dataclasses import dataclass
from typing import Any

from fabric.client.control.engine import Engine, EngineParts
from fabric.client.control.rank_engines import FollowerEngine, HeadEngine
from fabric.client.loop import job_end_note
from fabric.client.process.process_identity import ProcessIdentity
from fabric.errors import ConfigError
from fabric.model import EVERYTHING, RankAddress, Sharing, SnapshotRef
from fabric.protocol.member.core import MemberCore
from fabric.protocol.member.state import MemberConfig, MemberIdentity, MemberState
from fabric.protocol.messages.rank_messages import SnapshotDue, replica_digest
from fabric.runtime.clock import seconds_since_boot
from fabric.runtime.config import Settings, advertised_host
from fabric.transport.greeting import Greeting


@dataclass(frozen=True, slots=True)
class TrainingSetup:
    """What this process brings: how its data is cut (``part``: which slice of a micro-batch is its own) and
    shared out, the layout of its parameters (``tensors``: the same for people), the digest of its initial
    state (empty: none was taken) and its ``step``, and how gradients are exchanged (see ``DataPlane``)."""

    micro_batches: int
    data: str
    layout: str
    digest: str
    part: int = 0
    sharing: Sharing = EVERYTHING
    data_slot: int = -1
    tensors: tuple[str, ...] = ()
    plane: str = ""
    step: int = 0


def make_engine(parts: EngineParts, place: ProcessIdentity) -> Engine:
    """The engine of this rank."""
    if place.group is None:
        return Engine(parts)
    if place.group.rank == 0:
        return HeadEngine(parts, place.group, place.incarnation)
    return FollowerEngine(parts, place.group)


def begin(
    engine: Engine, parts: EngineParts, settings: Settings, place: ProcessIdentity, work: TrainingSetup
) -> None:
    """Listen, and take part in the job from now on. Raises FabricError where that cannot be."""
    config = _config(settings, parts.exchange.retain)
    port = engine.listen(settings.bind, settings.ports)
    address = RankAddress(f"{advertised_host(settings)}:{port}", _ckpt(parts, place.rank))
    if place.group is None:
        durable = parts.durable.find()
        identity = _identity(settings, place, work, address, work.layout, durable=durable)
        state = MemberState(0, work.step, work.digest)
        engine.begin(MemberCore(identity, config, seconds_since_boot(), state, parts.handle.held_by(1)))
        return
    said = place.group.gather(
        {
            "link": address.link,
            "ckpt": address.ckpt,
            "work": [work.micro_batches, work.data, work.step],
            "layout": work.layout,
            "digest": work.digest,
            "part": work.part,
            "snapshots": _told(parts.handle.held_by(place.group.size)),
            "holds": bool(parts.handle.snapshots),
        }
    )
    _check_equal_work(said)
    if isinstance(engine, FollowerEngine):
        greeting = Greeting(
            job=settings.job,
            store_id="",
            replica=settings.replica,
            incarnation=place.incarnation,
            kind="rank",
            to=settings.replica,
        )
        engine.join(said[0]["link"], greeting, settings.token)
        return
    assert isinstance(engine, HeadEngine)
    engine.groups = tuple(int(x["part"]) for x in said)
    layout = replica_digest([x["layout"] for x in said])
    ranks = tuple(RankAddress(x["link"], x["ckpt"]) for x in said[1:])
    durable = parts.durable.find()
    identity = _identity(settings, place, work, address, layout, ranks, durable)
    state = MemberState(0, work.step, replica_digest([x["digest"] for x in said]))
    held = _held_by_all(said)
    engine.begin(MemberCore(identity, config, seconds_since_boot(), state, held))
    if not any(one["holds"] for one in said):
        # What a first start may begin from, should the replicas' initial states differ. Never over a part of
        # a state of the job, whatever layout it is in.
        engine.post(SnapshotDue(work.step))


def _config(settings: Settings, retain: bool) -> MemberConfig:
    return MemberConfig(
        min_replicas=settings.min_replicas,
        autonomy_s=settings.autonomy_s,
        digest_every=settings.digest_every if settings.reproducible else 0,
        replay=settings.reproducible,
        exchange_s=settings.exchange_s,
        user_code_s=settings.user_code_s,
        on_nan=settings.on_nan,
        retain=retain,
    )


def _ckpt(parts: EngineParts, rank: int) -> str:
    return parts.handle.url + (f"#{rank}" if rank else "")


def _identity(
    settings: Settings,
    place: ProcessIdentity,
    work: TrainingSetup,
    address: RankAddress,
    layout: str,
    ranks: tuple[RankAddress, ...] = (),
    durable: tuple[SnapshotRef, ...] | None = (),
) -> MemberIdentity:
    return MemberIdentity(
        replica=settings.replica,
        incarnation=place.incarnation,
        link=address.link,
        ckpt=address.ckpt,
        micro_batches=work.micro_batches,
        layout=layout,
        data=work.data,
        predecessors=place.predecessors,
        ranks=ranks,
        durable=durable or (),
        storage_unread=durable is None,
        sharing=work.sharing,
        data_slot=work.data_slot,
        rack=settings.rack,
        tensors=work.tensors,
        plane=work.plane,
        spare=settings.spare,
        ended=job_end_note.find(settings.home),
        secret=secrets.token_hex(16),
    )


def _check_equal_work(said: list[dict[str, Any]]) -> None:
    for rank, one in enumerate(said):
        if one["work"] != said[0]["work"]:
            raise ConfigError(
                f"rank {rank} has other data settings than rank 0, or another step: give attach, "
                "session.loader and session.steps the same arguments on all ranks of a replica"
            )


def _told(refs: tuple[SnapshotRef, ...]) -> list[list[object]]:
    return [[ref.generation, ref.step, ref.digest] for ref in refs]


def _held_by_all(said: list[dict[str, Any]]) -> tuple[SnapshotRef, ...]:
    """Snapshots that the servers of all ranks still hold, oldest first."""
    others = [[tuple(ref) for ref in one["snapshots"]] for one in said[1:]]
    return tuple(
        SnapshotRef(*ref) for ref in said[0]["snapshots"] if all(tuple(ref) in held for held in others)
    )
