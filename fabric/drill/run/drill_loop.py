"""The drill of a started job: warm up, play the schedule, gather the records."""

import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field

from fabric.audit.journal import RecordedRun, read_run
from fabric.drill.injection.drilled_processes import DrilledProcesses
from fabric.drill.injection.undo_guard import UndoGuard
from fabric.drill.judge.drill_record import DrillRecord, InjectedFault, RecoveryFacts, read_recoveries
from fabric.drill.run.journal_watch import JournalWatch
from fabric.drill.run.started_faults import DrillScene, play
from fabric.drill.run.started_job import JOB, JobOptions, StartedJob
from fabric.drill.run.status_poller import StatusPoller
from fabric.drill.schedule.drill_schedule import DrillSchedule, ScheduledFault
from fabric.errors import FabricError

# Each replica commits so many steps before the first fault, and after a fault before the next.
WARM_STEPS = 3
BACK_STEPS = 2
WARM_S = 300.0
BACK_S = 240.0


@dataclass
class DrillRun:
    """One drill of a job that it starts. ``say`` gets a sentence for each thing that happens."""

    options: JobOptions
    schedule: DrillSchedule
    say: Callable[[str], None]
    faults: list[InjectedFault] = field(default_factory=list)
    # The recovery records by id, read before each fault, because a fault may wipe the store.
    _recoveries: dict[object, object] = field(default_factory=dict)

    def run(self) -> DrillRecord:
        """Run the drill; return its records. Raises FabricError where the job or the drill cannot go on."""
        with StartedJob(self.options) as job, closing(UndoGuard()) as guard:
            watch = JournalWatch({name: job.journal(name) for name in job.replicas})
            scene = DrillScene(DrilledProcesses(JOB, job.processes.mark), watch, guard, job)
            urls = ", ".join(job.urls.values())
            self.say(f"the job runs; lighthouse: {urls} (token: {job.token_file})")
            self._wait(scene, WARM_S, "to warm up", _committed(scene, WARM_STEPS))
            poller = StatusPoller(job.client)
            with closing(poller):
                poller.start()
                self._play_all(scene)
                ended = time.time()
                recoveries = self._read_recoveries(job)
            is_over = job.is_over()
        for name, counts in watch.counts().items() if is_over else ():
            job.note("journal", replica=name, lines=counts)  # so that no journal can lose a line
        run = read_run(self.options.out)
        return DrillRecord(
            run=RecordedRun(run.journals, run.supervisor),
            ended=time.time() if is_over else ended,
            faults=tuple(self.faults),
            recoveries=recoveries,
            sightings=poller.sightings,
            headlines=poller.headlines,
            is_over=is_over,
        )

    def _play_all(self, scene: DrillScene) -> None:
        begun = time.monotonic()
        for number, fault in enumerate(self.schedule.faults, start=1):
            while not self._is_due(scene, fault, begun):
                scene.pause()
                if scene.job.is_over():
                    raise FabricError(
                        f"the job finished before fault {number} ({fault}): give it more steps, or a "
                        "shorter schedule"
                    )
            self._gather(scene.job)
            self.say(f"fault {number} of {len(self.schedule.faults)}: {fault}")
            played = play(scene, fault)
            self.faults += played
            for record in played:
                evidence = {"observed": record.observed, "undone": record.undone}
                scene.job.note("fault", record.began, fault=record.title, **evidence)
                self.say(f"  {record.title}: {record.observed or 'NO EFFECT SEEN'}; then {record.undone}")
            self._wait(scene, BACK_S, f"to be back after {fault}", _committed(scene, BACK_STEPS))
        while time.monotonic() - begun < self.schedule.least_s and not scene.job.is_over():
            scene.pause()

    @staticmethod
    def _is_due(scene: DrillScene, fault: ScheduledFault, begun: float) -> bool:
        if time.monotonic() - begun < fault.after_s:
            return False
        views = scene.watch.replicas
        steps = [views[fault.target].step] if fault.target else [view.step for view in views.values()]
        return fault.step is None or min(steps) >= fault.step

    def _wait(self, scene: DrillScene, within_s: float, what: str, condition: Callable[[], bool]) -> None:
        """Wait for ``condition``; after ``within_s`` go on, because the judge notices what is missing."""
        deadline = time.monotonic() + within_s
        while not condition() and not scene.job.is_over():
            scene.pause()
            if time.monotonic() > deadline:
                views = scene.watch.replicas.values()
                steps = ", ".join(f"{view.replica} at step {view.step}" for view in views)
                if what == "to warm up":
                    raise FabricError(f"the job took over {within_s:g} s {what} ({steps}): see its logs")
                self.say(f"  the replicas took over {within_s:g} s {what}: {steps}")
                return

    def _gather(self, job: StartedJob) -> str:
        """Read the recovery records of the lighthouse; return why that was impossible, or an empty string."""
        client = job.client
        try:
            entries = client.ask_lines(client.path("recoveries"))
        except FabricError as error:
            return str(error)
        self._recoveries |= {entry.get("id"): entry for entry in entries if isinstance(entry, dict)}
        return ""

    def _read_recoveries(self, job: StartedJob) -> tuple[RecoveryFacts, ...] | None:
        problem = self._gather(job)
        try:
            recoveries = read_recoveries(list(self._recoveries.values()))
        except FabricError as error:
            problem = str(error)
        if problem:
            self.say(f"the recovery records are not known: {problem}")
        return None if problem else recoveries


def _committed(scene: DrillScene, more: int) -> Callable[[], bool]:
    """Return whether each replica's living process has committed ``more`` steps from now on."""
    before = {name: view.total for name, view in scene.watch.replicas.items()}

    def have() -> bool:
        views = scene.watch.replicas.values()
        return all(
            (view.total - before[view.replica] >= more and view.commits >= more) or view.is_finished
            for view in views
        )

    return have
