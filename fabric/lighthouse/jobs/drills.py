"""The drill of a job, one at a time, with its faults and injectors. It lives in the leader's memory.

A drill lasts while it is renewed. Injectors ask for the faults in force. A fault that the answer no longer
names is undone, so a fault ends with its time, with its drill's end, and with this leader's end.
"""

import asyncio
import secrets
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Struct, field

from fabric.errors import Refused
from fabric.lighthouse.connections.validation import cleaned

LEASE_S = 10.0
MOST_SECONDS = 600.0
# An injector that has not asked for this time is gone with its trainer.
INJECTOR_S = 15.0
_MOST_FAULTS = 1000
_MOST_INJECTORS = 4096
_MAX_TEXT = 500
# An injector's request is kept open at most for this time.
MOST_WAIT_S = 10.0
# event kind, replica, sentence
Note = Callable[[str, str, str], object]


ShortText = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class InjectorRequest(msgspec.Struct):
    """The words of a trainer's injector, which allows drills; its newest request stands for it."""

    replica: Name
    id: Name  # names the injector's process; the next process of the replica has another one
    pid: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]  # the trainer
    host: ShortText  # names the kernel under the trainer
    restarts: bool  # whether a launcher starts the trainer again
    gone: bool = False  # its trainer has ended, and this is its last request
    wait_s: Annotated[float, msgspec.Meta(ge=0, le=MOST_WAIT_S)] = 0.0
    drill: ShortText = ""  # the drill that ``reports`` are about
    nonce: ShortText = ""  # the answer proves that its writer has heard it
    # The number of a fault -> what the injector has seen: observed, undone or problem, and the evidence.
    reports: Annotated[dict[str, dict[str, ShortText]], msgspec.Meta(max_length=1000)] = {}
    seen: float = 0.0  # monotonic seconds at which `Drills` heard it


class DrillFault(Struct):
    """One fault of a drill."""

    number: int
    name: str
    replica: str
    injector: str  # the id of the injector that may play it
    until: float  # monotonic seconds; the injector ends the fault at this time at the latest
    seconds: float
    point: str = ""
    observed: str = ""  # the injector's evidence that it happened
    undone: str = ""  # the injector's evidence that it is over
    problem: str = ""  # why the injector cannot play it
    is_ended: bool = False  # the drill has ended it

    def is_in_force(self, now: float) -> bool:
        """Whether the injector should play it at ``now``, monotonic seconds."""
        return now < self.until and not (self.is_ended or self.undone or self.problem)

    def as_json(self) -> dict[str, object]:
        shown = ("number", "replica", "injector", "seconds", "point", "observed", "undone", "problem")
        return {"fault": self.name} | {name: getattr(self, name) for name in shown}


class Drill(Struct):
    """One drill under way."""

    id: str
    who: str
    why: str
    renewed: float  # monotonic seconds
    faults: dict[int, DrillFault] = field(default_factory=dict)


class Drills:
    """The drill of one job, and its injectors. ``note`` adds an event to the job's log."""

    def __init__(self, job: str, note: Note, clock: Callable[[], float]) -> None:
        self._job, self._note, self._clock = job, note, clock
        self._drill: Drill | None = None
        self._injectors: dict[str, InjectorRequest] = {}
        self._changed = asyncio.Event()

    @property
    def injectors(self) -> Mapping[str, InjectorRequest]:
        """The injectors that have asked lately, by replica."""
        now = self._clock()
        return {name: x for name, x in self._injectors.items() if now - x.seen < INJECTOR_S}

    def begin(self, who: str, why: str, replicas: int, *, may_lose: bool) -> Drill:
        """Begin a drill of a job with ``replicas`` members. Raises Refused with one sentence."""
        self.look()
        if self._drill is not None:
            raise Refused(
                f"the drill {self._drill.id} of {self._drill.who} breaks job {self._job}: wait for its end"
            )
        injectors = self.injectors
        if not injectors:
            raise Refused(
                f"no trainer of job {self._job} allows a drill: start its trainers with "
                "FABRIC_DRILL=KEY-FILE, or with FABRIC_DRILL=1 and TLS"
            )
        mortal = sorted(name for name, x in injectors.items() if not x.restarts)
        if replicas < 2 and not may_lose:
            raise Refused(f"job {self._job} has one replica and may not survive a drill: give --yes-lose-it")
        if mortal and not may_lose:
            raise Refused(
                f"no launcher starts {mortal[0]} of job {self._job} again when it dies: start it with "
                "`fabric launch`, or give --yes-lose-it"
            )
        self._drill = Drill(f"d{secrets.token_hex(4)}", who, why, self._clock())
        self._note("drill began", "", f"drill {self._drill.id} by {who}: {why}")
        return self._drill

    def renew(self, drill_id: str) -> Drill:
        """Keep a drill for LEASE_S more. Raises Refused where it is over."""
        self.look()
        if self._drill is None or self._drill.id != drill_id:
            raise Refused(f"the drill {drill_id[:20]} of job {self._job} is over: begin another one")
        self._drill.renewed = self._clock()
        return self._drill

    def inject(self, drill_id: str, name: str, replica: str, seconds: float, point: str = "") -> DrillFault:
        """Order a fault. Raises Refused where the replica is gone or the drill is over."""
        drill = self.renew(drill_id)
        injector = self.injectors.get(replica)
        if injector is None:
            raise Refused(
                f"{replica} of job {self._job} is gone, or was not started for drills: no fault can hit it"
            )
        if len(drill.faults) >= _MOST_FAULTS:
            raise Refused(f"the drill {drill.id} has had {_MOST_FAULTS} faults: begin another one")
        seconds = min(seconds, MOST_SECONDS)
        # A fault of a moment stays in force until its evidence is there.
        until = self._clock() + (seconds or MOST_SECONDS)
        fault = DrillFault(len(drill.faults) + 1, name, replica, injector.id, until, seconds, point)
        drill.faults[fault.number] = fault
        self._note("drill fault", replica, f"drill {drill.id} of {drill.who}: {name} {replica}")
        self._wake()
        return fault

    def end(self, drill_id: str) -> None:
        """End a drill and all its faults. Raises Refused where it is over."""
        self._end(self.renew(drill_id), "its faults are over")

    def look(self) -> None:
        """End a drill that was not renewed."""
        drill = self._drill
        if drill is not None and self._clock() - drill.renewed > LEASE_S:
            self._end(drill, f"it was not renewed for {LEASE_S:g} s, and its faults are undone")

    def ask(self, injector: InjectorRequest) -> dict[str, Any]:
        """Take an injector's reports on the faults of its drill; return the faults in force for it."""
        self.look()
        injector.id, injector.host, injector.seen = (
            cleaned(injector.id),
            cleaned(injector.host),
            self._clock(),
        )
        before, drill = self._injectors.get(injector.replica), self._drill
        if not injector.gone and (before is not None or len(self._injectors) < _MOST_INJECTORS):
            self._injectors[injector.replica] = injector
        elif before is not None and before.id == injector.id:
            del self._injectors[injector.replica]
        if drill is None:
            return {"drill": "", "faults": []}
        own = [x for x in drill.faults.values() if x.injector == injector.id]
        for fault in own if drill.id == injector.drill else ():
            self._take(drill, fault, injector.reports.get(str(fault.number), {}))
        for fault in drill.faults.values():
            if fault.replica != injector.replica or fault.injector == injector.id or injector.gone:
                continue
            # Another process has taken the place of the one that the fault was for.
            if fault.observed and not fault.undone:
                self._take(drill, fault, {"undone": f"process {injector.pid} of {fault.replica} started"})
            elif not fault.observed and not fault.problem:
                self._take(drill, fault, {"problem": "its process was replaced before the fault happened"})
        return {"drill": drill.id, "faults": [x.as_json() for x in own if x.is_in_force(self._clock())]}

    def as_json(self) -> dict[str, Any]:
        """Return the drill under way with its faults, and the replicas that allow drills."""
        self.look()
        drill = self._drill
        return {
            "drill": drill.id if drill else "",
            "who": drill.who if drill else "",
            "why": drill.why if drill else "",
            "faults": [x.as_json() for x in drill.faults.values()] if drill else [],
            "injectors": [
                {"replica": x.replica, "pid": x.pid, "host": x.host, "restarts": x.restarts}
                for x in sorted(self.injectors.values(), key=lambda x: x.replica)
            ],
        }

    async def wait_changed(self, seconds: float) -> None:
        """Return when a fault is ordered or ended, or after ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        except TimeoutError:
            return

    def _take(self, drill: Drill, fault: DrillFault, report: Mapping[str, str]) -> None:
        for name in ("observed", "undone", "problem"):
            text = cleaned(report.get(name, ""))
            if text and not getattr(fault, name):
                setattr(fault, name, text)
                self._note(
                    f"drill {name}", fault.replica, f"drill {drill.id}: {fault.name} {fault.replica}: {text}"
                )

        if fault.observed and not fault.seconds:
            fault.is_ended = True

    def _end(self, drill: Drill, why: str) -> None:
        self._drill = None
        self._note("drill ended", "", f"drill {drill.id} of {drill.who}: {why}")
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
