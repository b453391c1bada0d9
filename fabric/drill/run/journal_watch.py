"""The replicas of a job as a drill and the demo see them, from their journals as they grow."""

from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec import Struct, field

from fabric.audit.journal import MAX_LINE_BYTES, decode_entry
from fabric.audit.summary import mean_loss

# The times of so many newest live commits of a replica are kept.
_KEPT_TIMES = 10_000


class WatchedReplica(Struct):
    """One replica. ``step`` counts the committed steps of its newest process."""

    replica: str
    phase: str = "starting"
    starts: int = 0  # processes that the journal shows
    pid: int = 0  # the newest process
    step: int = 0
    epoch: int = 0
    generation: int = 0  # of the newest commit
    commits: int = 0  # live commits of the newest process
    total: int = 0  # live commits of all processes
    unrest: int = 0  # aborts, and epochs that it has heard of
    unrest_t: float = 0.0  # the time of the newest abort or epoch
    refusal: str = ""  # why the newest process could not use a state that it fetched
    loss: float | None = None
    step_s: float | None = None  # the time between the newest two live commits
    commit_times: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_TIMES))
    mono: float | None = None  # of the newest process's newest live commit

    @property
    def is_finished(self) -> bool:
        return self.phase == "finished"

    def take(self, entry: dict[str, Any]) -> str:
        """Take in one line of the journal; return a sentence if people should see it, or an empty text."""
        event = entry["event"]
        if event == "start":
            self.starts, self.pid, self.phase = self.starts + 1, int(entry.get("pid") or 0), "up"
            self.commits, self.refusal, self.mono = 0, "", None
            return f"{self.replica} {'is back' if self.starts > 1 else 'started'}, process {self.pid}"
        if event == "commit":
            return self._commit(entry)
        if event in ("abort", "epoch"):
            self.unrest, self.unrest_t = self.unrest + 1, float(entry.get("t") or 0.0)
            self.epoch = max(self.epoch, entry.get("epoch", 0))
        elif event == "join" and self.step + entry.get("step", 0) > 0:
            self.phase, self.step = "catching up", entry.get("step", 0)
            megabytes = entry.get("bytes", 0) / 1e6
            return f"{self.replica} fetched the state of step {self.step} ({megabytes:.1f} MB)"
        elif event == "catch-up-failed":
            self.refusal = str(entry.get("why") or "")[:400]
        elif event == "finish":
            self.phase = "finished"
        return ""

    def _commit(self, entry: dict[str, Any]) -> str:
        self.step = int(entry.get("step") or 0) + 1
        self.generation = int(entry.get("generation") or 0)
        if "metrics" in entry and "contributions" in entry:
            self.loss = mean_loss(entry)
        if entry.get("replay"):
            return ""
        self.commits, self.total = self.commits + 1, self.total + 1
        self.commit_times.append(float(entry.get("t") or 0.0))
        mono = float(entry.get("mono") or 0.0)
        if self.mono is not None:
            self.step_s = mono - self.mono
        self.mono = mono
        joined, self.phase = self.phase == "catching up", "training"
        return f"{self.replica} joined with step {self.step}" if joined else ""


class JournalFollower:
    """Reads the lines appended to one journal since the last look.

    ``counts`` has the number of complete lines of each process, to check the journal later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.counts: list[int] = []

    def poll(self) -> list[dict[str, Any]]:
        """Return the entries of the lines that were completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                arrived = file.read(MAX_LINE_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(arrived)
        *lines, self._rest = (self._rest + arrived).split(b"\n")
        entries = [x for x in map(decode_entry, lines) if x is not None and isinstance(x.get("event"), str)]
        for entry in entries:
            if entry["event"] == "start" or not self.counts:
                self.counts.append(0)
            self.counts[-1] += 1
        return entries


class JournalWatch:
    """All replicas of a job, by name."""

    def __init__(
        self, paths: dict[str, Path], follow: Callable[["JournalWatch", list[str]], None] = lambda *_: None
    ) -> None:
        """``follow`` hears at each look what is new, in sentences for people."""
        self._follow = follow
        self.replicas = {name: WatchedReplica(name) for name in paths}
        self._followers = {name: JournalFollower(path) for name, path in paths.items()}

    @property
    def lines(self) -> int:
        return sum(sum(follower.counts) for follower in self._followers.values())

    def look(self) -> None:
        """Read the lines that were appended since the last look."""
        sentences = []
        for name, follower in self._followers.items():
            sentences += [self.replicas[name].take(entry) for entry in follower.poll()]
        self._follow(self, [sentence for sentence in sentences if sentence])

    def counts(self) -> dict[str, list[int]]:
        """Return, by replica, the number of complete lines of each process, read to the end."""
        before = -1
        while self.lines > before:
            before = self.lines
            self.look()
        return {name: list(follower.counts) for name, follower in self._followers.items()}
