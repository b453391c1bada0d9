"""Messages between the ranks of one replica: commands from rank 0, and their outcomes. Pure.

A command is an effect of the member core that the rank must perform. An outcome is the event in which that
command ended. Both travel as JSON under the strict rules of ``wire``.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, get_args

import msgspec

from fabric.errors import ProtocolError
from fabric.model import DURABLE, MAX_INTEGER, Int64, Member, RankAddress, RankTimes, Record, StepTimes
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.wire import MAX_BYTES, decode_value, encode_value


@dataclass(frozen=True, slots=True)
class NameSnapshot:
    """Serve this rank's part of the snapshot of ``step``. Each rank holds one part.

    Ends in SnapshotNamed.
    """

    step: Int64
    generation: Int64
    digests: tuple[str, ...]  # digests of all parts, in rank order; empty: one is missing, forget this part
    durable: bool = False  # the snapshot becomes a durable checkpoint too


RankEffect = (
    io.LinkUp
    | io.Switch
    | io.StartExchange
    | io.AbortExchange
    | io.Compute
    | io.DropGradient
    | io.Apply
    | io.Publish
    | io.Install
    | io.TellDigest
    | io.TakeSnapshot
    | io.Finish
    | io.Stop
    | io.FetchState
    | io.FetchGradient
    | io.CancelFetch
    | io.RetainGradients
    | NameSnapshot
)


@dataclass(frozen=True, slots=True)
class SnapshotNamed:
    """This rank's part is served under the digests of all ranks, or cannot be."""

    step: Int64
    generation: Int64
    done: bool  # whether the checkpoint server serves this rank's part


@dataclass(frozen=True, slots=True)
class SnapshotDue:
    """All ranks take a snapshot of the state at ``step`` now. Only rank 0 orders it."""

    step: Int64
    durable: bool = False  # whether it is time for a durable checkpoint too


RankEvent = (
    io.Ready
    | io.Digested
    | io.Streaming
    | io.Computed
    | io.Installed
    | io.InstallFailed
    | io.Closing
    | io.Busy
    | io.Noticed
    | io.Saved
    | io.LoopRaised
    | io.Linked
    | io.LinkFailed
    | io.Exchanged
    | io.ExchangeFailed
    | io.StateFetched
    | io.FetchFailed
    | io.GradientFetched
    | io.GradientGone
    | io.Snapshotted
    | SnapshotNamed
    | SnapshotDue
)


@dataclass(frozen=True, slots=True)
class RankCommand:
    number: int  # the command's number, counted from the replica's start
    generation: int  # the replica's generation when rank 0 gave the command
    effect: RankEffect


@dataclass(frozen=True, slots=True)
class RankOutcome:
    event: RankEvent
    number: int = 0  # number of the command that this event answers; 0: the event itself names the command


_EFFECTS = {kind.__name__: kind for kind in get_args(RankEffect)}
_EVENTS = {kind.__name__: kind for kind in get_args(RankEvent)}


class RankEnvelope(msgspec.Struct):
    """An effect or event on its way between ranks."""

    kind: str
    value: msgspec.Raw
    number: Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
    generation: Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)] = 0


def encode_command(command: RankCommand) -> bytes:
    return _encode(command.effect, command.number, command.generation)


def encode_outcome(outcome: RankOutcome) -> bytes:
    return _encode(outcome.event, outcome.number)


def decode_command(data: bytes) -> RankCommand:
    """Decode a command; raise ProtocolError for bytes that are not exactly one."""
    envelope, effect = _decode(data, _EFFECTS)
    return RankCommand(envelope.number, envelope.generation, effect)


def decode_outcome(data: bytes) -> RankOutcome:
    """Decode an outcome; raise ProtocolError for bytes that are not exactly one."""
    envelope, event = _decode(data, _EVENTS)
    return RankOutcome(event, envelope.number)


def _encode(value: RankEffect | RankEvent, number: int, generation: int = 0) -> bytes:
    raw = msgspec.Raw(encode_value(value))
    return msgspec.json.encode(RankEnvelope(type(value).__name__, raw, number, generation))


def _decode(data: bytes, kinds: Mapping[str, type]) -> tuple[RankEnvelope, Any]:
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_BYTES}")
    envelope = decode_value(RankEnvelope, data, "what another rank sent")
    if envelope.kind not in kinds:
        raise ProtocolError(
            f"another rank sent {envelope.kind[:40]!r}, which is not for this side: run the same "
            "release of fabric on all ranks"
        )
    return envelope, decode_value(kinds[envelope.kind], bytes(envelope.value), envelope.kind)


# --- the ranks as one replica ------------------------------------------------------------------------


def replica_digest(digests: Sequence[str]) -> str:
    """Combine the ranks' digests, in rank order, into the replica's (32 hex); empty if any is empty.

    The digest of a replica of one rank is that rank's own.
    """
    if not all(digests):
        return ""
    if len(digests) == 1:
        return digests[0]
    return hashlib.blake2b(" ".join(digests).encode(), digest_size=16).hexdigest()


def summed_digest(digests: Sequence[str]) -> str:
    """Combine the digests (32 hex) of ranks in any layout; empty if any is empty.

    The first half of the digests is equal at all ranks; the second halves are summed. Raises ProtocolError if
    the first halves differ."""
    if not all(digests):
        return ""
    if len({digest[:16] for digest in digests}) > 1:
        raise ProtocolError("the ranks of a replica describe their state differently: run one script on all")
    total = sum(int(digest[16:], 16) for digest in digests) % 2**64
    return f"{digests[0][:16]}{total:016x}"


Metrics = tuple[tuple[str, float], ...]
# A replica of more ranks reports no times by rank, so that its heartbeats stay small.
MOST_TIMED_RANKS = 64


def replica_times(times: Sequence[StepTimes | None], stages: Sequence[int] = ()) -> StepTimes | None:
    """Combine the ranks' times of one step, in rank order: rank 0's, with a short entry for each rank.

    ``stages``: the pipeline stage of each rank; empty: all ranks are one stage.
    """
    timed = [x for x in times if x is not None]
    if not timed or len(timed) < len(times):
        return None
    measured = tuple(x for rank in timed for x in rank.measured)[:MOST_TIMED_RANKS]
    if len(timed) > MOST_TIMED_RANKS:
        return replace(timed[0], measured=measured)
    placed = zip(timed, stages or [0] * len(timed), strict=True)
    ranks = tuple(_rank_times(x, stage) for x, stage in placed)
    return replace(timed[0], ranks=ranks, measured=measured)


def _rank_times(times: StepTimes, stage: int) -> RankTimes:
    return RankTimes(
        compute_s=round(max(0.0, times.compute_s - times.waited_s), 6),
        waited_s=round(times.waited_s, 6),
        tokens=sum(times.work.values()),
        squares=times.squares,
        stage=stage,
    )


def replica_share(groups: Sequence[int], shares: Sequence[tuple[float, Metrics]]) -> tuple[float, Metrics]:
    """Combine the ranks' weights and metrics, in rank order, into the replica's.

    Ranks of one of the ``groups`` compute the same samples, so a group counts once. Gradients are means over
    the groups, so the weight is the mean of the groups' weights. Metrics are sums. Raise ProtocolError where
    the ranks of a group disagree.
    """
    weights: dict[int, float] = {}
    metrics: dict[str, dict[int, float]] = {}
    for group, (weight, values) in zip(groups, shares, strict=True):
        if weight > 0 and weights.setdefault(group, weight) != weight:
            raise ProtocolError(
                f"ranks that compute the same samples gave them the weights {weights[group]:g} and "
                f"{weight:g}: they must agree"
            )
        for name, value in values:
            metrics.setdefault(name, {}).setdefault(group, value)
    totals = tuple((name, sum(by.values())) for name, by in sorted(metrics.items()))
    return sum(weights.values()) / len(set(groups)), totals


# --- addresses ---------------------------------------------------------------------------------------


def rank_of_url(url: str) -> int:
    """The rank in the fragment of a checkpoint server's URL; 0 without a fragment, -1 for a bad one."""
    _, separator, fragment = url.partition("#")
    if not separator:
        return 0
    return int(fragment) if fragment.isascii() and fragment.isdecimal() and len(fragment) < 10 else -1


def by_rank(urls: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """Group checkpoint-server URLs by rank, with the rank fragment removed."""
    ranks = sorted({rank_of_url(u) for u in urls if u != DURABLE} - {-1})
    return {rank: urls_of_rank([u for u in urls if u != DURABLE], rank) for rank in ranks}


def urls_of_rank(urls: Sequence[str], rank: int) -> tuple[str, ...]:
    """The ``urls`` that serve ``rank``, without the rank fragment. Durable storage serves every rank."""
    serving = (u for u in urls if u == DURABLE or rank_of_url(u) == rank)
    return tuple(dict.fromkeys(u.partition("#")[0] for u in serving))


def seen_by_rank(record: Record, rank: int) -> Record:
    """Put the addresses that ``rank`` dials into ``record``: the same rank's address in every replica."""
    return replace(record, roster=tuple(_seen(x, rank) for x in record.roster))


def _seen(member: Member, rank: int) -> Member:
    count = 1 + len(member.ranks)
    if rank >= count:
        # The leader refuses such a session; this error replaces an IndexError if a leader ever admits it.
        raise ProtocolError(
            f"{member.replica} has {count} ranks and no rank {rank}: start every replica with the "
            "same number of ranks"
        )
    address = member.ranks[rank - 1] if rank else RankAddress(member.link, member.ckpt)
    return replace(member, link=address.link, ckpt=address.ckpt.partition("#")[0], ranks=())
