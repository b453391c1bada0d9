"""Schedules: which fault hits which target when, from a plan or from a seed."""

import math
import random
import re
from collections.abc import Collection, Sequence
from typing import Annotated, Any

import msgspec

from fabric.drill.schedule.fault_table import AIMED, FAULTS, FaultKind, FaultNeed, kind_of, obstacle
from fabric.errors import ConfigError
from fabric.model import Value

# The faults that can hit a point of a step, and the failpoints that every step of a trainer passes.
POINTED = ("kill", "hang")
POINTS = ("forward", "before-ring", "ring", "before-barrier", "barrier", "after-barrier", "optimizer")
MAX_ENTRIES = 10_000
WARM_STEPS = 3
MAX_SECONDS = 7 * 86_400.0
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_RANDOM = re.compile(r"([0-9]{1,9})(?: every (\S+))?(?: for (\S+))?")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|min|m|h)")


class ScheduledFault(Value):
    """One fault of a schedule. ``after_s`` counts from the moment at which the job was warm."""

    fault: str
    target: str = ""  # a replica; empty where the drill chooses, or where the fault hits no replica
    after_s: float = 0.0
    lasts_s: float | None = None  # None: as the table of faults says
    step: int | None = None  # wait also until the target has committed this step
    point: str = ""  # of `kill` and `hang`: the failpoint in the step

    @property
    def kind(self) -> FaultKind:
        return FAULTS[self.fault]

    @property
    def duration_s(self) -> float:
        return self.kind.lasts_s if self.lasts_s is None else self.lasts_s

    def __str__(self) -> str:
        words = [
            self.fault,
            self.target,
            f"at {self.point}" if self.point else "",
            f"after {self.after_s:.1f} s" if self.step is None or self.after_s else "",
            "" if self.step is None else f"after step {self.step}",
        ]
        words += [f"for {self.duration_s:g} s"] if self.duration_s else []
        return " ".join(word for word in words if word)


class _PlanEntry(msgspec.Struct, forbid_unknown_fields=True):
    fault: str
    target: str = ""
    after: str = "0s"
    lasts: str = ""
    step: Annotated[int, msgspec.Meta(ge=0)] | None = None
    point: str = ""


class _Plan(msgspec.Struct, forbid_unknown_fields=True):
    faults: Annotated[list[_PlanEntry], msgspec.Meta(min_length=1, max_length=MAX_ENTRIES)]
    expect: list[str] = []


class DrillSchedule(Value):
    """All faults of a drill in order of time, and the expectations of its plan."""

    faults: tuple[ScheduledFault, ...]
    expect: tuple[str, ...] = ()
    least_s: float = 0.0  # the drill goes on for at least so long; infinity: to the end of the job
    warm_steps: int = WARM_STEPS  # each replica commits so many steps before the first fault
    origin: str = ""  # the options of `fabric drill` from which this schedule comes


def parse_duration(text: str, what: str) -> float:
    """Return the seconds of "30s", "10m" or "1.5h". Raises ConfigError, which names ``what``."""
    form = _DURATION.fullmatch(text.strip())
    seconds = float(form[1]) * _UNITS[form[2]] if form is not None else math.inf
    if not seconds <= MAX_SECONDS:
        raise ConfigError(f'{what} is "{text[:40]}": give a duration such as 30s or 10m, up to a week')
    return seconds


def parse_fault(text: str, replicas: Sequence[str]) -> ScheduledFault:
    """Parse "kill r1", "kill r1 @optimizer", "stop r1 5s" or "kill-lighthouse". Raises ConfigError.

    A fault of a replica that names none hits the second replica of ``replicas``.
    """
    *words, last = text.split() or [""]
    point = last.removeprefix("@") if last.startswith("@") else ""
    words += [last] if last and not point else []
    if not 1 <= len(words) <= 3:
        raise ConfigError(f'the fault "{text[:80]}" cannot be read: write it as "kill r1" or "stop r1 5s"')
    kind = kind_of(words[0])
    lasts_s = None
    if len(words) > 1 and _DURATION.fullmatch(words[-1]):
        lasts_s = parse_duration(words.pop(), f'the duration of "{text[:40]}"')
    target = words[1] if len(words) > 1 else ""
    if not target and kind.scope in AIMED:
        target = replicas[1 % len(replicas)]
    return ScheduledFault(kind.name, target, 0.0, lasts_s, point=point)


def parse_plan(document: Any, name: str) -> DrillSchedule:
    """Check the parsed YAML or JSON of a plan file ``name``. Raises ConfigError with one sentence."""
    try:
        plan = msgspec.convert(document, _Plan)
    except (msgspec.ValidationError, UnicodeError) as error:
        why = str(error)[:300]
        raise ConfigError(f"the plan {name} cannot be used: {why}; docs/drill.md shows a plan") from error
    faults = []
    for number, entry in enumerate(plan.faults, start=1):
        place = f"fault {number} of the plan {name}"
        lasts_s = parse_duration(entry.lasts, f'"lasts" of {place}') if entry.lasts else None
        after_s = parse_duration(entry.after, f'"after" of {place}')
        kind = kind_of(entry.fault)
        faults.append(ScheduledFault(kind.name, entry.target, after_s, lasts_s, entry.step, entry.point))
    ordered = tuple(sorted(faults, key=lambda fault: fault.after_s))
    return DrillSchedule(ordered, tuple(plan.expect), origin=f"--plan {name}")


def random_schedule(text: str, replicas: Sequence[str], possible: Collection[FaultNeed]) -> DrillSchedule:
    """Draw faults by "7", a seed, or "7 every 30s for 2m"; equal arguments give equal faults.

    They are a Poisson process of one fault per ``every``. All possible kinds come once, in a drawn order,
    before a kind comes again. Raises ConfigError.
    """
    form = _RANDOM.fullmatch(" ".join(text.split()))
    if form is None:
        raise ConfigError(f'--random is "{text[:80]}": give a seed such as 7, or "7 every 30s for 2m"')
    seed, every_s = int(form[1]), parse_duration(form[2] or "30s", "every in --random")
    for_s = parse_duration(form[3] or "2m", "for in --random")
    if not every_s > 0:
        raise ConfigError(
            "every in --random must be more than 0s: give the mean time between two faults, such as 30s"
        )
    chance = random.Random(seed)  # noqa: S311  (a schedule, not a secret)
    kinds = sorted(name for name, kind in FAULTS.items() if not obstacle(kind, possible))
    if not kinds:
        raise ConfigError("no fault is possible here: `fabric drill --list` says why")
    faults: list[ScheduledFault] = []
    bag: list[str] = []
    at = chance.expovariate(1 / every_s)
    while at < for_s and len(faults) < MAX_ENTRIES:
        if not bag:
            bag = chance.sample(kinds, len(kinds))
        name, target = bag.pop(), chance.choice(list(replicas))
        hits_one = FAULTS[name].scope in AIMED
        faults.append(ScheduledFault(name, target if hits_one else "", round(at, 3)))
        at += chance.expovariate(1 / every_s)
    origin = f"--random '{seed} every {every_s:g}s for {for_s:g}s'"
    return DrillSchedule(tuple(faults), least_s=for_s, origin=origin)


def check_schedule(
    schedule: DrillSchedule, replicas: Collection[str], possible: Collection[FaultNeed]
) -> None:
    """Raise ConfigError for a fault that is not possible here, or that names a replica that is not there."""
    for fault in schedule.faults:
        if why := obstacle(fault.kind, possible):
            raise ConfigError(f"{fault.fault} is not possible here: {why}")
        hits_one = fault.kind.scope in AIMED
        if fault.target and not hits_one:
            raise ConfigError(f"{fault.fault} hits {fault.kind.scope}: leave {fault.target} away")
        if hits_one and fault.target not in replicas:
            names = ", ".join(sorted(replicas))
            raise ConfigError(
                f'{fault.fault} names the replica "{fault.target}", which the job does not have: '
                f"give one of {names}"
            )
        if fault.point and (fault.fault not in POINTED or fault.point not in POINTS):
            raise ConfigError(
                f'{fault.fault} cannot hit the point "{fault.point[:40]}": {" and ".join(POINTED)} can, and '
                f"the points are {', '.join(POINTS)}"
            )
        if fault.lasts_s is not None and not fault.kind.lasts_s:
            raise ConfigError(f"{fault.fault} lasts a moment: leave its duration away")
