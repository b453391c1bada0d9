"""Faults of links, which the relays in front of the replicas play."""

import time

from fabric.drill.injection.link_relay import LinkRelay
from fabric.drill.run.active_fault import ActiveFault, DrillScene
from fabric.drill.schedule.drill_schedule import ScheduledFault

_DELAY_S = 0.05
_RESET_EVERY_S = 0.5
# Evidence of a cut: so many pieces were held back.
_HELD_PIECES = 1


class LinkFault(ActiveFault):
    """One fault of the links of one replica; ``relay`` is in front of it, or in front of its lighthouse."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault) -> None:
        super().__init__(scene, fault)
        self.targets = (fault.target,)
        relays = scene.job.lighthouse_relays if fault.fault == "cut-lighthouse" else scene.job.relays
        self._relay: LinkRelay = relays[fault.target]
        self._before = 0
        self._reset_at = 0.0

    def inject(self) -> None:
        weather, name = self._relay.weather, self.fault.fault
        self._before = self._count()
        if name in ("cut-peers", "cut-lighthouse"):
            weather.holds_to = weather.holds_from = True
        elif name == "cut-in":
            weather.holds_to = True
        elif name == "slow-link":
            weather.delay_s = _DELAY_S
        elif name == "flip-payload":
            weather.flips = True

    def seen(self) -> str:
        name = self.fault.fault
        if name == "lossy-link" and time.monotonic() - self._reset_at >= _RESET_EVERY_S:
            self._reset_at = time.monotonic()
            self._relay.reset_one()
        done = self._count() - self._before
        words = {"slow-link": "delayed", "lossy-link": "reset", "flip-payload": "flipped"}.get(name, "held")
        what = {"lossy-link": "connections", "flip-payload": "bits"}.get(name, "pieces")
        return f"the relay {words} {done} {what}" if done >= _HELD_PIECES else ""

    def end(self) -> None:
        self._relay.weather.clear()

    def undone(self) -> str:
        weather = self._relay.weather
        is_over = not (weather.holds_to or weather.holds_from or weather.delay_s or weather.flips)
        return "the relay forwards again" if is_over else ""

    def _count(self) -> int:
        weather = self._relay.weather
        counts = {
            "slow-link": weather.delayed,
            "lossy-link": weather.reset,
            "flip-payload": weather.flipped,
        }
        return counts.get(self.fault.fault, weather.held)
