"""Messages between the ranks of one replica: commands from rank 0, and their outcomes. Pure.

A command is an effect of the member core that the rank must perform. An outcome is the event in which that
command ended. Both travel as JSON under the strict rules of ``wire``. A host gets one command for all of its
ranks, with what differs by rank (``Own``), and gives their equal kinds of outcomes as one message.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, get_args

import msgspec
from msgspec.structs import replace

from fabric.errors import ProtocolError
from fabric.model import DURABLE, MAX_INTEGER, Int64, RankTimes, Record, StepTimes, Value
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.wire import MAX_BYTES, decode_value, encode_value


class NameSnapshot(Value):
    """Serve this rank's part of the snapshot of ``step``. Each rank holds one part.

    Ends in SnapshotNamed.
    """

    step: Int64
    generation: Int64
    digests: tuple[str, ...]  # digests of all parts, in rank order; empty: one is missing, forget this part
    durable: bool = False  # the snapshot becomes a durable checkpoint too


RankEffect = io.RankEffect | NameSnapshot


class SnapshotNamed(Value):
    """This rank's part is served under the digests of all ranks, or cannot be."""

    step: Int64
    generation: Int64
    done: bool  # whether the checkpoint server serves this rank's part


class SnapshotDue(Value):
    """All ranks take a snapshot of the state at ``step`` now. Only rank 0 orders it."""

    step: Int64
    durable: bool = False  # whether it is time for a durable checkpoint too


class RankLost(Value):
    """The link to this rank ended."""

    rank: Int64
    why: str


RankEvent = io.RankEvent | SnapshotNamed | SnapshotDue | RankLost
# The part of a command for one rank alone: the link and the server of each member, or the URLs of a fetch.
Own = tuple[str, ...]


class RankCommand(Value):
    number: int  # the command's number, counted from the replica's start
    generation: int  # the replica's generation when rank 0 gave the command
    effect: RankEffect


class RankOutcome(Value):
    event: RankEvent
    number: int = 0  # number of the command that this event answers; 0: the event itself names the command


class FromHost(Value):
    """An event of each of ``ranks`` of one host, all of one kind; rank 0's own outcomes come so too."""

    ranks: tuple[int, ...]
    events: tuple[RankEvent, ...]
    number: int = 0  # as in RankOutcome


_EFFECTS = {kind.__name__: kind for kind in get_args(RankEffect)}
_EVENTS = {kind.__name__: kind for kind in get_args(RankEvent)}


class RankEnvelope(msgspec.Struct, omit_defaults=True):
    """An effect, or the events of some ranks, on its way between ranks."""

    kind: str
    value: msgspec.Raw
    number: Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)]
    generation: Annotated[int, msgspec.Meta(ge=0, le=MAX_INTEGER)] = 0
    own: tuple[Own, ...] = ()  # of a command: what each rank of the host gets for itself; empty: nothing
    # Of outcomes: the ranks whose events ``value`` lists, or that all have its only one; empty: the sender.
    ranks: tuple[Int64, ...] = ()


class HostCommands:
    """Encodes one command for every host."""

    def __init__(self, command: RankCommand) -> None:
        effect, raw = command.effect, msgspec.Raw(encode_value(command.effect))
        self._envelope = RankEnvelope(type(effect).__name__, raw, command.number, command.generation)
        self._same = msgspec.json.encode(self._envelope)

    def of(self, own: tuple[Own, ...] = ()) -> bytes:
        """Return the message for a host whose ranks get ``own`` for themselves."""
        if not own:
            return self._same
        self._envelope.own = own
        return msgspec.json.encode(self._envelope)


def encode_outcome(outcome: RankOutcome) -> bytes:
    raw = msgspec.Raw(encode_value(outcome.event))
    return msgspec.json.encode(RankEnvelope(type(outcome.event).__name__, raw, outcome.number))


def encode_outcomes(outcomes: FromHost) -> bytes:
    first = outcomes.events[0]
    if all(event == first for event in outcomes.events):
        raw = encode_value(first)
    else:
        raw = b"[" + b",".join(map(encode_value, outcomes.events)) + b"]"
    return msgspec.json.encode(
        RankEnvelope(type(first).__name__, msgspec.Raw(raw), outcomes.number, ranks=outcomes.ranks)
    )


def decode_command(data: bytes) -> RankCommand:
    """Decode a command for the first rank; raise ProtocolError for bytes that are not exactly one."""
    envelope = _envelope(data, _EFFECTS)
    effect = decode_value(_EFFECTS[envelope.kind], bytes(envelope.value), envelope.kind)
    effect = with_own(effect, envelope.own[0]) if envelope.own else effect
    return RankCommand(envelope.number, envelope.generation, effect)


def commands_by_rank(data: bytes, count: int) -> list[bytes]:
    """Return what a command to a host of ``count`` ranks says to each of them. Raises ProtocolError."""
    envelope = _envelope(data, _EFFECTS)
    if not envelope.own:
        return [data] * count
    if len(envelope.own) != count:
        raise ProtocolError(f"a command is for {len(envelope.own)} ranks, and this host has {count}")
    return [msgspec.json.encode(msgspec.structs.replace(envelope, own=(own,))) for own in envelope.own]


def decode_outcomes(data: bytes, ranks: Sequence[int]) -> FromHost:
    """Decode what the first of ``ranks`` sent, which speaks for all of them. Raises ProtocolError."""
    envelope = _envelope(data, _EVENTS)
    kind, raw = _EVENTS[envelope.kind], bytes(envelope.value)
    who = envelope.ranks or (ranks[0],)
    if not set(who).issubset(ranks):
        raise ProtocolError(f"rank {ranks[0]} speaks for ranks of another host")
    if raw.startswith(b"["):
        events = decode_value(tuple[kind, ...], raw, envelope.kind)  # type: ignore[valid-type]
    else:
        events = (decode_value(kind, raw, envelope.kind),) * len(who)
    if len(events) != len(who):
        raise ProtocolError(f"{len(who)} ranks have {len(events)} outcomes")
    return FromHost(who, events, envelope.number)


def _envelope(data: bytes, kinds: Mapping[str, type]) -> RankEnvelope:
    if len(data) > MAX_BYTES:
        raise ProtocolError(f"a message of {len(data)} bytes is over the limit of {MAX_BYTES}")
    envelope = decode_value(RankEnvelope, data, "what another rank sent")
    if envelope.kind not in kinds:
        raise ProtocolError(
            f"another rank sent {envelope.kind[:40]!r}, which is not for this side: run the same "
            "release of fabric on all ranks"
        )
    return envelope


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
    measured = tuple(x for rank in timed for x in rank.measured)[:MOST_TIMED_RANKS]
    if len(times) > MOST_TIMED_RANKS:
        return replace(times[0], measured=measured) if times[0] is not None else None
    if not timed or len(timed) < len(times):
        return None
    ranks = tuple(
        RankTimes(
            compute_s=round(max(0.0, x.compute_s - x.waited_s), 6),
            waited_s=round(x.waited_s, 6),
            tokens=sum(x.work.values()),
            squares=x.squares,
            stage=stage,
        )
        for x, stage in zip(timed, stages or [0] * len(timed), strict=True)
    )
    return replace(timed[0], ranks=ranks, measured=measured)


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


def voices_of(urls: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Group the ranks that speak to rank 0 as one, the lowest first: those of one host, but not of rank 0's.

    ``urls``: by rank, the URL of its checkpoint server; a host has one server.
    """
    hosts: dict[str, list[int]] = {}
    for rank, url in enumerate(urls):
        hosts.setdefault(url.partition("#")[0].partition("/ranks/")[0], []).append(rank)
    near, *others = hosts.values()
    return (*((rank,) for rank in near), *map(tuple, others))


def addresses_by_rank(record: Record, size: int) -> tuple[Own, ...]:
    """Return by rank the addresses that it dials: the same rank's link and server in every replica."""
    columns = []
    for x in record.roster:
        if len(x.ranks) + 1 < size:
            # The leader refuses such a session; this error replaces a ValueError if a leader ever admits it.
            count = len(x.ranks) + 1
            raise ProtocolError(
                f"{x.replica} has {count} ranks and no rank {count}: start every replica with the "
                "same number of ranks"
            )
        columns.append([(a.link, a.ckpt.partition("#")[0]) for a in x.addresses[:size]])
    return tuple(tuple(part for address in row for part in address) for row in zip(*columns, strict=True))


def with_own(effect: Any, own: Own) -> Any:
    """Put into ``effect`` what one rank gets for itself. Raises ProtocolError where this does not fit."""
    if isinstance(effect, io.FetchState | io.FetchGradient):
        return replace(effect, urls=own)
    if not isinstance(effect, io.LinkUp | io.Switch) or len(own) != 2 * len(effect.record.roster):
        raise ProtocolError(f"{type(effect).__name__} does not fit {len(own)} values of one rank")
    dialled = zip(effect.record.roster, own[::2], own[1::2], strict=True)
    roster = tuple(replace(x, link=link, ckpt=ckpt, ranks=()) for x, link, ckpt in dialled)
    return replace(effect, record=replace(effect.record, roster=roster))
