"""Makes the fault that an entry of the schedule names."""

from collections.abc import Callable

from fabric.drill.injection.drilled_processes import ProcessTarget
from fabric.drill.run.active_fault import ActiveFault, DrillScene
from fabric.drill.run.link_faults import LinkFault
from fabric.drill.run.point_faults import PointFault
from fabric.drill.run.process_faults import (
    KillJoining,
    KillRecovering,
    KillServer,
    KillTrainers,
    SlowProcess,
    StopProcess,
)
from fabric.drill.run.service_faults import KillService, MemoryBallast, leading_lighthouse
from fabric.drill.run.storage_faults import FullDisk, WipeStore
from fabric.drill.run.trainer_faults import FlipSnapshots, KillMicroBatch, TrainerFault
from fabric.drill.schedule.drill_schedule import ScheduledFault

_LINKS = ("cut-peers", "cut-in", "cut-lighthouse", "slow-link", "lossy-link", "flip-payload")


def make_fault(scene: DrillScene, fault: ScheduledFault) -> ActiveFault:
    """Return the fault, not yet injected."""
    name = fault.fault
    if name in _LINKS:
        return LinkFault(scene, fault)
    makers: dict[str, Callable[[], ActiveFault]] = {
        "kill": lambda: (
            PointFault(scene, fault, "kill") if fault.point else KillTrainers(scene, fault, (fault.target,))
        ),
        "hang": lambda: PointFault(scene, fault, "hold"),
        "kill-two": lambda: KillTrainers(scene, fault, _pair(scene, fault.target)),
        "kill-all": lambda: KillTrainers(scene, fault, scene.replicas),
        "kill-joining": lambda: KillJoining(scene, fault, (fault.target,)),
        "kill-recovering": lambda: KillRecovering(scene, fault, _pair(scene, fault.target)),
        "stop": lambda: StopProcess(scene, fault, _trainer(scene, fault.target), fault.target),
        "slow": lambda: SlowProcess(scene, fault, _trainer(scene, fault.target), fault.target),
        "kill-server": lambda: KillServer(scene, fault),
        "kill-lighthouse": lambda: KillService(scene, fault, lambda: leading_lighthouse(scene.job)),
        "kill-follower": lambda: KillService(
            scene, fault, lambda: leading_lighthouse(scene.job, leads=False)
        ),
        "stop-lighthouse": lambda: StopProcess(
            scene, fault, lambda: _service(scene, leading_lighthouse(scene.job))
        ),
        "kill-store": lambda: KillService(scene, fault, lambda: _member(scene, fault)),
        "stop-store": lambda: StopProcess(scene, fault, lambda: _service(scene, _member(scene, fault))),
        "wipe-store": lambda: WipeStore(scene, fault),
        "disk-full": lambda: FullDisk(scene, fault),
        "flip-gradient": lambda: TrainerFault(scene, fault, "flip", "gather"),
        "poison": lambda: TrainerFault(scene, fault, "nan", "gather"),
        "clock": lambda: TrainerFault(scene, fault, "leap", "clock"),
        "kill-micro-batch": lambda: KillMicroBatch(scene, fault),
        "flip-snapshot": lambda: FlipSnapshots(scene, fault),
        "memory": lambda: MemoryBallast(scene, fault),
    }
    return makers[name]()


def _pair(scene: DrillScene, first: str) -> tuple[str, str]:
    """Return ``first`` and the replica after it."""
    names = scene.replicas
    return first, names[(names.index(first) + 1) % len(names)]


def _member(scene: DrillScene, fault: ScheduledFault) -> str:
    """Choose an etcd member by the fault's time: the same schedule hits the same members again."""
    names = scene.job.members.names
    return names[int(fault.after_s * 1000) % len(names)]


def _trainer(scene: DrillScene, replica: str) -> Callable[[], ProcessTarget]:
    return lambda: scene.processes.trainer(replica)


def _service(scene: DrillScene, name: str) -> ProcessTarget:
    return ProcessTarget(scene.job.processes.pid_of(name))
