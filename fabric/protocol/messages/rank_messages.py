"""Messages between the ranks of one replica: commands from rank 0, and their outcomes. Pure.

A command is an effect of the member core that the rank must perform. An outcome is the event in which it
ended. Both travel as JSON under the strict rules of ``wire``.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from fabric.errors import ProtocolError
from fabric.model import DURABLE, Member, Record
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.wire import MAX_BYTES, decode_as


@dataclass(frozen=True, slots=True)
class NameSnapshot:
    """Serve this rank's part of the snapshot of ``step``, of which each rank holds its own.

    Ends in SnapshotNamed.
    """

    step: int
    generation: int
    digests: tuple[str, ...]  # of all ranks, in rank order; empty: a part is missing, so forget this one
    durable: bool = False  # it becomes a durable checkpoint too


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

    step: int
    generation: int
    done: bool  # it is served


@dataclass(frozen=True, slots=True)
class SnapshotDue:
    """Time for a snapshot of the state at ``step`` by all ranks. Only rank 0 says so."""

    step: int
    durable: bool = False  # time for a durable checkpoint too


RankEvent = (
    io.Ready
    | io.Digested
    | io.Computed
    | io.Installed
    | io.InstallFailed
    | io.Closing
    | io.Busy
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
    number: int  # counts the commands of a replica's life
    generation: int  # the replica's when the command was given
    effect: RankEffect


@dataclass(frozen=True, slots=True)
class RankOutcome:
    event: RankEvent
    number: int = 0  # the command's, as a cancelled fetch may still end; 0: the event says what it answers


_KINDS: dict[str, type] = {kind.__name__: kind for kind in (*get_args(RankEffect), *get_args(RankEvent))}


def encode_command(command: RankCommand) -> bytes:
    return _dump({"number": command.number, "generation": command.generation}, command.effect)


def encode_outcome(outcome: RankOutcome) -> bytes:
    return _dump({"number": outcome.number}, outcome.event)


def decode_command(data: bytes) -> RankCommand:
    """Decode a command; raise ProtocolError for bytes that are not exactly one."""
    body = _load(data)
    value = _value(body, get_args(RankEffect))
    return RankCommand(_count(body, "number"), _count(body, "generation"), value)


def decode_outcome(data: bytes) -> RankOutcome:
    """Decode an outcome; raise ProtocolError for bytes that are not exactly one."""
    body = _load(data)
    return RankOutcome(_value(body, get_args(RankEvent)), _count(body, "number"))


def _dump(head: dict[str, Any], value: RankEffect | RankEvent) -> bytes:
    body = {**head, "kind": type(value).__name__, "value": asdict(value)}
    return json.dumps(body, separators=(",", ":"), allow_nan=False).encode()


def _load(data: bytes) -> dict[str, Any]:
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_BYTES}")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"another rank sent what is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise ProtocolError(f"another rank sent a {type(body).__name__} and not an object")
    return body


def _count(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**63:
        raise ProtocolError(f"another rank sent no usable {name}")
    return value


def _value(body: dict[str, Any], kinds: tuple[type, ...]) -> Any:
    kind = _KINDS.get(body["kind"]) if isinstance(body.get("kind"), str) else None
    if kind is None or kind not in kinds:
        raise ProtocolError(
            f"another rank sent {str(body.get('kind'))[:40]!r}, which is not for this side: run the same "
            "release of fabric on all ranks"
        )
    return decode_as(kind, body.get("value"), kind.__name__)


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


Metrics = tuple[tuple[str, float], ...]


def replica_share(groups: Sequence[int], shares: Sequence[tuple[float, Metrics]]) -> tuple[float, Metrics]:
    """Combine the ranks' weights and metrics, in rank order, into the replica's.

    Ranks of one of the ``groups`` compute the same samples, so a group counts once. Gradients are means over
    the groups, so the weight is the mean of theirs. Metrics are sums. Raise ProtocolError where the ranks of
    a group disagree.
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
    """Put the addresses that ``rank`` dials into ``record``: those of the same rank of every replica."""
    return replace(record, roster=tuple(_seen(x, rank) for x in record.roster))


def _seen(member: Member, rank: int) -> Member:
    addresses = member.addresses
    if rank >= len(addresses):
        # The leader refuses such a session before; a clear error beats an index error all the same.
        raise ProtocolError(
            f"{member.replica} has {len(addresses)} ranks and no rank {rank}: start every replica with the "
            "same number of ranks"
        )
    address = addresses[rank]
    return replace(member, link=address.link, ckpt=address.ckpt.partition("#")[0], ranks=())
