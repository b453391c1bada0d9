"""What the ranks of one replica say to each other: orders from rank 0, and outcomes of them. Pure.

An order is an effect of the member core that this rank must perform; an outcome is the event in which it
ended. Both travel as JSON under the strict rules of ``wire``. ``number`` ties an outcome to its order, for a
fetch that was cancelled may still end; ``generation`` is the replica's when the order was given.
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
    """All ranks hold their part of the snapshot of ``step``: serve mine under the digests of all of them, in
    rank order; ends in SnapshotNamed. Without digests somebody's part is missing: forget mine. ``durable``:
    it becomes a durable checkpoint too."""

    step: int
    generation: int
    digests: tuple[str, ...]
    durable: bool = False


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
    """My part is served under the digests of all ranks; ``done`` False: it could not be."""

    step: int
    generation: int
    done: bool


@dataclass(frozen=True, slots=True)
class SnapshotDue:
    """Rank 0 alone says it, with the state at ``step``: time for a snapshot of all ranks, and ``durable``:
    for a durable checkpoint."""

    step: int
    durable: bool = False


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
    """``number`` counts the orders of a replica's life."""

    number: int
    generation: int
    effect: RankEffect


@dataclass(frozen=True, slots=True)
class RankOutcome:
    """``number`` is the order's, or 0 where the event tells by itself what it answers."""

    event: RankEvent
    number: int = 0


_KINDS: dict[str, type] = {kind.__name__: kind for kind in (*get_args(RankEffect), *get_args(RankEvent))}


def encode_command(order: RankCommand) -> bytes:
    """The bytes of one order."""
    return _dump({"number": order.number, "generation": order.generation}, order.effect)


def encode_outcome(outcome: RankOutcome) -> bytes:
    """The bytes of one outcome."""
    return _dump({"number": outcome.number}, outcome.event)


def decode_command(data: bytes) -> RankCommand:
    """The order in ``data``; raises ProtocolError for anything that is not exactly one."""
    body = _load(data)
    value = _value(body, get_args(RankEffect))
    return RankCommand(_count(body, "number"), _count(body, "generation"), value)


def decode_outcome(data: bytes) -> RankOutcome:
    """The outcome in ``data``; raises ProtocolError for anything that is not exactly one."""
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


# --- one name for what all ranks hold together -------------------------------------------------------


def replica_digest(digests: Sequence[str]) -> str:
    """The digest (32 hex) of what the ranks hold together, from each rank's own in rank order. A replica of
    one rank is named by that rank's own digest; empty where any is."""
    if not all(digests):
        return ""
    if len(digests) == 1:
        return digests[0]
    return hashlib.blake2b(" ".join(digests).encode(), digest_size=16).hexdigest()


Metrics = tuple[tuple[str, float], ...]


def replica_share(groups: Sequence[int], said: Sequence[tuple[float, Metrics]]) -> tuple[float, Metrics]:
    """The replica's weight and metrics from each rank's, in rank order; ``groups`` tells whose samples are
    the same. Inside a replica gradients are means over the groups, so its weight is the mean of theirs;
    metrics are sums. What any rank of a group says counts once. Raises ProtocolError where they disagree."""
    weights: dict[int, float] = {}
    metrics: dict[str, dict[int, float]] = {}
    for group, (weight, values) in zip(groups, said, strict=True):
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
    """Whose checkpoint server this is: the rank in the fragment, 0 without one; -1 for what is none."""
    _, mark, fragment = url.partition("#")
    if not mark:
        return 0
    return int(fragment) if fragment.isascii() and fragment.isdecimal() and len(fragment) < 10 else -1


def by_rank(urls: Sequence[str]) -> dict[int, tuple[str, ...]]:
    """The checkpoint servers among ``urls`` by whose they are, ready to be dialled."""
    ranks = sorted({rank_of_url(u) for u in urls if u != DURABLE} - {-1})
    return {rank: urls_of_rank([u for u in urls if u != DURABLE], rank) for rank in ranks}


def urls_of_rank(urls: Sequence[str], rank: int) -> tuple[str, ...]:
    """Those of ``urls`` that serve ``rank``, ready to be dialled; durable storage serves all of them."""
    mine = (u for u in urls if u == DURABLE or rank_of_url(u) == rank)
    return tuple(dict.fromkeys(u.partition("#")[0] for u in mine))


def seen_by_rank(record: Record, rank: int) -> Record:
    """``record`` with the addresses that ``rank`` dials: those of the same rank of the other replicas."""
    return replace(record, roster=tuple(_seen(x, rank) for x in record.roster))


def _seen(member: Member, rank: int) -> Member:
    addresses = member.addresses
    if rank >= len(addresses):
        # Refused by the leader long before; named here rather than an index error.
        raise ProtocolError(
            f"{member.replica} has {len(addresses)} ranks and no rank {rank}: start every replica with the "
            "same number of ranks"
        )
    address = addresses[rank]
    return replace(member, link=address.link, ckpt=address.ckpt.partition("#")[0], ranks=())
