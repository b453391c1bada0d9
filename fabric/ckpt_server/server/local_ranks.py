"""The ranks of one replica whose trainers run on this host: one server process keeps them all.

A rank begins with its first trainer. The server keeps its memory until its lifetime ends, then lets it go
alone. The process ends with its last rank.
"""

import asyncio
import contextlib
import logging
import secrets
import time
from typing import Any

from fabric.ckpt_server.server.debug_probe import DebugProbe, EpochLog
from fabric.ckpt_server.server.durable_jobs import DurableJobs
from fabric.ckpt_server.server.slots import SNAPSHOT, SlotTable
from fabric.ckpt_server.server.trainer_status import StatusSender
from fabric.ckpt_server.server.trainer_watch import (
    FIRST_TRAINER_S,
    LOOK_S,
    CrashLog,
    Lifetime,
    TrainerWatch,
)
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.errors import Refused
from fabric.protocol.messages.network import EpochNotice, ServerStatus, TrainerStatus
from fabric.runtime.guarded_processes import LauncherWatch
from fabric.runtime.private_folder import rank_folder

log = logging.getLogger(__name__)

# How long a rank stays after the lighthouse has stored the job's end that this server reported.
JOB_END_STORED_S = 5.0


class LocalRank:
    """One rank: its memory, the watch on its trainer, its writer. ``url``: where readers find its state.
    ``instance`` differs between two objects of one rank, also in two processes."""

    def __init__(self, settings: ServerSettings, number: int, url: str, changed: asyncio.Event) -> None:
        self.number = number
        self.url = f"{url}/ranks/{number}" if number else url
        self.instance = secrets.token_hex(8)
        self.slots = SlotTable()
        self.trainer = TrainerWatch(changed)
        self.durable = DurableJobs(self.slots, number)
        self.probe = DebugProbe(rank_folder(settings.run_dir, number), self.trainer)
        self.lifetime = Lifetime(settings.orphan_s)
        self._replica = settings.replica
        self._crash_log = CrashLog(self.slots, self.trainer)

    def status(self, number: int) -> TrainerStatus:
        state, held, now = self.trainer.state, self.slots.contents(SNAPSHOT), time.monotonic()
        newest = self.durable.newest
        return TrainerStatus(
            replica=self._replica,
            incarnation=self.trainer.incarnation,
            trainer=state,
            number=number,
            ckpt=self.url + (f"#{self.number}" if self.number else ""),
            snapshots=tuple(content.ref for content in held),
            deaths=self._crash_log.seen(state),
            rank=self.number,
            ages_s=tuple(round(now - content.taken, 3) for content in held),
            durable=(newest,) if newest is not None else (),
            durable_error=self.durable.error,
            parts=tuple(content.parts for content in held),
            ended=self.trainer.ended,
        )


class LocalRanks:
    """All ranks of this server: ``held`` by number; ``ended`` is set once none is left.

    ``url`` is the server's own; ``changed`` is set when the state of a trainer may have changed.
    """

    def __init__(self, settings: ServerSettings, url: str = "") -> None:
        self.url = url
        self.held: dict[int, LocalRank] = {}
        self.changed = asyncio.Event()
        self.ended = asyncio.Event()
        self.reason = ""  # why the last rank has ended
        self.epoch_log = EpochLog()
        self.launchers = LauncherWatch()
        self.status_sender: StatusSender | None = None  # reports to the lighthouse, if any
        self.settings = settings
        self._group: asyncio.TaskGroup | None = None
        self._leaving: set[int] = set()  # ranks whose memory is being released

    def begin(self, group: asyncio.TaskGroup) -> None:
        """Keep ranks in tasks of ``group``, and make room for the rank that the settings name."""
        self._group = group
        self.take(self.settings.rank)

    def take(self, number: int) -> LocalRank:
        """Return this rank; begin it if it is new. Raises ConnectionAbortedError while it, or the server,
        ends: the trainer attaches again soon."""
        rank = self.held.get(number)
        if rank is None:
            if self._group is None or self.ended.is_set() or number in self._leaving:
                raise ConnectionAbortedError("the checkpoint server lets this rank go")
            rank = self.held[number] = LocalRank(self.settings, number, self.url, self.changed)
            rank.lifetime.trainer_left(FIRST_TRAINER_S)
            self.epoch_log.watch(rank.trainer, number)
            self._group.create_task(self._keep(rank))
        return rank

    async def watch(self) -> None:
        """Look at the trainers of all ranks every LOOK_S, until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            for rank in self.held.values():
                rank.trainer.look()

    async def _keep(self, rank: LocalRank) -> None:
        """Wait until the lifetime and the writer's work have ended; then release the memory."""
        tasks: list[asyncio.Task[Any]] = []
        try:
            await rank.lifetime.ended.wait()
            self.reason = rank.lifetime.reason
            log.info("the memory of rank %d ends: %s", rank.number, self.reason)
            tasks.append(asyncio.create_task(rank.durable.finish()))
            tasks.append(asyncio.create_task(rank.lifetime.at_once.wait()))
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            del self.held[rank.number]
            self._leaving.add(rank.number)
            (self.changed if self.held else self.ended).set()
            rank.trainer.hang_up()
            rank.trainer.close()
            await rank.durable.close()
            with contextlib.suppress(Refused):
                await rank.slots.void()
            await asyncio.to_thread(rank.slots.close)
            self._leaving.discard(rank.number)

    def compose(self, number: int) -> TrainerStatus | ServerStatus:
        """Compose status message ``number``, about all ranks."""
        statuses = tuple(rank.status(number) for rank in self.held.values())
        return statuses[0] if len(statuses) == 1 else ServerStatus(statuses)

    def hear(self, notice: EpochNotice) -> None:
        """Take an epoch notice. A rank that has reported the job's end stays until that is stored."""
        incarnations = [x.trainer.incarnation for x in self.held.values()]
        self.epoch_log.record(notice, max(incarnations, default=0))
        for rank in self.held.values():
            if notice.complete and rank.trainer.ended is not None:
                rank.lifetime.finish(JOB_END_STORED_S)

    def end(self, reason: str, *, at_once: bool) -> None:
        """End all ranks, and begin no other one; ``at_once``: without waiting for work under way."""
        self._group = None
        for rank in self.held.values():
            rank.lifetime.end(reason, at_once=at_once)
