"""Reading the journals of a run: what each replica wrote down while it trained.

A journal is one file of JSON lines per replica, appended by every incarnation of its trainer. It is
evidence, so nothing in it is trusted: sizes are bounded before memory is taken, every line must have
the fields of its event with the right types, and what does not is reported as a sentence instead of
being skipped. One exception: a process that is killed in the middle of a write leaves a torn line,
which is accepted as the last line of an incarnation and nowhere else.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.errors import ConfigError

MAX_JOURNAL_BYTES = 1 << 28
MAX_LINE_BYTES = 1 << 22
MAX_REPLICAS = 1024
# The audit rebuilds the data order, which takes eight bytes per sample of the dataset.
MAX_DATASET = 50_000_000
MAX_GLOBAL_BATCH = 1_000_000
MAX_STEPS = 1_000_000


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return _is_integer(value) and 0 <= value <= 1 << 62  # type: ignore[operator]


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_flag(value: object) -> bool:
    return isinstance(value, bool)


def _is_counts(value: object) -> bool:
    return isinstance(value, list) and all(_is_count(entry) for entry in value)


def _is_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(entry, str) for entry in value)


def _is_numbers_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(_is_number(entry) for entry in value.values())


def _is_counts_by_name(value: object) -> bool:
    return isinstance(value, dict) and all(_is_counts(entry) for entry in value.values())


def _is_seats(value: object) -> bool:
    # A journal of before there were data slots has none.
    return value is None or (isinstance(value, dict) and all(_is_integer(entry) for entry in value.values()))


def _is_samples(value: object) -> bool:
    return _is_counts_by_name(value) and all(key.isdecimal() for key in value)  # type: ignore[attr-defined]


_DATA_KEYS = ("dataset_size", "global_batch_size", "micro_batch_size", "seed", "micro_batches")


def _is_data(value: object) -> bool:
    if not isinstance(value, dict) or not all(_is_count(value.get(key)) for key in _DATA_KEYS):
        return False
    batch = value["global_batch_size"]
    sized = 0 < value["dataset_size"] <= MAX_DATASET or "stream" in value
    if not (sized and 0 < batch <= MAX_GLOBAL_BATCH):
        return False
    shards = value.get("shards", 1)
    if not (_is_count(shards) and 0 < shards <= value["micro_batches"]):
        return False
    if "sampler" in value and batch > value["dataset_size"]:
        return False
    return bool(value["micro_batches"] * value["micro_batch_size"] == batch)


Check = Callable[[object], bool]
FIELDS: Mapping[str, Mapping[str, Check]] = {
    "start": {"pid": _is_count, "data": _is_data},
    "contribute": {
        "generation": _is_count,
        "epoch": _is_count,
        "step": _is_count,
        "micro_batches": _is_counts,
        "samples": _is_samples,
        "weight": _is_number,
    },
    "commit": {
        "generation": _is_count,
        "epoch": _is_count,
        "step": _is_count,
        "contributed": _is_flag,
        "replay": _is_flag,
        "contributions": _is_counts_by_name,
        "weight": _is_number,
        "gradient_digest": _is_text,
        "metrics": _is_numbers_by_name,
        "members": _is_texts,
    },
    "state": {"generation": _is_count, "step": _is_count, "digest": _is_text},
    "abort": {"epoch": _is_count, "step": _is_count},
    "epoch": {
        "epoch": _is_count,
        "generation": _is_count,
        "forced": _is_flag,
        "roster": _is_texts,
        "data_slots": _is_seats,
    },
    "poison": {"epoch": _is_count, "step": _is_count, "micro_batches": _is_counts},
    "resume": {"epoch": _is_count, "step": _is_count},
    "outside": {"epoch": _is_count, "step": _is_count},
    "join": {
        "generation": _is_count,
        "step": _is_count,
        "bytes": _is_count,
        "seconds": _is_number,
    },
    "joined": {"epoch": _is_count, "step": _is_count},
    "finish": {"step": _is_count},
    "lost": {"lines": _is_count},
    "stop": {"code": _is_integer},
}


@dataclass(frozen=True, slots=True)
class JournalLine:
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
        """Return the integer field ``name``; -1 where an optional one is missing."""
        return int(self.fields.get(name, -1))

    def number_of(self, name: str) -> float:
        """Return the numeric field ``name``."""
        return float(self.fields[name])

    def text(self, name: str) -> str:
        """Return the text field ``name``; empty where an optional one is missing."""
        return str(self.fields.get(name, ""))

    def flag(self, name: str) -> bool:
        """Return the boolean field ``name``."""
        return bool(self.fields[name])

    @property
    def place(self) -> str:
        """How a sentence names this line."""
        return f"{self.replica} incarnation {self.incarnation} (line {self.number})"


@dataclass(frozen=True, slots=True)
class ReplicaJournal:
    """The journal of one replica, in file order, with a sentence for each line that cannot be read."""

    replica: str
    lines: tuple[JournalLine, ...]
    broken: tuple[str, ...] = ()

    def incarnations(self) -> tuple[tuple[JournalLine, ...], ...]:
        """Return the lines cut at every ``start``; lines before the first one form a group of their own."""
        groups: list[list[JournalLine]] = []
        for line in self.lines:
            if line.event == "start" or not groups:
                groups.append([])
            groups[-1].append(line)
        return tuple(tuple(group) for group in groups)


@dataclass(frozen=True, slots=True)
class RecordedRun:
    """All evidence of one run: the journals by replica, and what the supervisor saw (may be empty)."""

    journals: Mapping[str, ReplicaJournal]
    supervisor: tuple[Mapping[str, Any], ...] = ()


def read_run(directory: Path) -> RecordedRun:
    """Read ``directory/journal/*.jsonl`` and, where present, ``directory/supervisor.jsonl``.

    Raises ConfigError where ``directory`` holds no journals or a file is larger than its bound.
    """
    paths = sorted((directory / "journal").glob("*.jsonl"))
    if not paths:
        raise ConfigError(
            f"{directory} holds no journals; give the directory that `fabric demo --out` wrote."
        )
    if len(paths) > MAX_REPLICAS:
        raise ConfigError(f"{directory} holds more than {MAX_REPLICAS} journals, which is too many.")
    journals = {path.stem: parse_journal(path.stem, _read_bounded(path)) for path in paths}
    supervisor = directory / "supervisor.jsonl"
    return RecordedRun(journals, read_supervisor(supervisor) if supervisor.exists() else ())


def parse_journal(replica: str, content: bytes) -> ReplicaJournal:
    """Parse the bytes of one journal; what is wrong with it is listed in ``broken``."""
    lines: list[JournalLine] = []
    broken: list[str] = []
    torn: int | None = None
    for number, raw in enumerate(content.split(b"\n"), start=1):
        if not raw.strip():
            continue
        is_whole, entry = _salvage(raw)
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
                f"{line.place} says that {lost} lines before it could not be written: nobody knows them."
            )
        if torn is not None and line.event not in ("start", "lost"):
            broken.append(_unreadable(replica, torn))
        if not is_whole and line.event != "start":
            broken.append(_unreadable(replica, number))
        torn = None
        lines.append(line)
    return ReplicaJournal(replica, tuple(lines), tuple(broken))


def read_supervisor(path: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the supervisor's own events, oldest first. Raises ConfigError where a line is not one of
    ours."""
    events: list[Mapping[str, Any]] = []
    for number, raw in enumerate(_read_bounded(path).splitlines(), start=1):
        entry = _decode(raw)
        if entry is None or not _is_text(entry.get("event")) or not _is_number(entry.get("t")):
            raise ConfigError(f"{path} line {number} is not a supervisor event; the file is damaged.")
        events.append(entry)
    return tuple(events)


def _read_bounded(path: Path) -> bytes:
    if path.stat().st_size > MAX_JOURNAL_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_JOURNAL_BYTES} bytes, which no demo writes.")
    return path.read_bytes()


def _decode(raw: bytes) -> dict[str, Any] | None:
    if len(raw) > MAX_LINE_BYTES:
        return None
    try:
        entry = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None


def _salvage(raw: bytes) -> tuple[bool, dict[str, Any] | None]:
    """Decode a line; where a torn write is glued to a following ``start`` line, decode that one."""
    entry = _decode(raw)
    if entry is not None:
        return True, entry
    cut = raw.rfind(b'{"event"')
    return False, _decode(raw[cut:]) if cut > 0 else None


def _check(replica: str, number: int, entry: Mapping[str, Any]) -> tuple[JournalLine | None, str]:
    def refuse(why: str) -> tuple[None, str]:
        return None, f"Line {number} of the journal of {replica} {why}."

    event = entry.get("event")
    if not isinstance(event, str):
        return refuse("has no event")
    if not (_is_number(entry.get("t")) and _is_number(entry.get("mono"))):
        return refuse(f"({event}) has no usable time")
    if not _is_count(entry.get("incarnation")):
        return refuse(f"({event}) has no usable incarnation")
    if entry.get("replica") != replica:
        return refuse(f"({event}) was written by another replica, {str(entry.get('replica'))[:80]!r}")
    for name, check in FIELDS.get(event, {}).items():
        if not check(entry.get(name)):
            return refuse(f"({event}) has no usable field {name!r}")
    if _is_count(entry.get("step")) and entry["step"] > MAX_STEPS:
        return refuse(f"({event}) names a step beyond {MAX_STEPS}")
    times = float(entry["t"]), float(entry["mono"])
    return JournalLine(event, *times, replica, entry["incarnation"], number, entry), ""


def _unreadable(replica: str, number: int) -> str:
    return f"Line {number} of the journal of {replica} cannot be read as JSON."


def lines_of(lines: Sequence[JournalLine], *events: str) -> list[JournalLine]:
    """Return the lines among ``lines`` whose event is one of ``events``."""
    return [line for line in lines if line.event in events]
