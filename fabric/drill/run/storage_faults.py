"""Faults of storage: the control store is wiped, and the disk of the durable checkpoints is full."""

import errno
import os
import shutil
import signal
from functools import partial
from typing import Any

from fabric.drill.injection.drilled_processes import ProcessTarget
from fabric.drill.injection.small_disk import SmallDisk
from fabric.drill.run.active_fault import ActiveFault, DrillScene
from fabric.drill.schedule.drill_schedule import ScheduledFault
from fabric.errors import Refused
from fabric.runtime.local_job import wait_for


class WipeStore(ActiveFault):
    """SIGKILL to all etcd members, whose data is removed; at the fault's end they begin with nothing."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault) -> None:
        super().__init__(scene, fault)
        self.about = "the etcd cluster"
        self._processes: list[ProcessTarget] = []
        self._store_id, self._generation = "", 0

    def inject(self) -> None:
        job = self.scene.job
        self._store_id = _store_id(self.scene.status())
        self._generation = max(view.generation for view in self.scene.watch.replicas.values())
        # The job's life ends with its record, and processes of the old life may have to start again.
        self.targets = self.scene.replicas
        self._processes = [ProcessTarget(job.processes.pid_of(name)) for name in job.members.names]
        for process in self._processes:
            process.send(signal.SIGKILL)
        for name in job.members.names:
            wait_for(partial(self._has_ended, name), partial("{} does not end".format, name))
            shutil.rmtree(job.members.folder(name))

    def _has_ended(self, name: str) -> bool:
        return self.scene.job.processes.exit_code(name) is not None

    def seen(self) -> str:
        members = self.scene.job.members
        if not all(process.is_gone for process in self._processes):
            return ""
        if any(members.folder(name).exists() for name in members.names):
            return ""
        return f"{len(self._processes)} members are gone with their data"

    def end(self) -> None:
        members = self.scene.job.members
        if not self._processes:
            return
        members.start()
        for name in members.names:
            wait_for(partial(members.is_healthy, name), partial("{} is not healthy".format, name))

    def undone(self) -> str:
        store_id, views = _store_id(self.scene.status()), self.scene.watch.replicas.values()
        generation = min(view.generation for view in views)
        if store_id in ("", self._store_id) or generation <= self._generation:
            return ""
        return f"the job goes on in store {store_id} as generation {generation}"


class FullDisk(ActiveFault):
    """The file system of the durable checkpoints has no room left, until the fault's end."""

    def __init__(self, scene: DrillScene, fault: ScheduledFault) -> None:
        super().__init__(scene, fault)
        self.about = "the disk of the durable checkpoints"
        self._before = -1

    def inject(self) -> None:
        self._before = self._durable_step()
        self._disk.fill()

    def seen(self) -> str:
        failing = self.scene.status().get("durable_failing")
        reasons = (
            [f"{name} says: {why}" for name, why in failing.items()] if isinstance(failing, dict) else []
        )
        full = next((text for text in reasons if os.strerror(errno.ENOSPC) in text), "")
        if not full and self._disk.free_bytes:  # a checkpoint under way has failed, and left room
            self._disk.fill()
        return full[:200]

    def end(self) -> None:
        self._disk.empty()
        self._before = max(self._before, self._durable_step())

    def undone(self) -> str:
        step = self._durable_step()
        return f"there is room, and a durable checkpoint of step {step}" if step > self._before else ""

    @property
    def _disk(self) -> SmallDisk:
        disk = self.scene.job.disk
        if disk is None:
            raise Refused("the drill has mounted no file system for this job")
        return disk

    def _durable_step(self) -> int:
        durable = self.scene.status().get("durable")
        return int(durable.get("step", -1)) if isinstance(durable, dict) else -1


def _store_id(status: dict[str, Any]) -> str:
    store = status.get("store")
    return str(store.get("id") or "") if isinstance(store, dict) else ""
