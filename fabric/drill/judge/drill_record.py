"""All records of one drill: the journals, the faults, the recovery records, the drill's observations.

Times are Unix seconds.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.audit.journal import RecordedRun, RecoveryFacts
from fabric.model import Value

# After this fault the job begins again from the newest snapshot in memory.
WIPED = "wipe-store"


class InjectedFault(Struct):
    """One fault of a drill."""

    name: str  # the fault's name in the table of faults
    targets: tuple[str, ...] = ()  # the replicas that it hits; empty: it hits another process
    began: float = 0.0
    ended: float = 0.0  # when the drill had undone the fault; ``began`` for a fault that undoes itself
    about: str = ""  # the process that was hit, if it is not a replica's
    observed: str = ""  # the drill's evidence that the fault happened; empty: none
    undone: str = ""  # the drill's evidence that the fault is over; empty: none
    pids: dict[str, int] = field(default_factory=dict)  # by target: the process that the fault kills
    # Its cost, from the judge; None and empty where no record shows it.
    stall_s: float | None = None
    rejoined_s: Mapping[str, float] = field(default_factory=dict)  # by target; infinity: it never returned
    timeline: tuple[str, ...] = ()

    @property
    def kills(self) -> bool:
        return bool(self.pids)

    @property
    def title(self) -> str:
        """The name of this fault in a sentence."""
        about = ", ".join(self.targets) or self.about
        return f"{self.name} {about}" if about else self.name


class StepSighting(Value):
    """The lighthouse's status said at ``t`` that ``replica`` had the state of step ``step``."""

    t: float
    replica: str
    step: int


class HeadlineSighting(Value):
    """The first line of the lighthouse's status at ``t``."""

    t: float
    text: str


class DrillRecord(Value):
    """Everything that the judge reads."""

    run: RecordedRun
    ended: float  # the judge takes no line of a journal after this time
    faults: tuple[InjectedFault, ...] = ()
    recoveries: tuple[RecoveryFacts, ...] | None = None  # None: the lighthouse was not asked
    sightings: tuple[StepSighting, ...] = ()
    headlines: tuple[HeadlineSighting, ...] = ()
    is_over: bool = True  # whether the job has finished
    began: float = 0.0  # waits, ends and losses before this time are not the drill's

    def targets(self) -> set[str]:
        return {name for fault in self.faults for name in fault.targets}

    def evidence(self) -> RecordedRun:
        """Return the run up to ``ended``, with the kills of this drill as the supervisor's events."""
        journals = {
            name: replace(journal, lines=tuple(line for line in journal.lines if line.t <= self.ended))
            for name, journal in self.run.journals.items()
        }
        kills: list[Mapping[str, Any]] = [
            {"event": "kill", "t": fault.began, "replica": replica, "pid": pid}
            for fault in self.faults
            for replica, pid in fault.pids.items()
        ]
        return RecordedRun(journals, (*self.run.supervisor, *kills))
