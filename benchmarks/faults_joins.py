"""Which part of a join costs the others what: their steps and everybody's processor time, phase by phase."""

import bisect
import contextlib
import os
import statistics
import threading
import time
from pathlib import Path

import common
from faults_fleet import REPLICAS, FaultFleet, durations
from faults_record import InjectedFault, RunRecord

PHASES = ("start", "state", "replay", "first step")
_EVERY_S = 0.1
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_GROUPS = ("newcomer", "its server", "survivors", "their servers")


class ProcessorTime:
    """Samples what every trainer and every checkpoint server has used of the processors, until the end of the
    ``with`` block."""

    def __init__(self, fleet: FaultFleet) -> None:
        self._fleet = fleet
        self._samples: dict[str, list[tuple[float, float]]] = {}
        self._last: dict[int, float] = {}
        self._total: dict[str, float] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "ProcessorTime":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def between(self, who: str, begun: float, end: float) -> float:
        """Processor seconds of a replica's trainer (its name) or of its server (``ckpt-`` before that)."""
        return self._at(who, end) - self._at(who, begun)

    def _at(self, who: str, when: float) -> float:
        samples = self._samples.get(who, [])
        after = bisect.bisect_left(samples, (when, 0.0))
        if not samples or after == 0:
            return samples[0][1] if samples else 0.0
        if after == len(samples):
            return samples[-1][1]
        (t0, used0), (t1, used1) = samples[after - 1], samples[after]
        return used0 + (used1 - used0) * (when - t0) / (t1 - t0)

    def note(self, now: float, who: str, pid: int, seconds: float) -> None:
        """A process of ``who`` has used so much since its start. A later one goes on counting."""
        used = self._total.get(who, 0.0) + max(0.0, seconds - self._last.get(pid, 0.0))
        self._total[who], self._last[pid] = used, seconds
        self._samples.setdefault(who, []).append((now, used))

    def _run(self) -> None:
        while not self._ended.wait(_EVERY_S):
            for who, pid in self._processes():
                self.note(time.monotonic(), who, pid, _used(pid))

    def _processes(self) -> list[tuple[str, int]]:
        found = [(name, process.pid) for name, process in self._fleet.trainers.items()]
        for name in REPLICAS:
            with contextlib.suppress(OSError, ValueError):
                found.append((f"ckpt-{name}", self._fleet.server_pid(name)))
        return found


def _used(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) * _TICK_S


def boundaries(record: RunRecord, fault: InjectedFault) -> list[float]:
    """Monotonic times at which a join's phases begin, and its end."""
    stages = record.join_stages(fault)
    return [
        fault.started + x
        for x in (0.0, stages["registered"], stages["loaded"], stages["member"], stages["given"])
    ]


def tell_phases(record: RunRecord, joins: list[InjectedFault], used: ProcessorTime) -> None:
    """One row per phase of a join: the others' steps that ended in it, and what everybody computed."""
    rows = []
    for number, phase in enumerate(PHASES):
        seconds, ratios = [], []
        spent: dict[str, list[float]] = {group: [] for group in _GROUPS}
        for fault in joins:
            times = boundaries(record, fault)
            begun, end = times[number], times[number + 1]
            seconds.append(end - begun)
            as_two = statistics.median(record.calm(fault.mode, len(REPLICAS) - 1))
            for name in fault.survivors:
                ratios += [
                    s / as_two for s, step in durations(record.steps[name]) if begun < step["end"] <= end
                ]
            for group, who in _who(fault).items():
                spent[group].append(sum(used.between(x, begun, end) for x in who))
        ratio = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})" if ratios else ""
        rows.append([phase, f"{statistics.median(seconds):.1f}", len(ratios), ratio])
        rows[-1] += [f"{statistics.median(spent[group]):.2f}" for group in _GROUPS]
    common.table(
        "phases of a join: seconds; the others' steps that ended in it, over theirs undisturbed;\n"
        "processor seconds",
        ["phase", "seconds", "steps", "ratio", *_GROUPS],
        rows,
    )


def _who(fault: InjectedFault) -> dict[str, list[str]]:
    others = fault.survivors
    return dict(
        zip(
            _GROUPS,
            ([fault.victim], [f"ckpt-{fault.victim}"], others, [f"ckpt-{x}" for x in others]),
            strict=True,
        )
    )
