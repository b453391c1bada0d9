"""The goodput ledger: a job's seconds spent training, degraded, recovering or stalled.

- *training*: steps are committed by as many members as the job starts with;
- *degraded*: steps are committed by fewer;
- *recovering*: from the detection of a failure to the next committed step;
- *stalled*: no step for longer than ten usual steps (at least 10 s; ten minutes while the usual step is
  unknown), whatever the reason, an evaluation included.

Every second of a job that has begun and is neither complete nor failed has exactly one state. The time since
the newest step is counted when the next step comes, or when it has become a stall. So sums only grow. A step
counts when the lighthouse hears of it. A new leader goes on from the stored sums. After its first message
from a member it counts the time since they were stored: in the stored state if steps were committed about as
often as usual, else as stalled.
"""

from collections import deque
from statistics import median
from typing import Any

from msgspec import Struct, field

from fabric.errors import ProtocolError
from fabric.model import Value

TRAINING, DEGRADED, RECOVERING, STALLED = STATES = ("training", "degraded", "recovering", "stalled")

LEAST_STALL_S = 10.0
UNKNOWN_STALL_S = 600.0
STALL_FACTOR = 10.0
_KNOWN = 3
_KEPT = 50


class JobSample(Value):
    """A job at one moment. ``is_on``: it has begun, and is neither complete nor failed. ``step``: -1 while a
    new leader has heard no member."""

    is_on: bool
    step: int = 0
    members: int = 0
    wanted: int = 0
    is_recovering: bool = False
    generation: int = 0


class GoodputLedger(Struct):
    """Call ``observe`` regularly; ``seconds`` are the sums by state. Times are monotonic seconds."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STATES, 0.0))
    state: str = ""  # the job's state; empty while the ledger counts nothing
    _counted: float = 0.0  # the time up to which the ledger has counted all seconds
    _generation: int = 0
    _step: int = -1
    _stepped: float = 0.0  # the time when the ledger first saw the newest step
    _begun: float = 0.0
    _usual: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def observe(self, look: JobSample, now: float) -> None:
        """Count the time whose state is certain."""
        if not look.is_on:
            if self.state:
                self._count(self.state, now)
            self.state, self._step = "", -1
            return
        if not self.state:
            self.state = _steady(look)
            self._counted = self._stepped = self._begun = now
        if look.generation != self._generation:  # after a cold start the job goes on from an earlier step
            self._generation, self._step = look.generation, -1
        # The first step that is reported may have been committed long ago.
        stepped = look.step > self._step >= 0
        if look.is_recovering:
            # The seconds before the failure keep their state, because the current step is not lost.
            self._count(self.state, now)
            self.state, self._stepped = RECOVERING, now
        elif stepped or self.state == RECOVERING:
            if self.state in (TRAINING, DEGRADED):
                step_s = (now - self._stepped) / (look.step - self._step)
                if step_s > self.stall_s:
                    self.state = STALLED  # no leader observed the job during the fail-over
                else:
                    self._usual.append(step_s)
            self._count(self.state, now)
            self.state, self._stepped = _steady(look), now
        else:
            # While no member has reported a step, the time since the beginning counts.
            stands_s = now - self._stepped if look.step >= 0 else now - self._begun
            if self.state == STALLED or stands_s > (self.stall_s if look.step >= 0 else UNKNOWN_STALL_S):
                self.state = STALLED
                self._count(STALLED, now)
        self._step = max(self._step, look.step)

    @property
    def stall_s(self) -> float:
        """The time without a step after which the job counts as stalled."""
        if len(self._usual) < _KNOWN:
            return UNKNOWN_STALL_S
        return max(LEAST_STALL_S, STALL_FACTOR * median(self._usual))

    @property
    def goodput(self) -> float | None:
        """The part of the counted time that was training; None while no time is counted."""
        total = sum(self.seconds.values())
        return self.seconds[TRAINING] / total if total > 0 else None

    def _count(self, state: str, now: float) -> None:
        self.seconds[state] += max(0.0, now - self._counted)
        self._counted = now

    def to_json(self) -> dict[str, Any]:
        """Return the sums for people."""
        goodput = self.goodput
        return {
            "state": self.state,
            "goodput": None if goodput is None else round(goodput, 4),
            **{name: round(value, 3) for name, value in self.seconds.items()},
        }

    def saved(self, wall: float) -> dict[str, Any]:
        """Return the form for the store; ``wall`` is Unix time."""
        usual_s = median(self._usual) if len(self._usual) >= _KNOWN else 0.0
        return {
            "t": wall,
            "state": self.state,
            "generation": self._generation,
            "step": self._step,
            "seconds": dict(self.seconds),
            "usual_s": usual_s,
        }

    def restore(self, body: Any, now: float, wall: float) -> None:
        """Go on from the sums that an earlier leader stored. Raises ProtocolError for any other value."""
        try:
            seconds = {name: float(body["seconds"][name]) for name in STATES}
            state, step, t = str(body["state"]), int(body["step"]), float(body["t"])
            generation, usual_s = int(body.get("generation", 0)), float(body.get("usual_s", 0.0))
            if min(*seconds.values(), usual_s) < 0 or state not in ("", *STATES) or not t > 0:
                raise ValueError("its numbers are none that a lighthouse writes")
        except (TypeError, ValueError, KeyError) as error:
            raise ProtocolError(f"this is no ledger: {error}") from error
        for name, value in seconds.items():
            self.seconds[name] += value
        if not state or not self.state:
            return
        # The job ran before and after the fail-over: time between counts with the next step or as a stall.
        gap = max(0.0, wall - t)
        self._counted = min(self._counted, now - gap)
        if self.state in (TRAINING, DEGRADED):
            self.state = state
            self._stepped = min(self._stepped, now - gap)
            if step >= 0 and generation in (0, self._generation):  # 0: an older release wrote this
                self._step = step
            if usual_s and len(self._usual) < _KNOWN:
                self._usual.extend([usual_s] * _KNOWN)


def _steady(look: JobSample) -> str:
    return TRAINING if look.members >= look.wanted else DEGRADED
