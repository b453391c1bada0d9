"""The drill of a job: play the schedule, gather the records. ``DrillRun`` starts the job that it drills."""

import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial

from msgspec import Struct, field
from msgspec.structs import replace

from fabric.audit.journal import RecordedRun, RecoveryFacts, read_recoveries, read_run
from fabric.drill.injection.drilled_processes import DrilledProcesses
from fabric.drill.injection.undo_guard import UndoGuard
from fabric.drill.judge.drill_record import (
    DrillRecord,
    HeadlineSighting,
    InjectedFault,
    StepSighting,
)
from fabric.drill.run.journal_watch import JournalWatch
from fabric.drill.run.started_faults import DrillScene, play
from fabric.drill.run.started_job import JobOptions, StartedJob
from fabric.drill.schedule.drill_schedule import DrillSchedule, ScheduledFault
from fabric.errors import FabricError
from fabric.model import Value
from fabric.runtime.http.lighthouse_client import Lighthouses

# Each replica commits so many steps after a fault before the next.
BACK_STEPS = 2
WARM_S = 300.0
BACK_S = 240.0
_ASK_EVERY_S = 1.0


class StatusPoller:
    """Asks for the job's status in a thread, up to ``close``: a stopped lighthouse answers late.

    ``sightings`` has the steps that the lighthouse named, ``headlines`` its first lines.
    """

    def __init__(self, client: Lighthouses) -> None:
        self._client = client
        self._over = threading.Event()
        self.sightings: list[StepSighting] = []
        self.headlines: list[HeadlineSighting] = []
        self._thread = threading.Thread(target=self._run, name="fabric-drill-status", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(timeout=10.0)

    def _run(self) -> None:
        while not self._over.wait(_ASK_EVERY_S):
            self._look()
        self._look()  # the last fault's replica may be back since the look before

    def _look(self) -> None:
        with suppress(FabricError):
            status = self._client.ask(self._client.path())
            now = time.time()
            if not isinstance(status, dict):
                return
            self.sightings += [
                StepSighting(now, str(x.get("replica")), x["step"])
                for x in status.get("members") or ()
                if isinstance(x, dict) and x.get("connected") and isinstance(x.get("step"), int)
            ]
            if isinstance(text := status.get("headline"), str):
                self.headlines.append(HeadlineSighting(now, text))


class ScheduledDrill(Struct):
    """Plays a schedule against a job. ``say`` gets a sentence for each thing that happens."""

    client: Lighthouses
    schedule: DrillSchedule
    say: Callable[[str], None]
    play: Callable[[ScheduledFault], list[InjectedFault]]
    steps: Callable[[], dict[str, int]]  # of the replicas, as far as they are known
    # Makes the condition that all replicas have committed BACK_STEPS more, counted from now.
    back: Callable[[], Callable[[], bool]]
    pause: Callable[[], None]
    is_over: Callable[[], bool] = lambda: False  # whether the job has finished
    # The recovery records by id, read before each fault, because a fault may wipe the store.
    _recoveries: dict[object, object] = field(default_factory=dict)

    def run(self) -> DrillRecord:
        """Play the schedule; return what is known without journals. Raises FabricError."""
        faults: list[InjectedFault] = []
        with closing(StatusPoller(self.client)) as poller:
            begun = time.monotonic()
            for number, fault in enumerate(self.schedule.faults, start=1):
                while not self._is_due(fault, begun):
                    self.pause()
                    if self.is_over():
                        raise FabricError(
                            f"the job finished before fault {number} ({fault}): give it more steps, or a "
                            "shorter schedule"
                        )
                self._gather()
                self.say(f"fault {number} of {len(self.schedule.faults)}: {fault}")
                played = self.play(fault)
                faults += played
                for record in played:
                    self.say(f"  {record.title}: {record.observed or 'NO EFFECT SEEN'}; then {record.undone}")
                # After a late replica the drill goes on, because the judge notices what is missing.
                if late := self.wait(BACK_S, self.back()):
                    self.say(f"  the replicas took over {BACK_S:g} s to be back after {fault}: {late}")
            while time.monotonic() - begun < self.schedule.least_s and not self.is_over():
                self.pause()
            ended, recoveries = time.time(), self._read_recoveries()
        return DrillRecord(
            run=RecordedRun({}),
            ended=ended,
            faults=tuple(faults),
            recoveries=recoveries,
            sightings=tuple(poller.sightings),
            headlines=tuple(poller.headlines),
            is_over=self.is_over(),
        )

    def wait(self, within_s: float, condition: Callable[[], bool]) -> str:
        """Wait for ``condition`` or the job's end; return the steps where that takes too long."""
        deadline = time.monotonic() + within_s
        while not condition() and not self.is_over():
            self.pause()
            if time.monotonic() > deadline:
                return (
                    ", ".join(f"{name} at step {step}" for name, step in self.steps().items()) or "no steps"
                )
        return ""

    def _is_due(self, fault: ScheduledFault, begun: float) -> bool:
        if time.monotonic() - begun < fault.after_s:
            return False
        if fault.step is None:
            return True
        steps = self.steps()
        wanted = [steps.get(fault.target, -1)] if fault.target else list(steps.values())
        return min(wanted, default=-1) >= fault.step

    def _gather(self) -> str:
        """Read the recovery records of the lighthouse; return why that was impossible, or an empty string."""
        try:
            entries = self.client.ask_lines(self.client.path("recoveries"))
        except FabricError as error:
            return str(error)
        self._recoveries |= {entry.get("id"): entry for entry in entries if isinstance(entry, dict)}
        return ""

    def _read_recoveries(self) -> tuple[RecoveryFacts, ...] | None:
        problem = self._gather()
        try:
            recoveries = read_recoveries(list(self._recoveries.values()))
        except FabricError as error:
            problem = str(error)
        if problem:
            self.say(f"the recovery records are not known: {problem}")
        return None if problem else recoveries


class DrillRun(Value):
    """One drill of a job that it starts."""

    options: JobOptions
    schedule: DrillSchedule
    say: Callable[[str], None]
    follow: Callable[[JournalWatch, list[str]], None] = lambda *_: None  # hears what the journals tell

    def run(self) -> DrillRecord:
        """Run the drill; return its records. Raises FabricError where the job or the drill cannot go on."""
        with StartedJob(self.options) as job, closing(UndoGuard()) as guard:
            watch = JournalWatch({name: job.journal(name) for name in job.replicas}, self.follow)
            scene = DrillScene(DrilledProcesses(job.name, job.processes.mark), watch, guard, job)
            for sentence in job.ways_in():
                self.say(sentence)
            drill = ScheduledDrill(
                job.client,
                self.schedule,
                self.say,
                play=partial(_play, scene),
                steps=lambda: {name: view.step for name, view in watch.replicas.items()},
                back=partial(_committed, watch, BACK_STEPS),
                pause=scene.pause,
                is_over=job.is_over,
            )
            if cold := drill.wait(WARM_S, _committed(watch, self.schedule.warm_steps)):
                raise FabricError(f"the job took over {WARM_S:g} s to warm up ({cold}): see its logs")
            record = drill.run()
        for name, counts in watch.counts().items() if record.is_over else ():
            job.note("journal", replica=name, lines=counts)  # so that no journal can lose a line
        ended = time.time() if record.is_over else record.ended
        return replace(record, run=read_run(self.options.out), ended=ended)


def _play(scene: DrillScene, fault: ScheduledFault) -> list[InjectedFault]:
    """Play a fault, and note it in the job's records."""
    played = play(scene, fault)
    for record in played:
        evidence = {"observed": record.observed, "undone": record.undone}
        scene.job.note("fault", record.began, fault=record.title, **evidence)
        for replica, pid in record.pids.items():
            scene.job.note("kill", record.began, replica=replica, pid=pid)
    return played


def _committed(watch: JournalWatch, more: int) -> Callable[[], bool]:
    """Return whether each replica's living process has committed ``more`` steps from now on."""
    before = {name: view.total for name, view in watch.replicas.items()}

    def have() -> bool:
        return all(
            (view.total - before[view.replica] >= more and view.commits >= more) or view.is_finished
            for view in watch.replicas.values()
        )

    return have
