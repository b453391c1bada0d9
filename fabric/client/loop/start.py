"""How a trainer joins its job: alone, or as one rank of a replica.

The ranks of a replica first exchange their settings. Rank 0 then speaks for the replica, and the others
follow it.
"""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash
from msgspec.structs import replace

from fabric.client.control.engine import Engine, EngineParts
from fabric.client.control.rank_engines import FollowerEngine, HeadEngine
from fabric.client.process.last_notes import find_job_end
from fabric.errors import ConfigError
from fabric.model import EVERYTHING, DataPlan, LaunchedLayouts, RankAddress, Sharing, SnapshotRef, Value
from fabric.protocol.member.core import MemberCore
from fabric.protocol.member.state import MemberConfig
from fabric.protocol.messages.network import OpenSession
from fabric.protocol.messages.rank_messages import SnapshotDue, replica_digest, summed_digest, voices_of
from fabric.protocol.rules.own_memory import replay_steps
from fabric.runtime.config import advertised_hosts, layout_orders
from fabric.runtime.http import url_host
from fabric.runtime.rank_layout import read_offer
from fabric.runtime.system_calls import seconds_since_boot
from fabric.transport.greeting import Greeting


class TrainingSetup(Value):
    """The loop's values that other members must know, or must have too."""

    plan: DataPlan  # the data of the first steps
    data: str  # the data settings that must be equal on all members that begin at the same step, in words
    digest: str  # digest of the initial state; empty where digests are off
    part: int = 0  # number of the slice of a micro-batch that this rank computes
    sharing: Sharing = EVERYTHING  # how micro-batches are divided among the members
    data_slot: int = -1
    step: int = 0  # step of the initial state
    calls_exchange: bool = False  # each replayed gradient takes a run of the whole loop


def stages_of(names: Sequence[str]) -> tuple[int, ...]:
    """Return the pipeline stage of each rank; empty where all ranks are one stage.

    ``names``: by rank, the digest of the parameters' names. Stages count in the order of their first ranks.
    """
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names) if len(numbers) > 1 else ()


def make_engine(parts: EngineParts) -> Engine:
    process = parts.process
    if process.group is None:
        return Engine(parts)
    if process.group.rank == 0:
        return HeadEngine(parts, process.group, process.incarnation)
    return FollowerEngine(parts, process.group, process.incarnation)


def begin(engine: Engine, parts: EngineParts, setup: TrainingSetup) -> None:
    """Listen for peers and take part in the job. Raises FabricError where the start fails."""
    settings, process = parts.settings, parts.process
    config = _config(parts, setup)
    port = engine.listen(settings.host, settings.ports)
    ckpt = parts.handle.url + (f"#{process.rank}" if process.rank else "")
    address = RankAddress(",".join(map(url_host, advertised_hosts(settings))) + f":{port}", ckpt)
    gradients, lanes = parts.gradients, parts.exchange.lanes
    cuts = lanes.text if lanes is not None else ""  # empty: all replicas have equal layouts of ranks
    if process.group is None:
        alone = parts.handle.held_by(1)
        of_rank = {"layout": gradients.layout, "digest": setup.digest, "snapshots": alone, "cuts": cuts}
        engine.begin(_make_core(parts, setup, config, address, **of_rank))
        return
    declared: list[dict[str, Any]] = []  # what all ranks say, at rank 0
    answer = _declare(parts, setup, address, declared)
    if cuts:
        # Within the replica gradients are means over the ranks that share a micro-batch, but replicas of
        # unequal layouts add sums over samples.
        gradients.scale = float(answer["parts"])
    if isinstance(engine, FollowerEngine):
        greeting = Greeting(
            job=settings.job,
            store_id="",
            replica=settings.replica,
            incarnation=process.incarnation,
            kind="rank",
            to=settings.replica,
            rank=process.rank,
            to_rank=answer["speaker"],
        )
        engine.join(answer["dial"], greeting, settings.token, tuple(answer["ranks"]))
        return
    assert isinstance(engine, HeadEngine)
    engine.groups = tuple(int(x["part"]) for x in declared)
    engine.stages = stages_of([x["names"] for x in declared])
    engine.links.voices = voices_of([x["ckpt"] for x in declared])[1:]
    layout = gradients.layout if cuts else replica_digest([x["layout"] for x in declared])
    ranks = tuple(RankAddress(x["link"], x["ckpt"]) for x in declared[1:])
    # A lost host's ranks do not know how large their state is.
    config = replace(config, replay_steps=max(x["replay"] for x in declared))
    # The snapshots that the servers of all ranks still hold, oldest first.
    held = [SnapshotRef(*x) for x in declared[0]["snapshots"] if all(x in y["snapshots"] for y in declared)]
    digest = (summed_digest if cuts else replica_digest)([x["digest"] for x in declared])
    of_ranks = {"layout": layout, "digest": digest, "snapshots": tuple(held), "ranks": ranks, "cuts": cuts}
    engine.begin(_make_core(parts, setup, config, address, **of_ranks))
    if not any(x["holds"] for x in declared):
        # If the replicas' initial states differ, a new job may begin from this snapshot. The snapshot must
        # not overwrite any part of the job's state, whatever its layout.
        engine.post(SnapshotDue(setup.step))


def _declare(
    parts: EngineParts, setup: TrainingSetup, address: RankAddress, declared: list[dict[str, Any]]
) -> dict[str, Any]:
    """Tell rank 0 what this rank is; return its answer. Rank 0 gets what all ranks say, in ``declared``."""
    group, gradients = parts.process.group, parts.gradients
    assert group is not None
    own = {
        "link": address.link,
        "ckpt": address.ckpt,
        "work": [setup.plan.micro_batches, setup.data, setup.step],
        "layout": gradients.layout,
        "digest": setup.digest,
        "part": setup.part,
        "names": xxhash.xxh3_64_hexdigest("\n".join(name for name, _ in gradients.parameters).encode()),
        "snapshots": [[x.generation, x.step, x.digest] for x in parts.handle.held_by(group.size)],
        "holds": bool(parts.handle.snapshots),
        "replay": _replay_steps(parts, setup),
    }
    return group.ask(own, lambda rows: answers_of_rank_0(rows, declared))


def answers_of_rank_0(rows: list[dict[str, Any]], declared: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Let rank 0 tell each rank whom it dials and for whom it speaks; add ``rows`` to ``declared``."""
    for rank, row in enumerate(rows):
        if row["work"] != rows[0]["work"]:
            raise ConfigError(
                f"rank {rank} has other data settings than rank 0, or another step: give attach, "
                "session.loader and session.steps the same arguments on all ranks of a replica"
            )
    declared += rows
    parts = len({x["part"] for x in rows})
    answers: list[Mapping[str, Any]] = [{}] * len(rows)
    for ranks in voices_of([x["ckpt"] for x in rows]):
        for rank in ranks:
            first = rank == ranks[0]
            speaker = 0 if first else ranks[0]
            about = {"speaker": speaker, "dial": rows[speaker]["link"], "ranks": ranks if first else [rank]}
            answers[rank] = {"parts": parts, **about}
    return answers


def _config(parts: EngineParts, setup: TrainingSetup) -> MemberConfig:
    settings, offer = parts.settings, read_offer(layout_orders())
    return MemberConfig(
        min_replicas=settings.min_replicas,
        autonomy_s=settings.autonomy_s,
        digest_every=settings.digest_steps,
        replay=settings.reproducible,
        replay_steps=_replay_steps(parts, setup),
        exchange_s=settings.exchange_s,
        user_code_s=settings.user_code_s,
        on_nan=settings.on_nan,
        adapt=settings.adapt,
        launched=LaunchedLayouts(settings.layout, offer.allowed, offer.refused),
        stores=bool(settings.durable),
        retain=parts.exchange.retain,
        plan=setup.plan,
    )


def _make_core(
    parts: EngineParts, setup: TrainingSetup, config: MemberConfig, address: RankAddress, **of_ranks: Any
) -> MemberCore:
    """Make the core; ``of_ranks``: what all ranks of this replica say together in ``OpenSession``."""
    settings, durable = parts.settings, parts.durable.find()
    identity = OpenSession(
        generation=0,
        step=setup.step,
        epoch=0,
        replica=settings.replica,
        incarnation=parts.process.incarnation,
        link=address.link,
        ckpt=address.ckpt,
        micro_batches=setup.plan.micro_batches,
        data=setup.data,
        predecessors=parts.process.predecessors,
        sharing=setup.sharing,
        data_slot=setup.data_slot,
        rack=settings.rack,
        tensors=parts.gradients.described,
        plane=parts.plane.kind,
        spare=settings.spare,
        ended=find_job_end(settings.home),
        secret=secrets.token_hex(16),
        durable=durable or (),
        **of_ranks,
    )
    return MemberCore(identity, replace(config, storage_failed=durable is None), seconds_since_boot())


def _replay_steps(parts: EngineParts, setup: TrainingSetup) -> int:
    """Return ``OpenSession.replay_steps``. Without digests nobody would notice a wrong state in memory."""
    if not parts.settings.digest_steps:
        return 0
    most = replay_steps(max(parts.handle.sizes, default=0), parts.gradients.nbytes)
    return min(most, 1) if setup.calls_exchange else most
