"""When units fail: the failure processes of the simulator, and how long a repair takes.

A *unit* fails as a whole: a group, a replica, a node. A `FailureModel` makes `FailureClocks` for a number of
units. The engine reads each unit's next failure, and renews the clock of a unit that has come back.
"""

import contextlib
import csv
import json
import math
import statistics
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fabric.audit.journal import RecoveryFacts, read_recoveries
from fabric.errors import ProtocolError
from fabric.model import Value, counted

Times = NDArray[np.float64]
Units = NDArray[np.intp]


class FailureClocks:
    """``next_s``: seconds from the start to each unit's next failure, shape (units,); inf means never.

    ``after`` gives the next failures of some units that come back at some times (same shape).
    """

    def __init__(self, units: int, after: Callable[[Units, Times], Times], start_s: float = 0.0) -> None:
        self._after = after
        self.next_s = after(np.arange(units), np.full(units, start_s))

    def renew(self, units: Units, at_s: Times) -> None:
        """Draw the next failure of ``units``, which came back at ``at_s`` (same shape)."""
        self.next_s[units] = self._after(units, at_s)


class FailureModel(Protocol):
    """A failure process for a number of units."""

    def clocks(self, units: int, rng: np.random.Generator) -> FailureClocks:
        """Return clocks of ``units`` that all start at second 0."""


class WeibullRenewal(Value):
    """Independent units with Weibull times between failures; a unit that comes back starts a new time.

    ``scale_s``: Weibull scale of one unit. ``shape``: below 1 most failures come soon after a return. With
    shape 1 the units have no memory (Poisson), and the scale is the mean time between failures of one unit.
    """

    scale_s: float
    shape: float = 0.78

    def clocks(self, units: int, rng: np.random.Generator) -> FailureClocks:
        return FailureClocks(units, lambda which, at: at + self.scale_s * rng.weibull(self.shape, len(which)))


def weibull(system_mtbf_s: float, units: int, shape: float = 0.78) -> WeibullRenewal:
    """Weibull renewal whose mean, of one unit, is ``units`` times the mean time between failures of the
    system."""
    return WeibullRenewal(system_mtbf_s * units / math.gamma(1 + 1 / shape), shape)


class Lemons(Value):
    """Poisson failures in which a share of the units fails ``factor`` times as often as the others.

    ``unit_mtbf_s`` is the inverse of the mean failure rate of all units; ``share`` is 0 to 1.
    """

    unit_mtbf_s: float
    share: float = 0.05
    factor: float = 10.0

    def clocks(self, units: int, rng: np.random.Generator) -> FailureClocks:
        lemons = rng.permutation(units) < round(self.share * units)
        healthy_mtbf_s = self.unit_mtbf_s * float(np.where(lemons, self.factor, 1.0).mean())
        mtbf_s = np.where(lemons, healthy_mtbf_s / self.factor, healthy_mtbf_s)
        return FailureClocks(units, lambda which, at: at + rng.exponential(mtbf_s[which]))


class Fixed(Value):
    """A failure exactly every ``interval_s``; the units fail in turn."""

    interval_s: float

    def clocks(self, units: int, rng: np.random.Generator) -> FailureClocks:
        turn = tuple(((unit + 1) * self.interval_s, unit) for unit in range(units))
        return Trace(turn, units * self.interval_s).clocks(units, rng)


class Racks(Value):
    """Poisson failures of single units, and Poisson failures of all units of a rack at one instant.

    ``per_rack``: units in a rack. ``correlated``: share of the unit failures that rack failures cause, 0 to
    1.
    """

    unit_mtbf_s: float
    per_rack: int
    correlated: float = 0.1

    def clocks(self, units: int, rng: np.random.Generator) -> FailureClocks:
        rack_of = np.arange(units) // self.per_rack
        alone_s = self.unit_mtbf_s / (1 - self.correlated)
        rack_s = math.inf if self.correlated == 0 else self.unit_mtbf_s / self.correlated

        def fail_after(at: Times) -> Times:
            drawn = rng.exponential(rack_s, len(at)) if math.isfinite(rack_s) else np.full(len(at), math.inf)
            times: Times = at + drawn
            return times

        rack_next = fail_after(np.zeros(int(rack_of[-1]) + 1))

        def after(which: Units, at_s: Times) -> Times:
            own = at_s + rng.exponential(alone_s, len(which))
            for rack, at in zip(rack_of[which].tolist(), at_s.tolist(), strict=True):
                while rack_next[rack] <= at:  # the rack failed while the unit was away
                    rack_next[rack] = fail_after(rack_next[rack : rack + 1])[0]
            first: Times = np.minimum(own, rack_next[rack_of[which]])
            return first

        return FailureClocks(units, after)


class Trace(Value):
    """Recorded failures; the trace repeats after ``span_s``.

    A unit of the trace stands for the job's unit with its number modulo the number of the job's units.
    """

    failures: tuple[tuple[float, int], ...]  # (seconds from the start, unit), ascending
    span_s: float
    repairs_s: tuple[float, ...] = ()  # the lengths of the failures that ended within the trace

    @property
    def mtbf_s(self) -> float:
        """Mean time between failures of all units together."""
        return self.span_s / len(self.failures)

    @property
    def median_repair_s(self) -> float:
        """The median time of a repair; 0 where no failure ended within the trace."""
        return statistics.median(self.repairs_s) if self.repairs_s else 0.0

    def clocks(self, units: int, rng: np.random.Generator) -> FailureClocks:
        del rng
        times: list[list[float]] = [[] for _ in range(units)]
        for at, unit in self.failures:
            times[unit % units].append(at)

        def next_of(unit: int, at_s: float) -> float:
            own = times[unit]
            if not own:
                return math.inf
            turn, within = divmod(at_s, self.span_s) if at_s >= 0 else (0, -1.0)
            index = bisect_right(own, within)
            turn, index = (turn + 1, 0) if index == len(own) else (turn, index)
            return turn * self.span_s + own[index]

        def after(which: Units, at_s: Times) -> Times:
            return np.array([next_of(*x) for x in zip(which.tolist(), at_s.tolist(), strict=True)])

        return FailureClocks(units, after, -1.0)  # the first event may be at second 0


class Repair(Value):
    """How long a failed unit is away, in seconds: a fixed least time plus a log-normal part.

    ``least_s``: the least time of a restart. ``median_s`` and ``sigma`` describe the log-normal part; a
    median of 0 leaves it out.
    """

    least_s: float
    median_s: float = 0.0
    sigma: float = 1.0

    def draw(self, count: int, rng: np.random.Generator) -> Times:
        """``count`` repair times, shape (count,)."""
        if self.median_s == 0:
            return np.full(count, self.least_s)
        return self.least_s + self.median_s * np.exp(self.sigma * rng.standard_normal(count))


# Reads recorded failures: a CSV or JSON trace of a cluster, or the recovery records of a running job.


_SECONDS = {"time_s": 1.0, "time_min": 60.0, "time_h": 3600.0, "time_d": 86400.0}
_BEGINS, _ENDS = {"fail", "fault_start"}, {"repair", "fault_end"}
_MOST_BYTES = 256 << 20


def read_trace(path: Path) -> Trace:
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


class _Event(Value):
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


def _trace(events: Sequence[_Event], path: Path) -> Trace:
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
    return Trace(tuple(failures), span_s, tuple(repairs))


class RecoveryPhases(Value):
    """A job's recovery records in five numbers; times are medians in seconds."""

    failures: int  # number of deaths
    mtbf_s: float  # the mean interval between deaths
    stall_s: float  # from a death's detection to the first commit without the dead replica
    away_s: float  # from a death's detection to the replica's return; 0 where no replica returned
    steps_lost: float  # mean number of steps lost per failure


def phases_of(records: Iterable[object]) -> RecoveryPhases:
    """Return the phases of a job's recovery records (`GET /v1/jobs/{job}/recoveries`).

    A record that cannot be read does not count. Raises ValueError with fewer than two recorded deaths,
    because there is no time between them.
    """
    deaths: list[RecoveryFacts] = []
    for entry in records:
        with contextlib.suppress(ProtocolError):
            deaths += [x for x in read_recoveries([entry]) if x.kind in ("death", "stall") and x.detected]
    if len(deaths) < 2:
        raise ValueError(
            f"the job has {counted(len(deaths), 'recorded failure')}, and a rate needs at least 2: give"
            f" mtbf_s=, or a preset"
        )
    detected = sorted(x.detected for x in deaths)
    stalls = [s for x in deaths if (s := x.step_committed - x.detected) > 0]
    away = [s for x in deaths for back in x.lost.values() if (s := back.joined - x.detected) > 0]
    return RecoveryPhases(
        len(deaths),
        max((detected[-1] - detected[0]) / (len(detected) - 1), 1e-3),
        statistics.median(stalls) if stalls else 0.0,
        statistics.median(away) if away else 0.0,
        statistics.fmean(x.steps_lost for x in deaths),
    )
