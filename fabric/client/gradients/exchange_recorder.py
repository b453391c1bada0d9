"""Remembers the newest exchanges of this process, in the form of torch's Flight Recorder.

``fabric diagnose`` compares the recordings of all members: which member entered which exchange, when, and how
long the exchange took there. A round has one entry, so the cost does not grow with the gradient.
"""

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

_KEPT = 500
_WORDS = 200


@dataclass(slots=True)
class ExchangeEntry:
    """One round in the exchange thread. Times are Unix time in nanoseconds, 0 before the event."""

    epoch: int
    step: int
    nbytes: int
    dtypes: tuple[str, ...]
    created_ns: int
    buckets: int = 0  # number of buckets reduced so far
    reduce_s: float = 0.0  # time in the exchange, without waits for this process's backward pass
    ended_ns: int = 0
    aborted: str = ""  # why the round ended without a result

    def to_json(self, number: int) -> dict[str, object]:
        """Return the entry in the form of torch's Flight Recorder, with the fields that apply."""
        is_done = bool(self.ended_ns) and not self.aborted
        body: dict[str, object] = {
            "record_id": number,
            "process_group": [_group(self.epoch), "exchange"],
            "collective_seq_id": self.step,
            "p2p_seq_id": 0,
            "is_p2p": False,
            "profiling_name": "fabric:all_reduce",
            "input_sizes": [[self.nbytes]],
            "input_dtypes": list(self.dtypes),
            "output_sizes": [[self.nbytes]],
            "output_dtypes": list(self.dtypes),
            "time_created_ns": self.created_ns,
            "time_discovered_completed_ns": self.ended_ns if is_done else 0,
            "state": "completed" if is_done else "started",
            "retired": bool(self.ended_ns),
            "note": self.aborted or ("" if is_done else f"{self.buckets} buckets are reduced"),
        }
        if is_done:
            body["duration_ms"] = 1e3 * self.reduce_s
        return body


@dataclass(slots=True)
class ExchangeRecorder:
    """The newest rounds; the exchange thread writes, and any thread reads."""

    _entries: deque[ExchangeEntry] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _count: int = 0

    def begin(self, epoch: int, step: int, nbytes: int, dtypes: tuple[str, ...]) -> ExchangeEntry:
        """Record that a round begins; return its entry."""
        entry = ExchangeEntry(epoch, step, nbytes, dtypes, time.time_ns())
        self._entries.append(entry)
        self._count += 1
        return entry

    def end(self, entry: ExchangeEntry, aborted: str = "") -> None:
        """Record that a round has ended. ``aborted``: why it has no result."""
        entry.aborted = aborted[:_WORDS]
        entry.ended_ns = time.time_ns()

    def to_json(self, replica: str, rank: int, epoch: int, roster: Sequence[str]) -> dict[str, object]:
        """Return the whole recording. ``roster``: the members of ``epoch``."""
        entries = list(self._entries)
        first = max(0, self._count - len(entries))
        return {
            "recorder": "fabric",
            "replica": replica,
            "rank": rank,
            "pg_config": {_group(epoch): {"desc": "exchange", "ranks": list(roster)}},
            "entries": [entry.to_json(first + place) for place, entry in enumerate(entries)],
        }


def _group(epoch: int) -> str:
    return f"epoch {epoch}"
