"""Reads recordings from files and folders: finds each file's process, and notes what cannot be read."""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fabric.collectives.plain_pickle import BadRecording
from fabric.collectives.recording import MAX_BYTES, Process, Recording, read_recording
from fabric.errors import ConfigError

# The rank is the last number in the file's name: ``nccl_trace_rank_3``, ``rank3.json``, ``rank3.torch.json``.
_RANK = re.compile(r"(\d{1,6})(?:\.[A-Za-z]\w*)*$", re.ASCII)
_OTHER_FILES = frozenset((".log", ".txt", ".out", ".err", ".gz", ".zip", ".py"))


@dataclass(slots=True)
class ReadRecordings:
    """The recordings that could be read. ``unread``: why the recording of a process is missing."""

    recordings: list[Recording] = field(default_factory=list)
    unread: dict[Process, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _DumpFile:
    path: Path
    process: Process


def read_files(names: Iterable[str]) -> ReadRecordings:
    """Read files and folders. Raises ConfigError for a name that is neither."""
    result = ReadRecordings()
    for dump in [file for name in names for file in _files(name)]:
        try:
            recording = read_recording(_bytes(dump.path), dump.process, str(dump.path))
        except BadRecording as error:
            result.unread[dump.process] = str(error)
            continue
        identity = recording.process, recording.is_own
        twin = next((x for x in result.recordings if (x.process, x.is_own) == identity), None)
        if twin is not None:
            raise ConfigError(
                f"{twin.source} and {recording.source} are both recordings of {recording.process.name}: give"
                " one of them, or RANK=FILE"
            )
        result.recordings.append(recording)
    for recording in result.recordings:
        result.unread.pop(recording.process, None)
    return result


def _files(name: str) -> Iterator[_DumpFile]:
    number, mark, rest = name.partition("=")
    is_numbered = bool(mark) and number.isascii() and number.isdecimal() and len(number) < 7
    path = Path(rest if is_numbered else name)
    if not path.exists():
        raise ConfigError(f"{path} does not exist: give dumps of torch's Flight Recorder, a folder, or a URL")
    if not path.is_dir():
        rank = int(number) if is_numbered else rank_of(path)
        if rank is None:
            raise ConfigError(f"the name of {path} has no rank: write RANK={path}")
        yield _DumpFile(path, Process("", rank))
        return
    if is_numbered:
        raise ConfigError(f"{path} is a folder: write RANK=FILE for one of its files")
    dumps = list(_in_folder(path))
    if not dumps:
        raise ConfigError(f"{path} has no file whose name ends with a rank, such as nccl_trace_rank_0")
    yield from dumps


def _in_folder(path: Path) -> Iterator[_DumpFile]:
    """The dumps in a folder; each folder in it belongs to one replica."""
    for entry in sorted(path.iterdir()):
        inside = sorted(entry.iterdir()) if entry.is_dir() else [entry]
        for file in inside:
            rank = rank_of(file)
            if file.is_file() and rank is not None and file.suffix not in _OTHER_FILES:
                yield _DumpFile(file, Process(entry.name if entry.is_dir() else "", rank))


def rank_of(path: Path) -> int | None:
    """The rank in the name of a file."""
    match = _RANK.search(path.name)
    return int(match[1]) if match else None


def _bytes(path: Path) -> bytes:
    """The file's content, read up to one byte over the limit. Raises BadRecording."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise BadRecording(f"{path}: it cannot be read: {error.strerror or error}") from error
