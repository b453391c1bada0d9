"""One replica as the demo shows it, from the lines of its journal."""

from dataclasses import dataclass, field
from typing import Any

from fabric.audit.summary import loss_per_unit


@dataclass(slots=True)
class ReplicaView:
    """One replica's row of the table. ``step`` counts its committed steps, ``pid`` is of its trainer."""

    replica: str
    phase: str = "starting"
    pid: int | None = None
    step: int = 0
    epoch: int = 0
    loss: float | None = None
    step_s: float | None = None
    _mono: float | None = field(default=None, repr=False)

    def apply(self, entry: dict[str, Any]) -> str | None:
        """Take in one journal entry; return a sentence if people should see it."""
        event = entry["event"]
        if event == "start":
            again = self.pid is not None
            self.pid, self.phase, self._mono = entry.get("pid"), "up", None
            return f"{self.replica} {'is back' if again else 'started'}, process {self.pid}"
        if event == "epoch":
            return self._epoch(entry)
        if event == "join" and self.step + entry.get("step", 0) > 0:
            self.phase, self.step = "catching up", entry.get("step", 0)
            megabytes = entry.get("bytes", 0) / 1e6
            return f"{self.replica} fetched the state of step {self.step} ({megabytes:.1f} MB)"
        if event == "commit":
            return self._commit(entry)
        if event == "finish":
            self.phase = "finished"
        return None

    def _epoch(self, entry: dict[str, Any]) -> str | None:
        if entry.get("epoch", 0) <= self.epoch:
            return None
        self.epoch = entry["epoch"]
        return None

    def _commit(self, entry: dict[str, Any]) -> str | None:
        self.step = entry.get("step", 0) + 1
        self.loss = loss_per_unit(entry)
        if entry.get("replay"):
            return None
        mono = float(entry.get("mono", 0.0))
        if self._mono is not None:
            self.step_s = mono - self._mono
        self._mono = mono
        joined = self.phase == "catching up"
        self.phase = "training"
        return f"{self.replica} joined with step {self.step}" if joined else None
