"""The recorded collectives of one process, parsed and checked: torch's Flight Recorder and our own exchange.

A recording is JSON or a plain pickle, and describes calls of gloo, NCCL or ``fabric``. Every field is checked
before any is used, so a damaged recording is refused as a whole.
"""

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import field
from msgspec.structs import replace

from fabric.collectives.plain_pickle import MAX_VALUES, BadRecording, load_plain
from fabric.model import Value, first_of

MAX_BYTES = 64 << 20
_MAX_ENTRIES = 200_000
_MAX_TENSORS = 10_000
_TEXT = 200
_Number = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
_Length = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_SIZES = Annotated[
    tuple[Annotated[tuple[_Length, ...], msgspec.Meta(max_length=64)], ...],
    msgspec.Meta(max_length=_MAX_TENSORS),
]
_SIZES_WORDS = f"list of the sizes of at most {_MAX_TENSORS} tensors"
_TEXTS = Annotated[tuple[str, ...], msgspec.Meta(max_length=_MAX_TENSORS)]
_PATH = 4096  # Linux has no longer paths
_MAX_RANKS = 1 << 20
_PEER = re.compile(r"(send|recv) (\d{1,7})(?:->|<-)(\d{1,7})", re.ASCII)
_INTEGER = re.compile(r"-?\d{1,19}", re.ASCII)
# Stack frames of these libraries do not show where the user's program is.
_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/fabric/(?:client|ftar)/|^<frozen ")

OWN_BACKEND = "fabric"


class Process(Value, order=True):
    """One process of a job. ``replica`` is empty where the recordings do not name a replica."""

    replica: str
    rank: int

    @property
    def name(self) -> str:
        return f"{self.replica} rank {self.rank}" if self.replica else f"rank {self.rank}"


class Group(Value):
    """The processes that call the same collectives in the same order, as one process names them. ``ranks``:
    the members by rank; ``replicas``: the members by replica. Both are empty where unknown."""

    name: str
    description: str = ""
    ranks: tuple[int, ...] = ()
    replicas: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        described = self.description not in ("", "undefined")
        return f"group {self.name} ({self.description})" if described else f"group {self.name}"


class RecordedCollective(Value):
    """One call of a process."""

    group: Group
    number: int  # the call's place in the sequence of the group's collectives, or of its sends and receives
    backend: str
    operation: str
    input_sizes: tuple[tuple[int, ...], ...]
    output_sizes: tuple[tuple[int, ...], ...]
    input_dtypes: tuple[str, ...]
    output_dtypes: tuple[str, ...]
    is_pending: bool  # the process is still in the call
    has_failed: bool = False  # the call was given up before its end, by a time-out or an aborted round
    created_ns: int = 0  # Unix time by the clock of the call's host; 0 where unknown
    duration_ms: float | None = None
    is_p2p: bool = False  # the call is a send or receive, numbered by its own process
    peer: int | None = None  # the other rank of a send or receive, within the group
    at: str = ""  # file, line and function of the user's program
    note: str = ""

    @property
    def words(self) -> str:
        """Name it in a sentence."""
        if self.backend == OWN_BACKEND:
            return f"the exchange of step {self.number}"
        if self.peer is not None:
            direction = "to" if self.operation == "send" else "from"
            return f"{self.operation} {direction} rank {self.peer} of {self.group.words}"
        return f"{self.operation} ({self.place_words})"

    @property
    def place_words(self) -> str:
        """Name its place in the sequence of its group."""
        if self.backend == OWN_BACKEND:
            return f"step {self.number}"
        return f"number {self.number} of {self.group.words}"

    @property
    def shape_words(self) -> str:
        sizes = self.input_sizes or self.output_sizes
        dtypes = self.input_dtypes or self.output_dtypes
        if not sizes:
            return "no tensor"
        shown = first_of(["x".join(map(str, size)) or "a scalar" for size in sizes], 3)
        return f"{shown} {'/'.join(dict.fromkeys(dtypes))}".strip()


class Recording(Value):
    """All that one process has recorded, oldest first. ``is_partial``: older entries were overwritten."""

    process: Process
    source: str
    collectives: tuple[RecordedCollective, ...] = ()
    is_partial: bool = False
    is_own: bool = False  # the recording is of fabric's own exchange, not of torch's groups
    groups: Mapping[str, Group] = field(default_factory=dict)
    ranks_named: frozenset[int] = frozenset()  # members of groups that gloo gives no name
    main: tuple[str, ...] = ()  # the main thread's stack, innermost first; only for living processes
    process_state: str = ""  # the kernel's name for the process's state; only for living processes

    @property
    def user_frame(self) -> str:
        """The innermost frame of the main thread outside of libraries; empty where there is none."""
        return next((frame for frame in self.main if not _LIBRARY.search(frame)), "")


def read_recording(data: bytes, process: Process, source: str) -> Recording:
    """Return the recording in ``data``. Raises BadRecording with one sentence that names ``source``."""
    try:
        return parse_recording(_body(data), process, source)
    except BadRecording as error:
        raise BadRecording(f"{source}: {error}") from None


def parse_recording(body: object, process: Process, source: str) -> Recording:
    """Return the recording that a parsed dump describes. Raises BadRecording."""
    if not isinstance(body, Mapping):
        raise BadRecording("it is not a recording: it holds no table of fields")
    if "entries" not in body and "pg_config" not in body:
        raise BadRecording("it is not a recording of torch's Flight Recorder: it lacks entries and pg_config")
    entries = body.get("entries", [])
    if not isinstance(entries, list | tuple) or len(entries) > _MAX_ENTRIES:
        raise BadRecording(f"its entries are no list of at most {_MAX_ENTRIES}")
    groups = _groups(body.get("pg_config", {}))
    nameless = groups.pop("", None)
    calls, first_id, parts = [], 0, 0
    for place, entry in enumerate(entries):
        try:
            # The entries of a pickle may all share one long list.
            fields_of = entry.values() if isinstance(entry, Mapping) else ()
            lists = [value for value in fields_of if isinstance(value, list | tuple)]
            parts += sum(len(x) if isinstance(x, list | tuple) else 1 for value in lists for x in value)
            if parts > MAX_VALUES:
                raise BadRecording(
                    f"all entries up to it have more than {MAX_VALUES} sizes, names and frames"
                )
            calls.append(_collective(entry, groups))
            if not place:
                first_id = _integer(entry, "record_id", default=0)
        except BadRecording as error:
            raise BadRecording(f"its entry {place} is damaged: {error}") from None
    is_own = body.get("recorder") == OWN_BACKEND
    replica, rank = body.get("replica"), body.get("rank")
    if is_own and isinstance(replica, str) and isinstance(rank, int) and 0 <= rank < _MAX_RANKS:
        process = Process(_short(replica), int(rank))
    return Recording(
        process,
        source,
        _with_coalesced(calls),
        is_partial=first_id > 0,
        is_own=is_own,
        groups=groups,
        ranks_named=frozenset(nameless.ranks if nameless is not None else ()),
    )


# --- the bytes ----------------------------------------------------------------------------------------


def _body(data: bytes) -> object:
    if len(data) > MAX_BYTES:
        raise BadRecording(f"it has more than {MAX_BYTES >> 20} MiB, which no recording needs")
    if not data.strip():
        raise BadRecording("it is empty: the process wrote no recording")
    if data[:1] == b"\x80":
        return load_plain(data)
    if data.lstrip()[:1] != b"{":
        raise BadRecording("it is neither JSON nor a pickle: give a dump of torch's Flight Recorder")
    if sum(map(data.count, (b"{", b"[", b","))) > MAX_VALUES:
        raise BadRecording(f"its JSON has more than {MAX_VALUES} values: it is no recording")
    try:
        return json.loads(data)
    except RecursionError:
        raise BadRecording("its JSON is nested too deeply for a recording") from None
    except ValueError as error:
        raise BadRecording(f"its JSON breaks off or is damaged ({str(error)[:_TEXT]})") from None


# --- groups -------------------------------------------------------------------------------------------


def _groups(config: object) -> dict[str, Group]:
    """Groups by name. Gloo writes one group without a name; it has the ranks of the newest group."""
    if not isinstance(config, Mapping):
        raise BadRecording("its pg_config is not a table of groups")
    groups, parts = {}, 0
    for name, value in config.items():
        if not isinstance(value, Mapping):
            raise BadRecording(f"its group {_short(name)} is not described")
        listed = value.get("ranks", "[]")
        # The groups of a pickle may all share one long list.
        parts += len(listed) if isinstance(listed, str | list | tuple) else 0
        if parts > MAX_VALUES:
            raise BadRecording(
                f"its pg_config names members in more than {MAX_VALUES} characters and entries"
            )
        ranks, replicas = _members(listed)
        groups[_short(name)] = Group(_short(name), _short(value.get("desc", "")), ranks, replicas)
    return groups


def _members(value: object) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The members of a group. Torch writes them as a text such as ``[0, 1]``, fabric as a list of names."""
    if isinstance(value, str):
        parts: list[object] = [part.strip() for part in value.strip().strip("[]").split(",") if part.strip()]
    elif isinstance(value, list | tuple):
        parts = list(value)
    else:
        raise BadRecording("its pg_config names the members of a group in no known form")
    if len(parts) > _MAX_RANKS:
        raise BadRecording(f"its pg_config lists more than {_MAX_RANKS} members")
    if parts and all(isinstance(part, str) and not _INTEGER.fullmatch(part) for part in parts):
        return (), tuple(_short(part) for part in parts)
    ranks = []
    for part in parts:
        number = int(part) if isinstance(part, str) and _INTEGER.fullmatch(part) else part
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < _MAX_RANKS:
            raise BadRecording(f"its pg_config lists {_short(part)!r} as a rank")
        ranks.append(number)
    return tuple(sorted(set(ranks))), ()


# --- entries ------------------------------------------------------------------------------------------


def _collective(entry: object, groups: dict[str, Group]) -> RecordedCollective:
    if not isinstance(entry, Mapping):
        raise BadRecording("it is not a table of fields")
    name = entry.get("profiling_name")
    if not isinstance(name, str):
        raise BadRecording("it has no profiling_name")
    backend, _, operation = name.rpartition(":")
    is_p2p = entry.get("is_p2p", False) is True
    peer = None
    if (match := _PEER.fullmatch(operation)) is not None:
        # ``send 0->1`` and ``recv 1<-0``: the recording process comes first, its peer second.
        operation, peer, is_p2p = match[1], int(match[3]), True
    # Gloo's state stays ``scheduled``; ``retired`` says that the call ended.
    state, is_retired = entry.get("state"), entry.get("retired", False) is True
    if state not in ("completed", "scheduled", "started"):
        raise BadRecording(f"its state is {_short(state)!r}")
    is_over = state == "completed" or is_retired
    return RecordedCollective(
        group=_group(entry.get("process_group"), groups),
        number=_integer(entry, "p2p_seq_id" if is_p2p else "collective_seq_id"),
        backend=_short(backend),
        operation=_short(operation),
        input_sizes=_field(entry, "input_sizes", _SIZES, _SIZES_WORDS, ()),
        output_sizes=_field(entry, "output_sizes", _SIZES, _SIZES_WORDS, ()),
        input_dtypes=_texts(entry, "input_dtypes"),
        output_dtypes=_texts(entry, "output_dtypes"),
        is_pending=not is_over,
        has_failed=is_over and state != "completed" and backend != "gloo",
        created_ns=_integer(entry, "time_created_ns", default=0),
        duration_ms=_field(entry, "duration_ms", float | None, "number"),
        is_p2p=is_p2p,
        peer=peer,
        at=_user_frame(entry.get("frames", ())),
        note=_short(entry.get("note", "")),
    )


def _with_coalesced(calls: list[RecordedCollective]) -> tuple[RecordedCollective, ...]:
    """Give the calls of a coalesced launch, which have no state of their own, the state of the launch.

    Torch gives these calls the sequence number of the entry ``coalesced`` that follows them in their group.
    """
    result = list(calls)
    launches: dict[tuple[str, str, bool, int], RecordedCollective] = {}
    for place in reversed(range(len(calls))):
        call = calls[place]
        key = (call.group.name, call.backend, call.is_p2p, call.number)
        if call.operation == "coalesced" or call.operation.endswith("_coalesced"):
            launches[key] = call
        elif (launch := launches.get(key)) is not None:
            result[place] = replace(call, is_pending=launch.is_pending, has_failed=launch.has_failed)
    return tuple(result)


def _group(value: object, groups: dict[str, Group]) -> Group:
    if not isinstance(value, list | tuple) or not 1 <= len(value) <= 2:
        raise BadRecording("it names no process_group")
    name, description = _short(value[0]), _short(value[1] if len(value) > 1 else "")
    group = groups.get(name)
    if group is None or group.description != description:
        group = Group(name, description, group.ranks if group else (), group.replicas if group else ())
        groups[name] = group
    return group


def _field(entry: Mapping[Any, Any], name: str, kind: Any, wanted: str, default: Any = None) -> Any:
    """Return a field of an entry as ``kind``. Raises BadRecording, which says that it is no ``wanted``."""
    try:
        return msgspec.convert(entry.get(name, default), kind)
    except (msgspec.ValidationError, UnicodeError):
        raise BadRecording(f"its {name} is no {wanted}") from None


def _integer(entry: Mapping[Any, Any], name: str, default: int | None = None) -> int:
    value = _field(entry, name, _Number if default is None else _Number | None, "number", default)
    return default or 0 if value is None else int(value)


def _texts(entry: Mapping[Any, Any], name: str) -> tuple[str, ...]:
    texts = _field(entry, name, _TEXTS, f"list of at most {_MAX_TENSORS} names", ())
    return tuple(text[:_TEXT] for text in texts)


def _user_frame(frames: object) -> str:
    """The innermost frame outside of the libraries, as ``file:line function``; empty where there is none."""
    if not isinstance(frames, list | tuple):
        return ""
    for frame in frames[:200]:
        if not isinstance(frame, Mapping):
            continue
        file = frame.get("filename")
        if isinstance(file, str) and not _LIBRARY.search(file[:_PATH]):
            return f"{file[-_TEXT:]}:{_short(frame.get('line', 0))} {_short(frame.get('name', ''))}"
    return ""


def _short(value: object) -> str:
    """A text or number from the dump, cut to a bounded length; any other value becomes empty."""
    if isinstance(value, str):
        return value[:_TEXT]
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else ""
