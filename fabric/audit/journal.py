"""Reads the journals that the replicas wrote during a run, and the recovery records of its lighthouse.

A journal is one file of JSON lines per replica, appended by every incarnation of its trainer. It is evidence,
so nothing in it is trusted. Sizes are bounded before memory is taken. Every line must have the fields of its
event with the right types; a wrong line is reported with a sentence. A process that is killed while it writes
leaves a torn line; only the last line of an incarnation may be torn.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from fabric.errors import ConfigError, ProtocolError
from fabric.model import Value

MAX_JOURNAL_BYTES = 1 << 28
MAX_LINE_BYTES = 1 << 22
MAX_REPLICAS = 1024
# The audit rebuilds the data order, which takes eight bytes per sample of the dataset.
MAX_DATASET = 50_000_000
MAX_GLOBAL_BATCH = 1_000_000
MAX_STEPS = 1_000_000

Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Digits = Annotated[str, msgspec.Meta(pattern="^[0-9]{1,18}$")]
RecordedTime = Annotated[float, msgspec.Meta(ge=0, lt=1e12)]  # Unix seconds that a clock may show


class RecordedData(msgspec.Struct):
    """The settings of the data order, as a ``start`` line has them.

    A loop that reads its own data, with ``session.exchange`` and no sampler, has ``micro_batches`` alone.
    """

    micro_batches: Count
    dataset_size: Count | msgspec.UnsetType = msgspec.UNSET
    global_batch_size: Annotated[int, msgspec.Meta(ge=0, le=MAX_GLOBAL_BATCH)] = 0
    micro_batch_size: Count = 0
    seed: Count = 0
    shards: Annotated[int, msgspec.Meta(gt=0)] = 1
    sampler: Any = msgspec.UNSET
    epoch_end: Literal["short", "drop"] | msgspec.UnsetType = msgspec.UNSET
    order: Count | msgspec.UnsetType = msgspec.UNSET  # digest of a sampler's pass 0
    stream: Any = msgspec.UNSET

    def __post_init__(self) -> None:
        size = self.dataset_size
        if size is msgspec.UNSET:
            if self.global_batch_size or self.micro_batch_size:
                raise ValueError("a data order has the size of its data set")
            return
        sized = 0 < size <= MAX_DATASET or self.stream is not msgspec.UNSET
        whole_steps = self.sampler is not msgspec.UNSET or self.epoch_end == "drop"
        if (
            not sized
            or self.shards > self.micro_batches
            or self.global_batch_size < 1
            or (whole_steps and self.global_batch_size > size)
            or self.micro_batches * self.micro_batch_size != self.global_batch_size
        ):
            raise ValueError("these sizes fit no data order")


# Event -> the fields of its line, and their types.
FIELDS: Mapping[str, Mapping[str, Any]] = {
    "start": {"pid": Count, "data": RecordedData},
    "data": {"step": Count, "data": RecordedData},
    "contribute": {
        "generation": Count,
        "epoch": Count,
        "step": Count,
        "micro_batches": list[Count],
        "samples": dict[Digits, list[Count]],
        "weight": float,
    },
    "commit": {
        "generation": Count,
        "epoch": Count,
        "step": Count,
        "contributed": bool,
        "replay": bool,
        "contributions": dict[str, list[Count]],
        "weight": float,
        "gradient_digest": str,
        "metrics": dict[str, float],
        "members": list[str],
    },
    "state": {"generation": Count, "step": Count, "digest": str},
    "abort": {"epoch": Count, "step": Count},
    "epoch": {
        "epoch": Count,
        "generation": Count,
        "forced": bool,
        "roster": list[str],
        "data_slots": dict[str, int] | None,  # missing in journals of versions without data slots
    },
    "poison": {"epoch": Count, "step": Count, "micro_batches": list[Count]},
    "resume": {"epoch": Count, "step": Count},
    "outside": {"epoch": Count, "step": Count},
    "join": {"generation": Count, "step": Count, "bytes": Count, "seconds": float},
    "joined": {"epoch": Count, "step": Count},
    "finish": {"step": Count},
    "lost": {"lines": Count},
    "stop": {"code": int},
}


def _is(value: object, kind: Any) -> bool:
    """Whether ``value``, parsed by ``decode_entry``, is of the type ``kind``."""
    try:
        msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeError):
        return False
    return True


class JournalLine(Value):
    """One journal line whose fields have been checked against ``FIELDS``.

    ``t`` is unix time and ``mono`` the host's monotonic clock, both in seconds; ``number`` is the line
    of the file, from 1, for sentences to a person.
    """

    event: str
    t: float
    mono: float
    replica: str
    incarnation: int
    number: int
    fields: Mapping[str, Any]

    def integer(self, name: str) -> int:
        """Return the integer field ``name``; -1 where an optional field is missing."""
        return int(self.fields.get(name, -1))

    def number_of(self, name: str) -> float:
        return float(self.fields[name])

    def text(self, name: str) -> str:
        """Return the text field ``name``; empty where an optional field is missing."""
        return str(self.fields.get(name, ""))

    def flag(self, name: str) -> bool:
        return bool(self.fields[name])

    @property
    def is_live_commit(self) -> bool:
        """Whether the process committed a step with the other members, and not by replay."""
        return self.event == "commit" and not self.flag("replay")

    @property
    def place(self) -> str:
        """The name of this line in a sentence."""
        return f"{self.replica} incarnation {self.incarnation} (line {self.number})"


class ReplicaJournal(Value):
    """The journal of one replica, in file order, with a sentence for each line that cannot be read."""

    replica: str
    lines: tuple[JournalLine, ...]
    broken: tuple[str, ...] = ()

    def incarnations(self) -> tuple[tuple[JournalLine, ...], ...]:
        """Return the lines cut at every ``start`` line; lines before the first of them form one group."""
        groups: list[list[JournalLine]] = []
        for line in self.lines:
            if line.event == "start" or not groups:
                groups.append([])
            groups[-1].append(line)
        return tuple(tuple(group) for group in groups)


class RecordedRun(Value):
    """All evidence of one run: the journals by replica, and the supervisor's events (may be empty)."""

    journals: Mapping[str, ReplicaJournal]
    supervisor: tuple[Mapping[str, Any], ...] = ()


def read_run(directory: Path) -> RecordedRun:
    """Read ``directory/journal/*.jsonl`` and, where present, ``directory/supervisor.jsonl``.

    Raises ConfigError where ``directory`` holds no journals or a file is larger than its bound.
    """
    journals = read_journals(directory / "journal")
    if not journals:
        raise ConfigError(
            f"{directory} holds no journals; give the directory that `fabric demo --out` wrote."
        )
    supervisor = directory / "supervisor.jsonl"
    return RecordedRun(journals, read_supervisor(supervisor) if supervisor.exists() else ())


def read_journals(folder: Path) -> dict[str, ReplicaJournal]:
    """Read ``folder/*.jsonl`` by replica. Raises ConfigError for too many files, or a too large one."""
    paths = sorted(folder.glob("*.jsonl"))
    if len(paths) > MAX_REPLICAS:
        raise ConfigError(f"{folder} holds more than {MAX_REPLICAS} journals, which is too many.")
    return {path.stem: parse_journal(path.stem, _read_bounded(path)) for path in paths}


def parse_journal(replica: str, content: bytes) -> ReplicaJournal:
    """Parse the bytes of one journal; list its errors in ``broken``."""
    lines: list[JournalLine] = []
    broken: list[str] = []
    torn: int | None = None
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if not raw.strip():
            continue
        entry, cut = decode_entry(raw), raw.rfind(b'{"event"')
        is_whole = entry is not None
        if entry is None and cut > 0:  # a ``start`` line may follow a torn write on the same line
            entry = decode_entry(raw[cut:])
        if entry is None:
            if torn is not None:
                broken.append(_unreadable(replica, torn))
            torn = number
            continue
        line, problem = _check(replica, number, entry)
        if line is None:
            broken.append(problem)
            continue
        if line.event == "lost":
            lost = line.integer("lines")
            broken.append(
                f"{line.place} says that {lost} lines before it could not be written: their content is lost."
            )
        if torn is not None and line.event not in ("start", "lost"):
            broken.append(_unreadable(replica, torn))
        if not is_whole and line.event != "start":
            broken.append(_unreadable(replica, number))
        torn = None
        lines.append(line)
    return ReplicaJournal(replica, tuple(lines), tuple(broken))


def read_supervisor(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the supervisor's events, oldest first. Raises ConfigError for a line of another form."""
    events: list[Mapping[str, Any]] = []
    for number, raw in enumerate(_read_bounded(path).splitlines(), start=1):
        entry = decode_entry(raw)
        if entry is None or not _is(entry.get("event"), str) or not _is(entry.get("t"), float):
            raise ConfigError(f"{path} line {number} is not a supervisor event; the file is damaged.")
        events.append(entry)
    return tuple(events)


def _read_bounded(path: Path) -> bytes:
    if path.stat().st_size > MAX_JOURNAL_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_JOURNAL_BYTES} bytes, which no demo writes.")
    return path.read_bytes()


def decode_entry(raw: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None for another text, or a line that is too long."""
    if len(raw) > MAX_LINE_BYTES:
        return None
    try:
        entry = msgspec.json.decode(raw)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _check(replica: str, number: int, entry: Mapping[str, Any]) -> tuple[JournalLine | None, str]:
    def refuse(why: str) -> tuple[None, str]:
        return None, f"Line {number} of the journal of {replica} {why}."

    event = entry.get("event")
    if not isinstance(event, str):
        return refuse("has no event")
    if not (_is(entry.get("t"), float) and _is(entry.get("mono"), float)):
        return refuse(f"({event}) has no usable time")
    if not _is(entry.get("incarnation"), Count):
        return refuse(f"({event}) has no usable incarnation")
    if entry.get("replica") != replica:
        return refuse(f"({event}) was written by another replica, {str(entry.get('replica'))[:80]!r}")
    for name, kind in FIELDS.get(event, {}).items():
        if not _is(entry.get(name), kind):
            return refuse(f"({event}) has no usable field {name!r}")
    if _is(entry.get("step"), Count) and entry["step"] > MAX_STEPS:
        return refuse(f"({event}) names a step beyond {MAX_STEPS}")
    times = float(entry["t"]), float(entry["mono"])
    return JournalLine(event, *times, replica, entry["incarnation"], number, entry), ""


def _unreadable(replica: str, number: int) -> str:
    return f"Line {number} of the journal of {replica} cannot be read as JSON."


def lines_of(lines: Sequence[JournalLine], *events: str) -> list[JournalLine]:
    """Return the lines among ``lines`` whose event is one of ``events``."""
    return [line for line in lines if line.event in events]


class LostReplica(msgspec.Struct, frozen=True):
    """One lost replica of a recovery record; 0.0: not yet."""

    joined: RecordedTime = 0.0


class RecoveryFacts(msgspec.Struct, frozen=True):
    """The fields that are read of a recovery record, which the lighthouse writes; 0.0: not yet."""

    kind: str
    detected: RecordedTime
    step: int = 0
    epoch: int = 0
    step_committed: RecordedTime = 0.0
    steps_lost: Count = 0
    why: str = ""
    incident_id: str = ""
    lost: dict[str, LostReplica] = {}


def read_recoveries(entries: Sequence[object]) -> tuple[RecoveryFacts, ...]:
    """Check the recovery records of a lighthouse. Raises ProtocolError for another form."""
    try:
        return tuple(msgspec.convert(entry, RecoveryFacts) for entry in entries)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ProtocolError(
            f"the lighthouse sent a recovery record that cannot be used ({str(error)[:300]}): "
            "run a drill of the lighthouse's version"
        ) from error
