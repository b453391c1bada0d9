"""From what a disturbed job wrote down to figures: see ``faults.py`` for what each one means."""

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from faults_fleet import REPLICAS, FaultFleet, durations

OWN_BATCHES, DEGRADED_BATCHES = 2, 3
WARM_STEPS = 3
Event = dict[str, Any]


@dataclass(frozen=True)
class Stall:
    """One survivor's, in seconds; ``as_two`` is against the undisturbed step of two members, ``resumed``
    the monotonic time at which it was told how to go on."""

    survivor: str
    stall: float
    as_two: float
    inherited: float
    repeated: float
    resumed: float


@dataclass
class InjectedFault:
    """One signal sent at ``at`` (monotonic seconds), when its replica's return began and ended."""

    kind: str
    victim: str
    at: float
    mode: str
    phase: float
    started: float = 0.0
    back: float = 0.0
    stalls: list[Stall] = field(default_factory=list)

    @property
    def survivors(self) -> list[str]:
        return [name for name in REPLICAS if name != self.victim]


class RunRecord:
    """Everything that the fleet wrote, and the undisturbed steps in it."""

    def __init__(
        self, fleet: FaultFleet, faults: list[InjectedFault], provoked: list[tuple[float, float]]
    ) -> None:
        self.faults = faults
        self._provoked = provoked
        self.steps = {name: fleet.steps(name) for name in REPLICAS}
        self.journals = {name: fleet.journal(name) for name in REPLICAS}
        self.events = fleet.events()
        for fault in faults:
            fault.stalls = [self._survivor(fault, name) for name in fault.survivors]

    # --- what is undisturbed -------------------------------------------------------------------------------

    def calm(self, mode: str, members: int) -> list[float]:
        """Return the durations of undisturbed steps of every replica."""
        return [
            seconds
            for name in REPLICAS
            for seconds, step in durations(self.steps[name])
            if step["step"] >= WARM_STEPS
            and (step["mode"], step["members"]) == (mode, members)
            and self._is_calm(name, step["end"] - seconds, step["end"])
        ]

    def exchange(self, mode: str) -> float:
        """The median time from a contribution to its commit, in undisturbed steps of all."""
        found = []
        for name in REPLICAS:
            given = {(x["epoch"], x["step"]): x["mono"] for x in self._lines(name, "contribute")}
            ends = {step["end"] for _, step in durations(self.steps[name]) if step["mode"] == mode}
            for x in self._lines(name, "commit"):
                begun = given.get((x["epoch"], x["step"]))
                all_there = len(x["members"]) == len(REPLICAS)
                if begun is None or not all_there or not any(0 <= end - x["mono"] < 0.5 for end in ends):
                    continue
                if self._is_calm(name, begun, x["mono"]):
                    found.append(x["mono"] - begun)
        return statistics.median(found)

    def _is_calm(self, name: str, begun: float, end: float) -> bool:
        """Return whether this time of this replica had no fault, recovery or return."""
        for fault in self.faults:
            recovered = self._recovered(fault, name) if name != fault.victim else fault.back
            if (begun < recovered and end > fault.at) or (begun < fault.back and end > fault.started):
                return False
        return not any(begun < last and end > first for first, last in self._provoked)

    def _recovered(self, fault: InjectedFault, name: str) -> float:
        """When this survivor committed the step in which its recovery ended."""
        return self._step_after(name, self._resumed(fault, name))["end"]

    def _resumed(self, fault: InjectedFault, name: str) -> float:
        return next(x["mono"] for x in self._lines(name, "resume") if x["mono"] > fault.at)

    def _step_after(self, name: str, time: float) -> Event:
        return next(s for s in self.steps[name] if s["end"] > time)

    def _lines(self, name: str, event: str) -> Iterator[Event]:
        return (x for x in self.journals[name] if x["event"] == event)

    # --- stalls ----------------------------------------------------------------------------------------

    def _survivor(self, fault: InjectedFault, name: str) -> Stall:
        """Return the cost of the fault for this survivor."""
        steps, resumed = self.steps[name], self._resumed(fault, name)
        first = steps.index(self._step_after(name, fault.at))
        last = steps.index(self._step_after(name, resumed))
        spent = steps[last]["end"] - steps[first - 1]["end"]
        whole = statistics.median(self.calm(fault.mode, len(REPLICAS)))
        as_two = statistics.median(self.calm(fault.mode, len(REPLICAS) - 1))
        inherited = max(self._beyond(x, fault, OWN_BATCHES) for x in fault.survivors)
        beyond = max(self._beyond(x, fault, DEGRADED_BATCHES) for x in fault.survivors)
        repeated = self._repeated(name, fault, steps[last]["step"])
        others = (last - first) * whole
        return Stall(
            survivor=name,
            stall=spent - others - whole - inherited - repeated,
            as_two=spent - others - as_two - beyond - repeated,
            inherited=inherited,
            repeated=repeated,
            resumed=resumed,
        )

    def _beyond(self, name: str, fault: InjectedFault, own: int) -> float:
        """Seconds of this survivor on more than ``own`` micro-batches, in the step in which it recovered."""
        step = self._step_after(name, self._resumed(fault, name))
        return float(sum(end - begun for begun, end in step["batches"][own:]))

    def _repeated(self, name: str, fault: InjectedFault, step: int) -> float:
        """Return the repeated exchange time: that of the interrupted exchange (at most an undisturbed one)
        and of the last, minus an undisturbed one.
        """
        given = [x["mono"] for x in self._lines(name, "contribute") if x["step"] == step]
        commit = next(x["mono"] for x in self._lines(name, "commit") if x["step"] == step)
        before = [t for t in given if t < fault.at]
        if not before or given[-1] < fault.at:
            return 0.0
        whole = self.exchange(fault.mode)
        return float(max(0.0, min(fault.at - before[-1], whole) + commit - given[-1] - whole))

    def lost(self, fault: InjectedFault) -> int:
        """Return the committed steps that the recovery lost."""
        before = [
            x["step"] + 1 for name in REPLICAS for x in self._lines(name, "commit") if x["mono"] < fault.at
        ]
        after = min(
            next(x["step"] for x in self._lines(name, "resume") if x["mono"] > fault.at)
            for name in fault.survivors
        )
        return max(0, max(before, default=0) - after)

    def stages(self, fault: InjectedFault) -> dict[str, float]:
        """Seconds after the fault until the leader condemned the victim, until its epoch was in the store,
        until the last survivor had aborted, and until the last one was told how to go on."""
        found = {}
        for key, kind in (("evicting", "evicting"), ("stored", "epoch")):
            found[key] = next(x["mono"] for x in self.events if x["kind"] == kind and x["mono"] > fault.at)
        for key in ("abort", "resume"):
            found[key] = max(
                next((x["mono"] for x in self._lines(name, key) if x["mono"] > fault.at), fault.at)
                for name in fault.survivors
            )
        return {key: at - fault.at for key, at in found.items()}

    # --- joins -----------------------------------------------------------------------------------------

    def join_ratios(self, fault: InjectedFault) -> list[float]:
        """Return the others' steps during a return, divided by their median undisturbed step as two
        members.
        """
        as_two = statistics.median(self.calm(fault.mode, len(REPLICAS) - 1))
        return [
            seconds / as_two
            for name in fault.survivors
            for seconds, step in durations(self.steps[name])
            if fault.started < step["end"] <= fault.back
        ]

    def join_stages(self, fault: InjectedFault) -> dict[str, float]:
        """Seconds after its start until it registered, had loaded the state, took part, contributed."""
        times = {"given": fault.back - fault.started}
        for key, event in (("registered", "start"), ("loaded", "join"), ("member", "joined")):
            line = next(x for x in self._lines(fault.victim, event) if x["mono"] > fault.started)
            times[key] = line["mono"] - fault.started
        return times

    def evictions(self, begun: float, end: float) -> int:
        """Return the evictions between two times."""
        return sum(
            x["why"].count("evicted: ")
            for x in self.events
            if x["kind"] == "epoch" and begun < x["mono"] < end
        )
