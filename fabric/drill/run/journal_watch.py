"""The drill's view of its replicas, from their journals as they grow."""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fabric.audit.journal_follower import JournalFollower

# The times of so many newest live commits of a replica are kept.
_KEPT_TIMES = 10_000


@dataclass(slots=True)
class WatchedReplica:
    """One replica. ``step`` counts the committed steps of its newest process."""

    replica: str
    starts: int = 0  # processes that the journal shows
    pid: int = 0  # the newest process
    step: int = 0
    generation: int = 0  # of the newest commit
    commits: int = 0  # live commits of the newest process
    total: int = 0  # live commits of all processes
    unrest: int = 0  # aborts, and epochs that it has heard of
    is_finished: bool = False
    unrest_t: float = 0.0  # the time of the newest abort or epoch
    refusal: str = ""  # why the newest process could not use a state that it fetched
    commit_times: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))


@dataclass
class JournalWatch:
    """All replicas of a job."""

    paths: dict[str, Path]
    replicas: dict[str, WatchedReplica] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.replicas = {name: WatchedReplica(name) for name in self.paths}
        self._followers = {name: JournalFollower(path) for name, path in self.paths.items()}

    def look(self) -> None:
        """Read the lines that were appended since the last look."""
        for name, follower in self._followers.items():
            for entry in follower.poll():
                _take(self.replicas[name], entry)

    def counts(self) -> dict[str, list[int]]:
        """Return, by replica, the number of complete lines of each process, read to the end."""
        for name, follower in self._followers.items():
            while entries := follower.poll():
                for entry in entries:
                    _take(self.replicas[name], entry)
        return {name: list(follower.counts) for name, follower in self._followers.items()}


def _take(view: WatchedReplica, entry: dict[str, Any]) -> None:
    event = entry["event"]
    if event == "start":
        view.starts, view.pid = view.starts + 1, int(entry.get("pid") or 0)
        view.commits, view.is_finished, view.refusal = 0, False, ""
    elif event == "commit":
        view.step = int(entry.get("step") or 0) + 1
        view.generation = int(entry.get("generation") or 0)
        if not entry.get("replay"):
            view.commits, view.total = view.commits + 1, view.total + 1
            view.commit_times.append(float(entry.get("t") or 0.0))
    elif event in ("abort", "epoch"):
        view.unrest, view.unrest_t = view.unrest + 1, float(entry.get("t") or 0.0)
    elif event == "catch-up-failed":
        view.refusal = str(entry.get("why") or "")[:200]
    elif event == "finish":
        view.is_finished = True
