"""The drill of a running job through the lighthouse: it orders faults, and reads what the lighthouse sees."""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from msgspec import Struct, convert
from msgspec.structs import replace

from fabric.audit.journal import RecordedRun, read_journals
from fabric.drill.judge.drill_record import DrillRecord, InjectedFault
from fabric.drill.run.drill_loop import BACK_STEPS, ScheduledDrill
from fabric.drill.run.started_faults import SEEN_S, UNDONE_S
from fabric.drill.schedule.drill_schedule import DrillSchedule, ScheduledFault
from fabric.drill.schedule.fault_table import FaultNeed, FaultScope
from fabric.errors import FabricError, Refused
from fabric.runtime.http.lighthouse_client import Lighthouses, understood
from fabric.runtime.system_calls import boot_id

# The lighthouse ends a drill that is not renewed for ten seconds.
_RENEW_S = 2.0
_POLL_S = 0.2


class DrilledReplica(Struct):
    """A replica that allows drills."""

    replica: str
    pid: int
    host: str


class RunningJob:
    """A job as the lighthouse shows it, and its drill. ``say`` gets a sentence for all that happens."""

    def __init__(self, client: Lighthouses, say: Callable[[str], None]) -> None:
        self._client, self._say = client, say
        self._drill = ""  # the name of the drill in progress

    def replicas(self) -> dict[str, DrilledReplica]:
        """Return the replicas that allow drills, by name. Raises FabricError."""
        answer = self._ask("drill")
        with understood("the lighthouse"):
            listed = convert(answer.get("injectors", []), list[DrilledReplica])
            return {x.replica: x for x in listed}

    def needs_met(self) -> frozenset[FaultNeed]:
        met = {FaultNeed.TRAINERS}
        return frozenset(met | ({FaultNeed.TWO_REPLICAS} if len(self.replicas()) > 2 else set()))

    def drill(
        self, schedule: DrillSchedule, who: str, why: str, *, may_lose: bool, journals: Path | None
    ) -> DrillRecord:
        """Play the schedule; return the records. ``journals``: a folder with those that this host can read.

        Raises FabricError where the drill cannot begin or go on.
        """
        self._check_hosts(schedule)
        pause = partial(time.sleep, _POLL_S)
        drill = ScheduledDrill(self._client, schedule, self._say, self._play, self._steps, self._back, pause)
        began = time.time()
        answer = self._ask("drill", body={"who": who, "why": why, "yes_lose_it": may_lose})
        with understood("the lighthouse"):
            self._drill = str(answer["drill"])
        self._say(f"drill {self._drill} of job {self._client.job}: see `fabric events`")
        over = threading.Event()
        renewing = threading.Thread(target=self._renew, args=(over,), name="fabric-drill-renew", daemon=True)
        renewing.start()
        try:
            record = drill.run()
        finally:
            over.set()
            renewing.join()
            with suppress(FabricError):  # the drill is over already
                self._ask("drill", "end", body={"drill": self._drill})
        read = {} if journals is None else read_journals(journals)
        if journals is not None and not read:
            self._say(f"{journals} holds no journal, so none is read")
        return replace(record, run=RecordedRun(read), began=began, ended=time.time())

    def _renew(self, over: threading.Event) -> None:
        while not over.wait(_RENEW_S):
            with suppress(FabricError):  # the next question about a fault says that the drill is over
                self._ask("drill", "renew", body={"drill": self._drill})

    def _fault(self, number: int) -> dict[str, Any]:
        """Return what is known of a fault of this drill. Raises Refused if the drill is over."""
        answer = self._ask("drill")
        if answer.get("drill") != self._drill:
            raise Refused(
                f"the drill {self._drill} is over before its time: another lighthouse leads, or it was not "
                "renewed; drill again"
            )
        with understood("the lighthouse"):
            return dict(answer["faults"][number - 1])

    def _steps(self) -> dict[str, int]:
        """Return the steps of the connected members that run; empty where no lighthouse answers."""
        with suppress(FabricError, TypeError, LookupError, ValueError):
            members = self._client.ask(self._client.path())["members"]
            running = [x for x in members if x.get("connected") and str(x.get("phase")).startswith("run")]
            return {str(x["replica"]): int(x["step"]) for x in running}
        return {}

    def _ask(self, *rest: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        answer = self._client.ask(self._client.path(*rest), body)
        if not isinstance(answer, dict):
            raise Refused("the lighthouse answered no drill: use a lighthouse of this version")
        return answer

    def _play(self, fault: ScheduledFault) -> list[InjectedFault]:
        replicas = self.replicas()
        targets = _targets(fault, tuple(sorted(replicas)))
        kind = "kill" if fault.fault in ("kill-two", "kill-all") else fault.fault
        began = time.time()
        order = {"drill": self._drill, "fault": kind, "point": fault.point, "seconds": fault.duration_s}
        answers = [self._ask("drill", "fault", body={**order, "replica": name}) for name in targets]
        with understood("the lighthouse"):
            numbers = [int(answer["faults"][-1]["number"]) for answer in answers]
        observed = self._evidence(numbers, "observed", max(SEEN_S, fault.duration_s))
        is_kill = kind == "kill"
        undone = self._evidence(numbers, "undone", fault.duration_s + UNDONE_S)
        return [
            InjectedFault(
                name=fault.fault,
                targets=targets,
                began=began,
                ended=max(began, min(time.time(), began + fault.duration_s)),
                observed=observed,
                undone=undone,
                pids={name: replicas[name].pid for name in targets if name in replicas} if is_kill else {},
            )
        ]

    def _back(self) -> Callable[[], bool]:
        names = set(self.replicas()) | set(self._steps())
        before = -1  # the job's step when all replicas ran again; after a cold start it may be a lower one

        def have() -> bool:
            nonlocal before
            steps = self._steps()
            if not names or not names <= set(steps):
                return False
            before = max(steps.values()) if before < 0 else before
            return min(steps.values()) >= before + BACK_STEPS

        return have

    def _evidence(self, numbers: list[int], name: str, within_s: float) -> str:
        """Wait for the evidence of all orders; return it, or an empty string. Raises Refused."""
        deadline = time.monotonic() + within_s
        while time.monotonic() < deadline:
            states = [self._fault(number) for number in numbers]
            if problem := next((str(x["problem"]) for x in states if x["problem"]), ""):
                raise Refused(f"{states[0]['fault']} {states[0]['replica']} cannot be played: {problem}")
            if all(x[name] for x in states):
                return "; ".join(str(x[name]) for x in states)
            time.sleep(_POLL_S)
        return ""

    def _check_hosts(self, schedule: DrillSchedule) -> None:
        """Raise Refused where a fault of a whole host would hit the drill's own."""
        replicas, own = self.replicas(), boot_id()
        for fault in schedule.faults:
            target = replicas.get(fault.target)
            if fault.kind.scope is FaultScope.REPLICA_HOST and target is not None and target.host == own:
                raise Refused(
                    f"{fault.fault} {fault.target} would hit this host, on which the drill itself runs: "
                    "drill from another host"
                )


def _targets(fault: ScheduledFault, names: tuple[str, ...]) -> tuple[str, ...]:
    """Return the replicas that the fault hits. Raises Refused where one is gone."""
    if fault.fault == "kill-all":
        return names
    if fault.fault == "kill-two" and fault.target in names:
        return fault.target, names[(names.index(fault.target) + 1) % len(names)]
    return (fault.target,)
