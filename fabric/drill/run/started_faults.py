"""Plays the faults of a job that the drill has started: its trainers, links, services, storage and memory."""

import contextlib
import errno
import json
import os
import shutil
import signal
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from fabric.drill.injection.drilled_processes import DrilledProcesses, ProcessTarget
from fabric.drill.injection.played_faults import (
    PLAYERS,
    Evidence,
    PlayedFault,
    Script,
    SentOrder,
    always,
    continued,
    gone,
    kill,
    order_of,
    stop_process,
)
from fabric.drill.injection.undo_guard import UndoGuard
from fabric.drill.judge.drill_record import InjectedFault
from fabric.drill.run.journal_watch import JournalWatch
from fabric.drill.run.started_job import StartedJob
from fabric.drill.schedule.drill_schedule import ScheduledFault
from fabric.errors import FabricError, Refused
from fabric.model import Value
from fabric.runtime.drill_orders import PointOrder
from fabric.runtime.local_job import POLL_S, wait_for

# The drill waits so long for the evidence that a fault happened, and for the evidence of its end.
SEEN_S = 120.0
UNDONE_S = 240.0
_RESET_EVERY_S = 0.5
# Two deaths at one micro-batch are poison.
_DEATHS = 2
# The deadly micro-batch is of a step so far ahead; the number doubles while the job is faster than the drill.
_STEPS_AHEAD = 5
# A trainer has two slots for its snapshots. With so many flipped ones, it serves no other.
_FLIPPED = 2


class DrillScene(Value):
    """Everything that a fault may touch."""

    processes: DrilledProcesses
    watch: JournalWatch
    guard: UndoGuard
    job: StartedJob

    @property
    def replicas(self) -> tuple[str, ...]:
        return tuple(self.watch.replicas)

    def status(self) -> dict[str, Any]:
        """Return the lighthouse's status of the job; empty where no lighthouse answers."""
        client = self.job.client
        with contextlib.suppress(FabricError):
            status = client.ask(client.path())
            return status if isinstance(status, dict) else {}
        return {}

    def pause(self) -> None:
        """Wait a moment, then read the journals. Raises FabricError if a launcher has failed."""
        time.sleep(POLL_S)
        self.watch.look()
        self.job.is_over()

    @property
    def drill(self) -> str:
        return self.job.folder.name[:64]

    def run_dir(self, replica: str) -> Path:
        return self.job.run_dir(replica)

    def service(self, name: str) -> ProcessTarget:
        return ProcessTarget(self.job.processes.pid_of(name))

    def restarted(self, names: Sequence[str]) -> Evidence:
        """Return the evidence, from now on, that each of the replicas has another process."""
        views = [self.watch.replicas[name] for name in names]
        starts = [view.starts for view in views]

        def evidence() -> str:
            if any(view.starts <= before for view, before in zip(views, starts, strict=True)):
                return ""
            return "; ".join(f"process {view.pid} of {view.replica} started" for view in views)

        return evidence


T = TypeVar("T")
Player = Callable[[DrillScene, PlayedFault, ScheduledFault], Script]


def play(scene: DrillScene, wanted: ScheduledFault) -> list[InjectedFault]:
    """Play one fault from its beginning to the evidence of its end; return the records of what happened.

    Raises FabricError where the target is gone or the job has failed.
    """
    fault = PlayedFault(wanted.fault)
    fault.script = SCRIPTS[wanted.fault](scene, fault, wanted)
    began = time.time()
    deadline = time.monotonic() + max(SEEN_S, wanted.duration_s)
    until = time.monotonic() + wanted.duration_s
    try:
        while time.monotonic() < until or (not fault.observed and time.monotonic() < deadline):
            fault.look()
            for name in fault.pids:
                scene.watch.replicas[name].phase = "killed"
            if fault.observed and time.monotonic() >= until:
                break
            scene.pause()
    finally:
        fault.end()
    ended = time.time()
    fault.began = fault.began or began
    deadline = time.monotonic() + UNDONE_S
    while not fault.undone and time.monotonic() < deadline:
        scene.pause()
        fault.look()
    fault.ended = ended if wanted.duration_s else fault.began
    return [*fault.earlier, fault]


# --- trainers -----------------------------------------------------------------------------------------


def _kill_joining(scene: DrillScene, fault: PlayedFault, wanted: ScheduledFault) -> Script:
    """SIGKILL to a trainer, and to its next process before that process has committed a step."""
    name = wanted.target
    view, process = scene.watch.replicas[name], scene.processes.trainer(name)
    starts, is_next = view.starts, False
    fault.targets, fault.pids = (name,), {name: process.pid}
    fault.began = time.time()
    process.send(signal.SIGKILL)
    while not fault.is_ended:
        evidence = ""
        if not is_next and view.starts > starts:
            fault.earlier.append(_death(name, fault.pids[name], fault.began))
            fault.earlier[-1].undone = f"process {view.pid} of {name} started"
            process, is_next = ProcessTarget(view.pid), True
            fault.began = time.time()
            process.send(signal.SIGKILL)
        elif is_next and process.is_gone:
            scene.watch.look()
            if view.pid == process.pid and not view.commits:
                evidence = f"process {view.pid} of {name} is gone, and its journal has no commit"
            else:
                # The process had joined already: this death counts as a kill, and its next process is due.
                starts = view.starts - (view.pid != process.pid)
                fault.pids, is_next = {name: process.pid}, False
        yield evidence
    if is_next:
        starts, fault.pids = starts + 1, {name: process.pid}
    yield from always(lambda: f"process {view.pid} of {name} started" if view.starts > starts else "")


def kill_recovering(scene: DrillScene, fault: PlayedFault, names: tuple[str, str]) -> Script:
    """SIGKILL to a second trainer while the others recover from the death of the first.

    The second trainer is stopped before the first dies. No recovery ends without its report, so the second
    kill surely hits a recovery.
    """
    processes, restarted = {name: scene.processes.trainer(name) for name in names}, scene.restarted(names)
    first, second = processes.values()
    fault.targets = names[1:]
    with continued(second, scene.guard):
        second.send(signal.SIGSTOP)
        scene.watch.look()
        survivors = {name: view for name, view in scene.watch.replicas.items() if name not in names}
        unrest = {name: view.unrest for name, view in survivors.items()}
        fault.earlier.append(_death(names[0], first.pid, time.time()))
        first.send(signal.SIGKILL)
        shaken: dict[str, float] = {}  # by survivor: when it heard of the first death
        while not (shaken or fault.is_ended):
            shaken = {n: view.unrest_t for n, view in survivors.items() if view.unrest > unrest[n]}
            if shaken:
                fault.pids, fault.began = {names[1]: second.pid}, time.time()
                second.send(signal.SIGKILL)
            yield ""
        while not fault.is_ended:
            # The journals tell, also when the recovery has ended meanwhile.
            recovers = [
                n
                for n, t in shaken.items()
                if not any(t < x <= fault.began for x in survivors[n].commit_times)
            ]
            are_gone = recovers and gone(processes)
            yield (
                f"process {second.pid} of {names[1]} is gone while {recovers[0]} recovers" if are_gone else ""
            )
    while True:
        fault.earlier[0].undone = restarted()
        yield fault.earlier[0].undone


def _kill_micro_batch(scene: DrillScene, fault: PlayedFault, wanted: ScheduledFault) -> Script:
    """Micro-batch 0 of one step kills each trainer that computes it, until the lighthouse calls it poison."""
    names = scene.replicas
    processes, ahead, deadly = {name: scene.processes.trainer(name) for name in names}, _STEPS_AHEAD, -1
    restarted = {name: scene.restarted((name,)) for name in names}
    sent: list[SentOrder] = []
    while not fault.is_ended:
        dead = {name: process for name, process in processes.items() if process.is_gone}
        newest = max(view.step for view in scene.watch.replicas.values())
        if not dead and newest > deadly:
            for order in sent:
                order.close()
            deadly, ahead = newest + ahead, 2 * ahead
            at = PointOrder(scene.drill, "forward", "kill", step=deadly, micro_batch=0)
            sent = [SentOrder(scene.job.run_dir(name), at) for name in names]
        if len(dead) >= _DEATHS:
            fault.began = fault.began or time.time()
            fault.targets, fault.pids = tuple(dead), {name: process.pid for name, process in dead.items()}
        yield f"{gone(dead)}, both at micro-batch 0 of step {deadly}" if fault.pids else ""
    for order in sent:
        order.close()
    while True:
        texts = [restarted[name]() for name in fault.targets]
        yield "; ".join(texts) if all(texts) else ""


def _flip_snapshots(scene: DrillScene, fault: PlayedFault, wanted: ScheduledFault) -> Script:
    """A bit flips in all snapshots in memory, and the target dies: its next process must refuse them."""
    name, order = wanted.target, order_of(scene, wanted, "flip", "publish")
    sent = {replica: SentOrder(scene.job.run_dir(replica), order) for replica in scene.replicas}

    def look() -> None:
        for flip in sent.values():
            flip.look()

    death: Script = iter(())
    try:
        while not fault.is_ended and not all(flip.hits >= _FLIPPED for flip in sent.values()):
            look()
            yield ""
        death = kill(scene, fault, (name,)) if not fault.is_ended else death
        while not fault.is_ended:
            look()
            died, refusal = next(death), scene.watch.replicas[name].refusal
            # Only wrong bytes are evidence: a source may also have dropped the snapshot that was asked for.
            is_seen = died and "wrong bytes" in refusal
            yield f"{died}; its next process refused: {refusal}" if is_seen else ""
    finally:
        for flip in sent.values():
            flip.end()
    while True:
        with contextlib.suppress(FabricError):
            look()
        back = next(death, "")
        are_whole = all(flip.is_over for replica, flip in sent.items() if replica != name)
        yield f"{back}; later snapshots are whole" if back and are_whole else ""


def _death(name: str, pid: int, began: float) -> PlayedFault:
    """Return the kill of a trainer that another fault has played before its own."""
    return PlayedFault(
        "kill", (name,), began, began, observed=f"process {pid} of {name} is gone", pids={name: pid}
    )


def _pair(scene: DrillScene, wanted: ScheduledFault) -> tuple[str, str]:
    """Return the target and the replica after it."""
    names, first = scene.replicas, wanted.target
    return first, names[(names.index(first) + 1) % len(names)]


# --- links --------------------------------------------------------------------------------------------

# By fault: the relay's weather, the weather's count of what it did, and that in words.
_LINKS: Mapping[str, tuple[Mapping[str, object], str, str]] = {
    "cut-peers": ({"holds_to": True, "holds_from": True}, "held", "held {} pieces"),
    "cut-in": ({"holds_to": True}, "held", "held {} pieces"),
    "cut-lighthouse": ({"holds_to": True, "holds_from": True}, "held", "held {} pieces"),
    "slow-link": ({"delay_s": 0.05}, "delayed", "delayed {} pieces"),
    "lossy-link": ({}, "reset", "reset {} connections"),
    "flip-payload": ({"flips": True}, "flipped", "flipped {} bits"),
}


def _break_link(scene: DrillScene, fault: PlayedFault, wanted: ScheduledFault) -> Script:
    """The relay in front of the replica, or in front of its lighthouse, plays the fault."""
    fault.targets = (wanted.target,)
    relays = scene.job.lighthouse_relays if wanted.fault == "cut-lighthouse" else scene.job.relays
    relay = relays[wanted.target]
    changes, count, words = _LINKS[wanted.fault]
    before, reset_at = getattr(relay.weather, count), 0.0
    for name, value in changes.items():
        setattr(relay.weather, name, value)
    try:
        while not fault.is_ended:
            if wanted.fault == "lossy-link" and time.monotonic() - reset_at >= _RESET_EVERY_S:
                reset_at = time.monotonic()
                relay.reset_one()
            done = getattr(relay.weather, count) - before
            yield f"the relay {words.format(done)}" if done else ""
    finally:
        relay.weather.clear()
    yield from always(lambda: "the relay forwards again")


# --- services, storage and memory ---------------------------------------------------------------------


def _stop_service(scene: DrillScene, fault: PlayedFault, name: str) -> Script:
    process = scene.service(name)
    fault.about = f"process {process.pid}"
    return stop_process(fault, process, scene.guard)


def _kill_service(scene: DrillScene, fault: PlayedFault, name: str) -> Script:
    """SIGKILL to a service; at the fault's end the drill starts the service again."""
    job, process = scene.job, scene.service(name)
    fault.about = name
    process.send(signal.SIGKILL)
    yield from fault.until_end(lambda: f"process {process.pid} is gone" if process.is_gone else "")
    if name in job.members.names:
        job.members.start_member(name)
        wait_for(partial(job.members.is_healthy, name), lambda: f"{name} is not healthy")
    else:
        job.start_lighthouse(name)
    yield from always(lambda: f"{name} answers, process {job.processes.pid_of(name)}")


def _wipe_store(scene: DrillScene, fault: PlayedFault, wanted: ScheduledFault) -> Script:
    """SIGKILL to all etcd members, whose data is removed; at the fault's end they begin with nothing."""
    job, members, views = scene.job, scene.job.members, scene.watch.replicas.values()
    fault.about = "the etcd cluster"
    old_id, old_generation = _store_id(scene.status()), max(view.generation for view in views)
    # The job's life ends with its record, and processes of the old life may have to start again.
    fault.targets = scene.replicas
    processes = [scene.service(name) for name in members.names]

    def has_ended(name: str) -> bool:
        return job.processes.exit_code(name) is not None

    def are_wiped() -> str:
        is_left = any(members.folder(name).exists() for name in members.names)
        are_gone = all(process.is_gone for process in processes)
        return f"{len(processes)} members are gone with their data" if are_gone and not is_left else ""

    for process in processes:
        process.send(signal.SIGKILL)
    for name in members.names:
        wait_for(partial(has_ended, name), partial("{} does not end".format, name))
        shutil.rmtree(members.folder(name))
    yield from fault.until_end(are_wiped)
    members.start()
    for name in members.names:
        wait_for(partial(members.is_healthy, name), partial("{} is not healthy".format, name))
    while True:
        store_id, generation = _store_id(scene.status()), min(view.generation for view in views)
        is_new = store_id not in ("", old_id) and generation > old_generation
        yield f"the job goes on in store {store_id} as generation {generation}" if is_new else ""


def _fill_disk(scene: DrillScene, fault: PlayedFault, wanted: ScheduledFault) -> Script:
    """The file system of the durable checkpoints has no room left, until the fault's end."""
    disk = scene.job.disk
    if disk is None:
        raise Refused("the drill has mounted no file system for this job")
    fault.about = "the disk of the durable checkpoints"
    before = _durable_step(scene)
    disk.fill()
    while not fault.is_ended:
        failing = scene.status().get("durable_failing")
        reasons = failing.items() if isinstance(failing, dict) else ()
        full = [f"{name} says: {why}" for name, why in reasons if os.strerror(errno.ENOSPC) in str(why)]
        if not full and disk.free_bytes:  # a checkpoint under way has failed, and left room
            disk.fill()
        yield full[0][:200] if full else ""
    disk.empty()
    before = max(before, _durable_step(scene))
    while True:
        step = _durable_step(scene)
        yield f"there is room, and a durable checkpoint of step {step}" if step > before else ""


def leading_lighthouse(job: StartedJob, *, leads: bool = True) -> str:
    """Return the name of the lighthouse that leads, or of one that does not. Raises Refused."""
    for name, url in job.urls.items():
        with contextlib.suppress(urllib.error.URLError, OSError, ValueError):
            with urllib.request.urlopen(f"{url}/healthz", timeout=2.0) as answer:  # noqa: S310  (ours)
                is_leader = bool(json.loads(answer.read(1 << 16)).get("is_leader"))
            if is_leader is leads:
                return name
    what = "leads" if leads else "follows"
    raise Refused(f"no lighthouse of this drill {what} now: wait for the election")


def _member(scene: DrillScene, wanted: ScheduledFault) -> str:
    """Choose an etcd member by the fault's time: the same schedule hits the same members again."""
    names = scene.job.members.names
    return names[int(wanted.after_s * 1000) % len(names)]


def _durable_step(scene: DrillScene) -> int:
    durable = scene.status().get("durable")
    return int(durable.get("step", -1)) if isinstance(durable, dict) else -1


def _store_id(status: dict[str, Any]) -> str:
    store = status.get("store")
    return str(store.get("id") or "") if isinstance(store, dict) else ""


def _on(
    player: Callable[[DrillScene, PlayedFault, T], Script], choose: Callable[[DrillScene, ScheduledFault], T]
) -> Player:
    """Return what plays a fault on the replicas, or on the service, that ``choose`` names."""
    return lambda scene, fault, wanted: player(scene, fault, choose(scene, wanted))


# Each fault of the table, and what plays it.
SCRIPTS: Mapping[str, Player] = {
    **PLAYERS,
    "kill-two": _on(kill, _pair),
    "kill-all": _on(kill, lambda scene, _: scene.replicas),
    "kill-recovering": _on(kill_recovering, _pair),
    "kill-joining": _kill_joining,
    "kill-lighthouse": _on(_kill_service, lambda scene, _: leading_lighthouse(scene.job)),
    "kill-follower": _on(_kill_service, lambda scene, _: leading_lighthouse(scene.job, leads=False)),
    "stop-lighthouse": _on(_stop_service, lambda scene, _: leading_lighthouse(scene.job)),
    "kill-store": _on(_kill_service, _member),
    "stop-store": _on(_stop_service, _member),
    **dict.fromkeys(_LINKS, _break_link),
    "wipe-store": _wipe_store,
    "disk-full": _fill_disk,
    "kill-micro-batch": _kill_micro_batch,
    "flip-snapshot": _flip_snapshots,
}
