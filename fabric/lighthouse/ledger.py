"""Where a job's time went, in seconds of the job: training, degraded, recovering or stalled.

- *training*: steps are committed by as many members as the job starts with;
- *degraded*: steps are committed by fewer;
- *recovering*: from the detection of a failure to the next committed step;
- *stalled*: no step for longer than ten times the usual (at least 10 s; ten minutes while no usual is known),
  whatever the reason, an evaluation included.

Every second of a job that has begun and is neither complete nor failed is in exactly one of them. The time
since the newest step is counted when the next one comes, or when it turns out to be a stall, so sums only
grow. Steps are as the lighthouse hears of them. A new leader goes on from what was stored last: the time
between counts as what it was then if steps were committed meanwhile, else as stalled.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from fabric.errors import ProtocolError

TRAINING, DEGRADED, RECOVERING, STALLED = STATES = ("training", "degraded", "recovering", "stalled")

LEAST_STALL_S = 10.0
UNKNOWN_STALL_S = 600.0
STALL_FACTOR = 10.0
_KNOWN = 3
_KEPT = 50


@dataclass(frozen=True, slots=True)
class Look:
    """A job at one moment. ``is_on``: it has begun, and is neither complete nor failed."""

    is_on: bool
    step: int = 0
    members: int = 0
    wanted: int = 0
    is_recovering: bool = False


@dataclass(slots=True)
class Ledger:
    """``observe`` now and then, with monotonic seconds; ``seconds`` by state is what has been counted."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    state: str = ""  # empty while nothing is counted
    _counted: float = 0.0  # up to when
    _step: int = -1
    _stepped: float = 0.0  # when that step was first seen
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def observe(self, look: Look, now: float) -> None:
        """Count what is certain by now."""
        if not look.is_on:
            if self.state:
                self._count(self.state, now)
            self.state, self._step = "", -1
            return
        if not self.state:
            self.state, self._counted, self._step, self._stepped = _steady(look), now, look.step, now
        stepped = look.step > self._step
        if look.is_recovering:
            # What came before the failure was what it was: the step under way is not lost.
            self._count(self.state, now)
            self.state, self._stepped = RECOVERING, now
        elif stepped or self.state == RECOVERING:
            self._count(self.state, now)
            if self.state in (TRAINING, DEGRADED):
                self._usual.append((now - self._stepped) / (look.step - self._step))
            self.state, self._stepped = _steady(look), now
        elif self.state == STALLED or now - self._stepped > self.stall_s:
            self.state = STALLED
            self._count(STALLED, now)
        if stepped or look.step < self._step:  # less: a cold start
            self._step = look.step

    @property
    def stall_s(self) -> float:
        """How long without a step is a stall."""
        if len(self._usual) < _KNOWN:
            return UNKNOWN_STALL_S
        return max(LEAST_STALL_S, STALL_FACTOR * median(self._usual))

    @property
    def goodput(self) -> float | None:
        """The part of the counted time that was training; None before there is any."""
        total = sum(self.seconds.values())
        return self.seconds[TRAINING] / total if total > 0 else None

    def _count(self, state: str, now: float) -> None:
        self.seconds[state] += max(0.0, now - self._counted)
        self._counted = now

    def to_json(self) -> dict[str, Any]:
        """For people."""
        goodput = self.goodput
        return {
            "state": self.state,
            "goodput": None if goodput is None else round(goodput, 4),
            **{name: round(value, 3) for name, value in self.seconds.items()},
        }

    def saved(self, wall: float) -> dict[str, Any]:
        """For the store; ``wall`` is Unix time."""
        return {"t": wall, "state": self.state, "step": self._step, "seconds": dict(self.seconds)}

    def restore(self, body: Any, now: float, wall: float) -> None:
        """Go on from what an earlier leader stored. Raises ProtocolError for what none wrote."""
        try:
            seconds = {name: float(body["seconds"][name]) for name in STATES}
            state, step, t = str(body["state"]), int(body["step"]), float(body["t"])
            if min(seconds.values()) < 0 or state not in ("", *STATES) or not t > 0:
                raise ValueError("its numbers are none that a lighthouse writes")
        except (TypeError, ValueError, KeyError) as error:
            raise ProtocolError(f"this is no ledger: {error}") from error
        for name, value in seconds.items():
            self.seconds[name] += value
        if not state or not self.state:
            return
        # Under way then and now. What lies between is counted with the next step, or as a stall.
        gap = max(0.0, wall - t)
        self._counted = min(self._counted, now - gap)
        if self.state in (TRAINING, DEGRADED):
            self.state = state if state in (TRAINING, DEGRADED) else self.state
            self._step = min(self._step, step) if step >= 0 else self._step


def _steady(look: Look) -> str:
    return TRAINING if look.members >= look.wanted else DEGRADED
