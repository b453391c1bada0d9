"""A synthetic run: three replicas, one killed, the retried round, a fetch, replay and join.

The run is deterministic. It follows the documented journal format and data order, and shares no code with the
verifier.
"""

import copy
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

Entry = dict[str, Any]

STEPS, KILL_STEP, SERVE_STEP, JOIN_STEP = 10, 3, 5, 7
DATA = {
    "dataset_size": 50,
    "global_batch_size": 12,
    "micro_batch_size": 2,
    "seed": 11,
    "micro_batches": 6,
}
REPLICAS = ("r0", "r1", "r2")
VICTIM = "r1"
STEP_S = 0.5


def _hash(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def samples(step: int, micro_batch: int) -> list[int]:
    passes = [
        np.random.Generator(np.random.PCG64([DATA["seed"], k])).permutation(DATA["dataset_size"])
        for k in range(6)
    ]
    order = np.concatenate(passes)
    first = step * DATA["global_batch_size"] + micro_batch * DATA["micro_batch_size"]
    return [int(i) for i in order[first : first + DATA["micro_batch_size"]]]


class SyntheticRun:
    """Builds the journals: ``entries`` by replica, and ``supervisor``, the lines of the demo's supervisor."""

    def __init__(self, *, failure: bool = True, loss_offset: float = 0.0) -> None:
        self.entries: dict[str, list[Entry]] = {name: [] for name in REPLICAS}
        self.supervisor: list[Entry] = [{"event": "demo", "t": 999.0}]
        self.now = 0.0
        self.loss_offset = loss_offset
        self.incarnation = dict.fromkeys(REPLICAS, 1)
        self._start()
        for step in range(STEPS):
            self.now = 10 + step * STEP_S
            self._step(step, failure=failure)
        self._finish()

    def _write(self, replica: str, event: str, **fields: object) -> None:
        self.now += 0.001
        entry = {"event": event, "t": 1000 + self.now, "mono": self.now, "replica": replica}
        entry["incarnation"] = self.incarnation[replica]
        self.entries[replica].append(entry | copy.deepcopy(fields))

    def _begin(self, replica: str, pid: int) -> None:
        fields = {"job": "demo", "layout": "abc", "torch": "2.13.0", "data": DATA}
        self._write(replica, "start", pid=pid, **fields)

    def _start(self) -> None:
        for number, replica in enumerate(REPLICAS):
            self._begin(replica, 100 + number)
            self._epoch(replica, 1, REPLICAS, forced=True)
            self._write(replica, "resume", epoch=1, step=0)

    def _epoch(self, replica: str, epoch: int, roster: tuple[str, ...], *, forced: bool) -> None:
        fields = {"epoch": epoch, "generation": 1, "forced": forced, "roster": list(roster)}
        self._write(replica, "epoch", reason="because", **fields)

    def _contribute(self, replica: str, epoch: int, step: int, ids: list[int]) -> None:
        listed = {str(i): samples(step, i) for i in ids}
        fields = {"generation": 1, "epoch": epoch, "step": step, "micro_batches": ids}
        self._write(replica, "contribute", samples=listed, weight=2.0 * len(ids), **fields)

    def _commit(
        self, replica: str, epoch: int, step: int, table: dict[str, list[int]], **flags: bool
    ) -> None:
        fields: Entry = {"generation": 1, "epoch": epoch, "step": step, "contributed": True}
        fields |= {"replay": False, "contributions": table, "weight": 12.0}
        fields["gradient_digest"] = _hash("gradient", step)
        fields["metrics"] = {"loss": 600 / (step + 1) + self.loss_offset, "tokens": 120.0}
        fields["members"] = list(table)
        fields["times"] = {"compute_s": 0.3, "exchange_s": 0.1, "optimizer_s": 0.05, "wait_s": 0.0}
        self._write(replica, "commit", **(fields | flags))
        self._write(replica, "state", generation=1, step=step + 1, digest=_hash("state", step + 1))

    def _step(self, step: int, *, failure: bool) -> None:
        if not failure or step < KILL_STEP:
            self._round(1, step, {"r0": [0, 1], "r1": [2, 3], "r2": [4, 5]})
        elif step == KILL_STEP:
            self._retried(step)
        elif step < JOIN_STEP:
            self._round(2, step, {"r0": [0, 1, 2], "r2": [3, 4, 5]})
            if step == SERVE_STEP:
                self._fetch()
        elif step == JOIN_STEP:
            self._admit(step)
            self._round(3, step, {"r0": [0, 1, 2], "r1": [], "r2": [3, 4, 5]})
        else:
            self._round(3, step, {"r0": [0, 1], "r1": [2, 3], "r2": [4, 5]})

    def _round(self, epoch: int, step: int, table: dict[str, list[int]]) -> None:
        for replica, ids in table.items():
            if ids:
                self._contribute(replica, epoch, step, ids)
        for replica, ids in table.items():
            self._commit(replica, epoch, step, table, contributed=bool(ids))

    def _retried(self, step: int) -> None:
        self._contribute(VICTIM, 1, step, [2, 3])
        pid = self.entries[VICTIM][0]["pid"]
        kill = {"event": "kill", "t": 1000 + self.now, "replica": VICTIM, "pid": pid}
        self.supervisor.append(kill)
        self._contribute("r0", 1, step, [0, 1])
        for replica in ("r0", "r2"):
            self._write(replica, "abort", epoch=1, step=step, why="lost r1", about=VICTIM)
        for replica in ("r0", "r2"):
            self._epoch(replica, 2, ("r0", "r2"), forced=True)
            self._write(replica, "resume", epoch=2, step=step)
        self._round(2, step, {"r0": [0, 1, 2], "r2": [4, 5, 3]})

    def _fetch(self) -> None:
        self.incarnation[VICTIM] = 2
        self._begin(VICTIM, 177)
        fields = {"generation": 1, "step": SERVE_STEP, "bytes": 4_000_000, "seconds": 0.02}
        self._write(VICTIM, "join", sources=["http://127.0.0.1:1", "http://127.0.0.1:2"], **fields)

    def _admit(self, step: int) -> None:
        for number in range(SERVE_STEP, step):
            table = {"r0": [0, 1, 2], "r2": [3, 4, 5]}
            self._commit(VICTIM, 2, number, table, contributed=False, replay=True)
        for replica in REPLICAS:
            self._epoch(replica, 3, REPLICAS, forced=False)
        self._write(VICTIM, "joined", epoch=3, step=step, replayed=step - SERVE_STEP)

    def _finish(self) -> None:
        for replica in REPLICAS:
            self._write(replica, "finish", step=STEPS)
            self._write(replica, "stop", code=0, reason="finished")
        for replica, entries in self.entries.items():
            counts: list[int] = []
            for entry in entries:
                if entry["event"] == "start":
                    counts.append(0)
                counts[-1] += 1
            seen = {"event": "journal", "t": 1000 + self.now, "replica": replica, "lines": counts}
            self.supervisor.append(seen)

    def write(self, directory: Path) -> Path:
        """Write the run as `fabric demo` lays it out."""
        (directory / "journal").mkdir(parents=True)
        for replica, entries in self.entries.items():
            (directory / "journal" / f"{replica}.jsonl").write_bytes(to_bytes(entries))
        (directory / "supervisor.jsonl").write_bytes(to_bytes(self.supervisor))
        return directory


def to_bytes(entries: list[Entry]) -> bytes:
    return b"".join(json.dumps(entry).encode() + b"\n" for entry in entries)
