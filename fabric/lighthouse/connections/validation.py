"""Decodes and checks messages of members and checkpoint servers before a core gets them.

A core trusts its events. It puts names, addresses and reasons into the record, whose size the store limits.
So names and addresses are checked, and sentences are cut.
"""

import re
from typing import cast, get_args

from msgspec.structs import replace

from fabric.errors import ProtocolError
from fabric.model import MAX_INTEGER, MAX_MICRO_BATCHES, Policy, Sharing, printable, shortened
from fabric.protocol.messages import network as m
from fabric.protocol.messages import wire
from fabric.protocol.messages.rank_messages import MOST_TIMED_RANKS
from fabric.protocol.rules.layout_text import MAX_CHARACTERS, check_layout, known_layout
from fabric.runtime.config import parse_replicas

# A report may list every micro-batch of a step. A session names all ranks. A heartbeat lists the seconds of
# each micro-batch.
MAX_MESSAGE_BYTES = 64 * 1024
# One message holds the loop of all jobs while it is decoded and handled: 2 MiB take some 30 ms.
MOST_BYTES = 2 << 20
# The statuses of all ranks of a host.
MAX_STATUS_BYTES = 256 * 1024
_MORE_BYTES: dict[type, int] = {m.OpenSession: MOST_BYTES, m.Heartbeat: 256 * 1024, m.Report: MOST_BYTES}
_MORE_BYTES[m.ServerStatus] = MAX_STATUS_BYTES
# The reasons in these messages may be long, a user's exception for instance; they are cut at once.
_MORE_BYTES |= dict.fromkeys((m.Aborted, m.LoopFailed, m.CannotContinue, m.RequestState), 1 << 20)
MAX_ADDRESS = 300
# The most names of peers in one message other than a report.
MAX_NAMES = 256
# The most names of members that one process cannot reach. An honest member names fewer peers than this.
MAX_UNREACHABLE = 64
MAX_NAME = 64
MAX_SECRET = 64
# The lighthouse refuses a time budget of more than a year.
_MAX_BUDGET_S = 366 * 86400.0
MAX_DIGEST = 200
MAX_SENTENCE = 300
# The most characters in names and values of the settings that the data order depends on.
MAX_SETTINGS = 1024
MAX_DESCRIPTION = 64 * 1024
# The most ranks of one replica.
MAX_RANKS = 16_384
MAX_SNAPSHOTS = 64
# The default of ``--limit max-replicas``.
MAX_REPLICAS = 1024
# The most that this limit accepts: a record of some 35,000 replicas fills a store's longest value.
MOST_REPLICAS = 30_000
MAX_DEATHS = 64
# The most ranks of one checkpoint server.
MAX_LOCAL_RANKS = 256

_NAME = re.compile(r"(?!\.+$)[A-Za-z0-9._-]{1,64}")
_CKPT = re.compile(
    r"https?://(\[[0-9A-Fa-f:.%]{2,64}\]|[A-Za-z0-9._-]{1,253}):\d{1,5}(/|/ranks/\d{1,6})?(#\d{1,6})?",
    re.ASCII,
)
_MEMBER_KINDS = get_args(m.MemberMessage)
_TRAINER_STATES = ("running", "stopped", "gone", "absent")


def check_name(what: str, name: str) -> str:
    """Return ``name``. Raises ProtocolError unless it can stand in a path and a key."""
    if not _NAME.fullmatch(name):
        raise ProtocolError(
            f"the {what} {name[:80]!r} is no name: give 1 to 64 letters, digits, dots, dashes or underscores,"
            " not dots alone"
        )
    return name


def parse_policy(text: str, start_wait_s: float) -> Policy:
    """Return the policy that ``?replicas=`` asks for. Raises ConfigError.

    "3": the job starts with 3 replicas and goes on with 1 or more. "2:8": it needs 2 and takes at most 8.
    Empty: as "1".
    """
    least, start = parse_replicas(text or "1")
    most = start if ":" in text else max(MOST_REPLICAS, start)
    return Policy(min_replicas=least, max_replicas=most, start_replicas=start, start_wait_s=start_wait_s)


def decode_session(data: str) -> m.OpenSession:
    """Decode the first message of a session. Raises ProtocolError."""
    message = wire.decode(data, most_bytes)
    if not isinstance(message, m.OpenSession):
        raise ProtocolError(f"a session begins with a Session, not with a {type(message).__name__}")
    return _checked_session(message)


def decode_member(data: str) -> m.MemberMessage:
    """Decode a later message of a session, with its sentences cut. Raises ProtocolError."""
    message = wire.decode(data, most_bytes)
    if type(message) is m.Heartbeat:
        return _checked_beat(message)
    if not isinstance(message, _MEMBER_KINDS):
        raise ProtocolError(f"a {type(message).__name__} is not for the lighthouse")
    if isinstance(message, m.OpenSession):
        return _checked_session(message)
    if isinstance(message, m.Report):
        for name in ("digest", "gradient_digest", "committed_digest"):
            _check_length(name, getattr(message, name), MAX_DIGEST)
        _check_names("round_lacked", message.round_lacked, MOST_REPLICAS, MAX_NAME)
        if len(message.have) > MAX_MICRO_BATCHES:
            raise ProtocolError(f"have must be a list of at most {MAX_MICRO_BATCHES}")
        _check_length("plan", message.plan.described, MAX_SETTINGS)
        if not 1 <= message.plan.micro_batches <= MAX_MICRO_BATCHES:
            raise ProtocolError(f"Report.plan must have from 1 to {MAX_MICRO_BATCHES} micro-batches")
        return replace(message, parted=cleaned(message.parted))
    if isinstance(message, m.Aborted):
        _check_names("waiting_for", message.waiting_for, MAX_NAMES)
        _check_names("unreachable", message.unreachable, MAX_UNREACHABLE, MAX_NAME)
        _check_length("about", message.about, MAX_ADDRESS)
    if isinstance(message, m.SnapshotTaken):
        _check_length("joiner", message.joiner, MAX_ADDRESS)
        _check_length("digest", message.digest, MAX_DIGEST)
    if isinstance(message, m.Aborted | m.RequestState | m.CannotContinue | m.LoopFailed):
        return replace(message, why=cleaned(message.why))
    return cast(m.MemberMessage, message)


def decode_statuses(data: str) -> tuple[m.TrainerStatus, ...] | m.StatusUnchanged:
    """Decode the trainer statuses of a checkpoint server, one for each of its ranks. Raises ProtocolError."""
    message = wire.decode(data, most_bytes)
    if isinstance(message, m.StatusUnchanged):
        return message
    if not isinstance(message, m.TrainerStatus | m.ServerStatus):
        raise ProtocolError(f"a checkpoint server sends a TrainerStatus, not a {type(message).__name__}")
    statuses = (message,) if isinstance(message, m.TrainerStatus) else message.statuses
    if len(statuses) > MAX_LOCAL_RANKS or len({x.rank for x in statuses}) < len(statuses):
        raise ProtocolError(f"ServerStatus.statuses must be of at most {MAX_LOCAL_RANKS} different ranks")
    return tuple(map(_checked_status, statuses))


def _checked_status(message: m.TrainerStatus) -> m.TrainerStatus:
    check_name("replica", message.replica)
    _check_ckpt(message.ckpt)
    _check_snapshots(message)
    if len(message.parts) not in (0, len(message.snapshots)):
        raise ProtocolError("TrainerStatus.parts must have one number for each of snapshots, or none")
    if len(message.ages_s) not in (0, len(message.snapshots)) or any(age_s < 0 for age_s in message.ages_s):
        raise ProtocolError("TrainerStatus.ages_s must have one number from 0 for each of snapshots, or none")
    if not 0 <= message.rank < MAX_RANKS:
        raise ProtocolError(f"TrainerStatus.rank must be from 0 to {MAX_RANKS - 1}")
    if len(message.deaths) > MAX_DEATHS:
        raise ProtocolError(f"TrainerStatus.deaths must be a list of at most {MAX_DEATHS}")
    for death in message.deaths:
        if min(death.incarnation, death.step) < 0 or not 0 <= death.micro_batch < MAX_MICRO_BATCHES:
            raise ProtocolError(
                f"TrainerStatus.deaths must name steps from 0 and micro-batches up to {MAX_MICRO_BATCHES}"
            )
    if message.trainer not in _TRAINER_STATES:
        raise ProtocolError(f"TrainerStatus.trainer must be one of {', '.join(_TRAINER_STATES)}")
    if not _is_sentence(message.durable_error):
        return replace(message, durable_error=cleaned(message.durable_error))
    return message


def _checked_beat(beat: m.Heartbeat) -> m.Heartbeat:
    """Check a heartbeat; the usual heartbeat needs few checks and is not copied."""
    times = beat.times
    if times is not None and max(len(times.ranks), len(times.measured)) > MOST_TIMED_RANKS:
        raise ProtocolError(f"Heartbeat.times.ranks must be a list of at most {MOST_TIMED_RANKS}")
    if times is not None:
        _check_length("times.loss", times.loss, MAX_DIGEST)
    if not 0 <= beat.micro_batches <= MAX_MICRO_BATCHES:
        raise ProtocolError(f"Heartbeat.micro_batches must be from 0 to {MAX_MICRO_BATCHES}")
    if beat.waiting_for or beat.digest:
        _check_names("waiting_for", beat.waiting_for, MAX_NAMES)
        _check_length("digest", beat.digest, MAX_DIGEST)
    if beat.unreachable:
        _check_names("unreachable", beat.unreachable, MAX_UNREACHABLE, MAX_NAME)
    if _is_sentence(beat.phase) and (not beat.busy or _is_sentence(beat.busy)):
        return beat
    return replace(beat, phase=cleaned(beat.phase), busy=cleaned(beat.busy))


def _checked_session(session: m.OpenSession) -> m.OpenSession:
    check_name("replica", session.replica)
    _check_length("link", session.link, MAX_ADDRESS)
    _check_ckpt(session.ckpt)
    for name in ("digest", "layout", "roster", "plane", "store_id"):
        _check_length(name, getattr(session, name), MAX_DIGEST)
    _check_length("secret", session.secret, MAX_SECRET)
    _check_length("rack", session.rack, MAX_NAME)
    _check_length("adapt", session.adapt, MAX_NAME)
    _check_names("serves", session.serves, MAX_NAMES, MAX_NAME)
    if len(session.predecessors) > MAX_NAMES:
        raise ProtocolError(f"Session.predecessors must be a list of at most {MAX_NAMES}")
    if not 0 <= session.autonomy_s <= _MAX_BUDGET_S:
        raise ProtocolError("Session.autonomy_s must be a number of seconds from 0, and at most a year")
    for name in ("exchange_s", "user_code_s"):
        if not 0 < getattr(session, name) <= _MAX_BUDGET_S:
            raise ProtocolError(f"Session.{name} must be a number of seconds above 0, and at most a year")
    _check_length("data", session.data, MAX_SETTINGS)
    _check_snapshots(session)
    if sum(map(len, session.tensors)) > MAX_DESCRIPTION:
        raise ProtocolError(f"Session.tensors must be at most {MAX_DESCRIPTION} characters")
    _check_session_ranks(session)
    for name, low, high in (
        ("micro_batches", 1, MAX_MICRO_BATCHES),
        ("shares", 0, MAX_MICRO_BATCHES),
        ("incarnation", 0, MAX_INTEGER),
        ("generation", 0, MAX_INTEGER),
        ("step", 0, MAX_INTEGER),
        ("began", 0, MAX_INTEGER),
        ("epoch", 0, MAX_INTEGER),
        ("data_slot", -1, MOST_REPLICAS - 1),
    ):
        if not low <= getattr(session, name) <= high:
            raise ProtocolError(f"Session.{name} must be from {low} to {high}")
    _check_sharing(session.sharing)
    if not all(map(_is_sentence, session.tensors)):
        session = replace(session, tensors=tuple(map(cleaned, session.tensors)))
    return session


def _check_session_ranks(session: m.OpenSession) -> None:
    if len(session.ranks) >= MAX_RANKS:
        raise ProtocolError(f"Session.ranks must be a list of fewer than {MAX_RANKS}")
    for address in session.ranks:
        _check_length("link", address.link, MAX_ADDRESS)
        _check_ckpt(address.ckpt)
    _check_length("cuts", session.cuts, MAX_CHARACTERS)
    launched = session.launched
    if len(launched.allowed) + len(launched.refused) > MAX_NAMES:
        raise ProtocolError(f"Session.launched must name at most {MAX_NAMES} layouts")
    for layout in (launched.layout, *launched.allowed, *launched.refused):
        _check_length("launched", layout, MAX_SETTINGS)
    # Another layout is read outside of the loop, and this session is checked again then.
    if session.cuts and known_layout(session.cuts) is not None:
        check_layout(session.replica, session.cuts, 1 + len(session.ranks))


def _check_sharing(sharing: Sharing) -> None:
    if sharing.on_loss not in ("wait", "shrink", "stop"):
        raise ProtocolError("Session.sharing has an unknown on_loss")
    if sharing.policy not in ("constant", "shrink") or sharing.on_poison not in ("stop", "skip"):
        raise ProtocolError("Session.sharing has an unknown policy or on_poison")
    if not (1 <= sharing.data_slots <= MOST_REPLICAS and 0 <= sharing.readers <= sharing.data_slots):
        raise ProtocolError(f"Session.sharing must have 1 to {MOST_REPLICAS} data slots, and no more readers")


def _check_length(name: str, text: str, most: int) -> None:
    if len(text) > most or not text.isprintable():
        raise ProtocolError(f"{name} must be at most {most} printable characters")


def _check_snapshots(message: m.OpenSession | m.TrainerStatus) -> None:
    if max(len(message.snapshots), len(message.durable)) > MAX_SNAPSHOTS:
        raise ProtocolError(f"snapshots and durable must be lists of at most {MAX_SNAPSHOTS}")
    for ref in (*message.snapshots, *message.durable):
        _check_length("digest", ref.digest, MAX_DIGEST)


def most_bytes(kind: type) -> int:
    """Return the length of the longest message of this kind that the lighthouse takes."""
    return _MORE_BYTES.get(kind, MAX_MESSAGE_BYTES)


def _check_ckpt(url: str) -> None:
    """Check a checkpoint server's address: it must have a scheme, a host and a port, and nothing else."""
    if url and not (len(url) <= MAX_ADDRESS and _CKPT.fullmatch(url)):
        raise ProtocolError(
            f"ckpt is {url[:80]!r}: it must be http://host:port, or http://host:port/ranks/RANK"
        )


def _check_names(what: str, names: tuple[str, ...], most: int, longest: int = MAX_ADDRESS) -> None:
    if len(names) > most:
        raise ProtocolError(f"{what} must be a list of at most {most} names")
    for name in names:
        _check_length(what, name, longest)


def _is_sentence(text: str) -> bool:
    return len(text) <= MAX_SENTENCE and text.isprintable()


def cleaned(text: str) -> str:
    return printable(shortened(text, MAX_SENTENCE), " ")
