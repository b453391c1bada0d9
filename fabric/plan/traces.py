"""Reads recorded failures: a CSV or JSON trace of a cluster, or the recovery records of a running job."""

import csv
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fabric.model import counted
from fabric.plan.failures import Trace

_SECONDS = {"time_s": 1.0, "time_min": 60.0, "time_h": 3600.0, "time_d": 86400.0}
_BEGINS, _ENDS = {"fail", "fault_start"}, {"repair", "fault_end"}
_MOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class ClusterTrace:
    """A cluster's failures and repairs.

    ``failures``: (seconds from the start, unit number), ascending; one for each failure of a running unit.
    ``repairs_s``: the lengths of the failures that ended within the trace. ``units``: the number of units in
    the trace. ``span_s``: the trace's length.
    """

    failures: tuple[tuple[float, int], ...]
    repairs_s: tuple[float, ...]
    units: int
    span_s: float

    def __post_init__(self) -> None:
        if not self.failures:
            raise ValueError("the trace has no failure: give a file with at least one 'fail' event")

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of all units together."""
        return self.span_s / len(self.failures)

    @property
    def median_repair_s(self) -> float:
        """The median time of a repair; 0 where no failure ended within the trace."""
        return statistics.median(self.repairs_s) if self.repairs_s else 0.0

    def process(self) -> Trace:
        """Return the failures as a process for the simulator."""
        return Trace(self.failures, self.span_s)


def read_trace(path: Path) -> ClusterTrace:
    """Read a CSV with the columns ``time_s`` (or _min, _h, _d), ``unit``, ``event``; or a JSON list of
    objects with ``event_time`` in days, ``node_id`` and ``event_type``, the format of the public
    InfiniteHBD trace.

    Events are ``fail`` and ``repair`` (``fault_start`` and ``fault_end`` likewise). Raises ValueError with
    the line or entry that is wrong, and OSError where the file cannot be read.
    """
    if path.stat().st_size > _MOST_BYTES:
        raise ValueError(f"{path} is larger than {_MOST_BYTES >> 20} MiB: cut the trace")
    text = path.read_text(encoding="utf-8-sig")
    try:
        rows = _from_json(text, path) if text.lstrip()[:1] == "[" else _from_csv(text, path)
    except csv.Error as error:
        raise ValueError(f"{path} is no CSV: {error}") from None
    return _trace(rows, path)


@dataclass(frozen=True, slots=True)
class _Event:
    at_s: float
    unit: str
    begins: bool


def _from_csv(text: str, path: Path) -> list[_Event]:
    reader = csv.DictReader(text.splitlines())
    names = [name.strip() for name in reader.fieldnames or []]
    reader.fieldnames = names
    column = next((name for name in names if name in _SECONDS), None)
    if column is None or "unit" not in names or "event" not in names:
        raise ValueError(
            f"{path} needs the columns unit, event and one of {', '.join(_SECONDS)} in its first line,"
            f" not {str(names)[:200]}"
        )
    events = []
    for row in reader:
        where = f"{path}, line {reader.line_num}"
        events.append(_event(row.get(column), row.get("unit"), row.get("event"), _SECONDS[column], where))
    return events


def _from_json(text: str, path: Path) -> list[_Event]:
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no valid JSON: {error}") from None
    events = []
    for number, entry in enumerate(entries):
        where = f"{path}, entry {number}"
        if not isinstance(entry, dict):
            raise ValueError(f"{where}: an object with event_time, node_id and event_type is needed")
        events.append(
            _event(entry.get("event_time"), entry.get("node_id"), entry.get("event_type"), 86400.0, where)
        )
    return events


def _event(at: object, unit: object, event: object, seconds: float, where: str) -> _Event:
    try:
        at_s = float(at) * seconds  # type: ignore[arg-type]  # anything but a number raises
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{where}: the time is no number: {str(at)[:40]!r}") from None
    if not 0 <= at_s < 1e12:
        raise ValueError(f"{where}: the time must be zero or more, not {at_s:g} s")
    kind = str(event).strip()
    if kind not in _BEGINS | _ENDS:
        raise ValueError(f"{where}: the event must be 'fail' or 'repair', not {kind[:40]!r}")
    if unit is None or not str(unit).strip():
        raise ValueError(f"{where}: the unit is missing")
    return _Event(at_s, str(unit).strip(), kind in _BEGINS)


def _trace(events: Sequence[_Event], path: Path) -> ClusterTrace:
    numbers: dict[str, int] = {}
    down: dict[str, float] = {}
    failures, repairs = [], []
    for event in sorted(events, key=lambda e: (e.at_s, e.begins)):
        number = numbers.setdefault(event.unit, len(numbers))
        if event.begins:
            if event.unit not in down:
                down[event.unit] = event.at_s
                failures.append((event.at_s, number))
        elif event.unit in down:
            repairs.append(event.at_s - down.pop(event.unit))
    if not failures:
        raise ValueError(f"{path} has no failure: give a trace with at least one 'fail' event")
    span_s = max(event.at_s for event in events)
    if span_s <= 0:
        raise ValueError(f"{path} spans no time: all its events are at second 0")
    return ClusterTrace(tuple(failures), tuple(repairs), len(numbers), span_s)


@dataclass(frozen=True, slots=True)
class RecoveryPhases:
    """A job's recovery records in five numbers; times are medians in seconds."""

    failures: int  # number of deaths
    mtbf_s: float  # the mean interval between deaths
    stall_s: float  # from a death's detection to the first commit without the dead replica
    away_s: float  # from a death's detection to the replica's return; 0 where no replica returned
    steps_lost: float  # mean number of steps lost per failure


_LATEST_S = 1e12  # no record of the next 30,000 years has a larger time


def phases_of(records: Iterable[object]) -> RecoveryPhases:
    """Return the phases of a job's recovery records (`GET /v1/jobs/{job}/recoveries`).

    Raises ValueError with fewer than two recorded deaths, because there is no time between them.
    """
    tables = map(_mapping, records)
    deaths = [r for r in tables if r.get("kind") in ("death", "stall") and _number(r.get("detected")) > 0]
    if len(deaths) < 2:
        raise ValueError(
            f"the job has {counted(len(deaths), 'recorded failure')}, and a rate needs at least 2: give"
            f" --mtbf, or a preset"
        )
    detected = sorted(_number(r["detected"]) for r in deaths)
    stalls = [s for r in deaths if (s := _number(r.get("step_committed")) - _number(r["detected"])) > 0]
    away = [
        joined - _number(r["detected"])
        for r in deaths
        for replica in _mapping(r.get("lost")).values()
        if (joined := _number(_mapping(replica).get("joined"))) > _number(r["detected"])
    ]
    return RecoveryPhases(
        len(deaths),
        max((detected[-1] - detected[0]) / (len(detected) - 1), 1e-3),
        statistics.median(stalls) if stalls else 0.0,
        statistics.median(away) if away else 0.0,
        statistics.fmean(_number(r.get("steps_lost")) for r in deaths),
    )


def _number(value: object) -> float:
    """Return a time of a record; 0 for another value, and for one that no clock has shown."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < _LATEST_S:
        return 0.0
    return float(value)


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
