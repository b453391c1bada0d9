"""Decides from the exit codes of its ranks whether a replica starts again, when, and in which layout.

All functions here take plain values; ``fabric.cli.launch.launcher`` has the clock and the processes.
"""

import contextlib
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field

from fabric.exit_codes import DEVICE_FAILED, END_BY_SIGNAL, FINAL_CODES, FINISHED, LAYOUT_REFUSED, RESTART
from fabric.model import Value
from fabric.protocol.nodes import NodeEnd
from fabric.runtime.rank_layout import RankLayout

# After an attempt of this length the count of quick deaths is zero. The first one is followed by no pause.
HEALTHY_S = 60.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
# One device error may be the program's fault. A device with this many errors within this time is excluded.
DEVICE_ERRORS, DEVICE_ERRORS_WITHIN_S = 2, 1800.0


class NextMove(Value):
    """The launcher's decision after an attempt."""

    code: int | None = None  # the launcher ends with this code; None: it starts the ranks again
    pause_s: float = 0.0  # seconds before the next attempt
    refused: bool = False  # the script cannot build the layout of this attempt
    why: str = ""  # the reason, in words


@dataclass
class RestartPolicy:
    """Decides after each attempt; allows ``most`` restarts, None for any number."""

    most: int | None = None
    restarts: int = 0
    _quick: int = field(default=0, init=False)  # quick deaths of attempts in a row

    def may_restart(self) -> bool:
        """Whether a restart is left."""
        return self.most is None or self.restarts < self.most

    def judge(self, end: NodeEnd) -> NextMove:
        """Return the launcher's next move after this attempt."""
        if end.is_clean:
            return NextMove(code=FINISHED)
        refusing = [rank for rank, code in sorted(end.codes.items()) if code == LAYOUT_REFUSED]
        if refusing:
            return NextMove(refused=True, why=f"rank {refusing[0]} cannot build this layout")
        final = [rank for rank, code in sorted(end.codes.items()) if code in FINAL_CODES]
        # A rank's death makes others end with 1, where they lose a peer before ``attach``.
        has_cause = end.lost or any(
            end.codes[rank] < 0 or end.codes[rank] == DEVICE_FAILED for rank in end.first
        )
        if final and not has_cause:
            why = f"rank {final[0]} {describe(end.codes[final[0]])}, and a restart does not help"
            return NextMove(code=end.codes[final[0]], why=f"{why}: see its last sentence")
        failed = [rank for rank, code in sorted(end.codes.items()) if code != FINISHED]
        ranks = list(end.first) or failed
        why = ", ".join([*end.lost[:8], *(f"rank {x} {describe(end.codes[x])}" for x in ranks[:8])])
        if not self.may_restart():
            why = f"{why}, and the {self.most} restarts of --restarts are used up"
            code = end.codes[ranks[0]] if ranks else RESTART
            return NextMove(code=END_BY_SIGNAL - code if code < 0 else code, why=why)
        self.restarts += 1
        self._quick = 0 if end.ran_s >= HEALTHY_S else self._quick + 1
        pause_s = (
            min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * 2 ** min(self._quick - 2, 16)) if self._quick > 1 else 0.0
        )
        return NextMove(pause_s=pause_s, why=why)


@dataclass
class DeviceHistory:
    """Excludes devices of this host that had repeated errors."""

    excluded: set[str] = field(default_factory=set)
    _errors: dict[str, list[float]] = field(default_factory=dict)

    def note(self, device: str, now: float) -> bool:
        """Count an error of ``device``; return whether that excludes it."""
        times = [t for t in self._errors.get(device, []) if now - t < DEVICE_ERRORS_WITHIN_S] + [now]
        self._errors[device] = times
        if len(times) >= DEVICE_ERRORS:
            self.excluded.add(device)
        return device in self.excluded

    def usable(self, devices: Sequence[str]) -> tuple[str, ...]:
        """Return those of ``devices`` that are not excluded."""
        return tuple(device for device in devices if device not in self.excluded)


def choose_layout(
    candidates: Sequence[RankLayout], devices: int, refused: Sequence[RankLayout]
) -> RankLayout | None:
    """Return the first candidate that fits the number of ``devices`` and that the script has not refused."""
    return next((x for x in candidates if x not in refused and x.ranks <= devices), None)


def describe(code: int) -> str:
    """Return an exit code in words that follow "rank 3"."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    if code == DEVICE_FAILED:
        return f"ended with {code}: its device has failed"
    if code == RESTART:
        return f"ended with {code}: it asks for a restart"
    return f"ended with {code}"
