"""A trainer's part in durable checkpoints: when one is due, which replica writes it, which are in storage.

The writer is the member with the lowest name among those that have the state and storage. All members count
steps and time alike, so when the writer dies, the member with the next name writes the next checkpoint."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.durable.reader import (
    CheckpointListing,
    DurableCheckpoint,
    NotListed,
    find_checkpoint,
    list_checkpoints,
)
from fabric.ckpt_server.durable.storage import (
    ANSWER_S,
    NoAnswer,
    Storage,
    StorageAway,
    StorageCall,
    StorageError,
)
from fabric.ckpt_server.wire.channel_protocol import DurableJob
from fabric.client.process.incarnation_lock import ProcessIdentity
from fabric.client.process.journal import Journal
from fabric.errors import FabricError, Refused, StateError, Unreachable
from fabric.model import Record, SnapshotRef, writer_of
from fabric.runtime import logs
from fabric.runtime.config import Settings, parse_durable_every
from fabric.runtime.http.lighthouse_client import Lighthouses

_MOST_LISTED = 16  # the trainer declares this many of the newest checkpoints to the lighthouse
_LOOK_AGAIN_S = 1.0
_WRITTEN_S = 0.1  # how often the checkpoint server is asked for an outcome
T = TypeVar("T")
# After this time the trainer logs that storage is slow, and asks the lighthouse whether the job needs it.
_ANSWER_S = ANSWER_S


class StorageUnavailable(StateError):
    """Storage cannot be listed, and the job cannot begin without the listing: the launcher must try again."""


class DurableCheckpoints:
    """The durable checkpoints of one trainer. With ``settings.durable`` empty, none is ever due."""

    def __init__(self, settings: Settings, journal: Journal, process: ProcessIdentity) -> None:
        self._settings = settings
        self._rule = parse_durable_every(settings.durable_every)
        self._journal = journal
        self._process = process
        self._last_s = time.monotonic()
        self._last_step = -1
        self._ordered: tuple[int, int] | None = None  # generation and step that the server was to write last
        self.noticed = False  # whether this process has notice that it will be killed soon

    def find(self) -> tuple[SnapshotRef, ...] | None:
        """Return the complete checkpoints of all layouts of ranks, oldest first.

        If storage cannot be listed, returns None where other members hold the job's state. Where no other
        member holds it, raises StorageUnavailable: a job that begins from nothing would lose more. Raises
        StateError where a required checkpoint is missing. Makes a missing folder, and logs that.
        """
        folder = self._settings.durable
        if not folder:
            return ()
        listing = self._listing(self._job())
        if listing is None:
            return None
        if self._rule.required and not listing.complete:
            more = "".join(f"; {warning}" for warning in listing.warnings)
            raise StateError(
                f"{folder} holds no complete durable checkpoint of job {self._settings.job}{more}: correct "
                "FABRIC_DURABLE or FABRIC_JOB, or leave `required` out of FABRIC_DURABLE_EVERY to begin from "
                "nothing"
            )
        self._tell_unless_writable()
        for warning in listing.warnings:
            self._journal.write("durable", warning=warning)
        return tuple(c.state for c in listing.complete[-_MOST_LISTED:])

    def _listing(self, job: Storage) -> CheckpointListing | None:
        """Return the listing once it is there, or None if it is late and other members hold the state."""
        limit_s, waits = self._settings.contact_s, False
        look_again = partial(StorageCall, job.url, partial(list_checkpoints, job, self._settings.job))
        deadline, look = time.monotonic() + limit_s, look_again()
        while True:
            try:
                return look.wait(_LOOK_AGAIN_S if waits else _ANSWER_S)
            except StorageError as error:
                trouble, may_come = error, isinstance(error, NoAnswer)
            peers_hold = peers_hold_state(self._settings)
            if peers_hold:
                self._say(f"{trouble}: it is read later, because other replicas hold the job's state")
                return None
            why = "no member" if peers_hold is False else "no lighthouse says that a member"
            left_s = deadline - time.monotonic()
            if left_s <= 0 and not may_come:
                raise StorageUnavailable(
                    f"{trouble}, for {limit_s:g} s, and {why} of the job holds its state: mend the storage,"
                    " or correct FABRIC_DURABLE; this process ends with code 75, to be started again"
                )
            if not waits:
                waits = True
                until = "" if may_come else f", up to {limit_s:g} s"
                self._say(f"{trouble}: this replica waits for it{until}, because {why} holds the job's state")
            if not may_come:
                time.sleep(min(_LOOK_AGAIN_S, max(left_s, 0.0)))
                look = look_again()

    def _tell_unless_writable(self) -> None:
        """Warn at the start if storage cannot be written, before the first checkpoint fails.

        The start goes on: a state in other members' memory needs no storage, and storage may recover later.
        """
        storage = Storage(self._settings.durable)
        try:
            if StorageCall(storage.url, storage.try_writing).wait(_ANSWER_S):
                self._say(
                    f"{storage.url} did not exist and has been made: it holds no checkpoint to begin from"
                )
        except StorageError as error:
            self._say(
                f"no durable checkpoint will be written while this lasts: {error}; mend the storage, or"
                " correct FABRIC_DURABLE"
            )

    def _say(self, sentence: str) -> None:
        logs.tell(f"{self._settings.replica}: {sentence}")

    def is_due(self, step: int, record: Record | None, last: bool = False) -> bool:
        """Whether this replica must write the state at ``step`` as a durable checkpoint.

        ``last``: the loop has ended with this step.
        """
        settings = self._settings
        if not settings.durable or record is None or step == self._last_step:
            return False
        if last or self.noticed:  # after a notice the protocol says which replica saves the state
            due = last
        elif self._rule.every.steps:
            due = step > 0 and step % self._rule.every.steps == 0
        else:
            due = time.monotonic() - self._last_s >= self._rule.every.seconds
        if not due:
            return False
        self._last_s, self._last_step = time.monotonic(), step
        return writer_of(record, storing=True) == settings.replica

    def persist(self, handle: ServerHandle, step: int, generation: int) -> None:
        """Make the checkpoint server write its snapshot of ``step``. Raises FabricError for a lost server."""
        settings = self._settings
        try:
            handle.persist(
                DurableJob(
                    settings.durable,
                    settings.job,
                    settings.replica,
                    self._process.incarnation,
                    keep=self._rule.keep,
                    required=self._rule.required,
                    urgent=self.noticed,
                    generation=generation,
                    step=step,
                )
            )
        except Refused as error:
            self._journal.write("durable", step=step, warning=str(error))
        else:
            self._ordered = generation, step
            self._journal.write("durable", step=step, generation=generation)

    def await_written(self, handle: ServerHandle, step: int, generation: int) -> str:
        """Wait until the server has written the snapshot of ``step``; return why it has not, or empty."""
        try:
            why = self._await_idle(handle, (generation, step))
        except FabricError as error:
            return str(error)
        if why:
            self._say(f"the state of step {step} is not saved yet: {why}; this replica tries again")
        return why

    def await_last(self, handle: ServerHandle) -> None:
        """Wait for a checkpoint that the server still writes: it may end with this process's container."""
        with suppress(FabricError):
            words = "waits for its last durable checkpoint"
            if self._ordered is not None and (why := self._await_idle(handle, self._ordered, words)):
                self._say(f"its last durable checkpoint is not written: {why}")

    def _await_idle(self, handle: ServerHandle, ordered: tuple[int, int], words: str = "") -> str:
        """Wait until the server writes nothing; return why it has not written the ordered state, or empty.

        ``words``: with which to say once why the server still waits. Raises FabricError for a lost server.
        """
        while not (outcome := handle.durable_outcome())["idle"]:
            if words and outcome["error"]:
                self._say(f"{words}: {outcome['error']}")
                words = ""
            time.sleep(_WRITTEN_S)
        is_written = (outcome["generation"], outcome["step"]) == ordered
        return "" if is_written else str(outcome["error"] or "its writer has ended")

    def patiently(self, read: Callable[[], T]) -> T:
        """Return ``read()``; call it again while storage is away, for as long as at the start.

        Raises the StateError of ``read``, and StorageUnavailable where storage stays away. A checkpoint that
        is still not listed then does not exist for this replica.
        """
        limit_s = self._settings.contact_s
        deadline, is_told = time.monotonic() + limit_s, False
        while True:
            try:
                return read()
            except StorageAway as error:
                if time.monotonic() >= deadline:
                    if isinstance(error, NotListed):
                        raise
                    raise StorageUnavailable(
                        f"{error}, for {limit_s:g} s: mend the storage, or correct FABRIC_DURABLE; this"
                        " process ends with code 75, to be started again"
                    ) from error
                if not is_told:
                    is_told = True
                    self._say(f"{error}: this replica tries again, up to {limit_s:g} s")
                time.sleep(_LOOK_AGAIN_S)

    def find_state(self, state: SnapshotRef) -> DurableCheckpoint:
        """Return the complete checkpoint of ``state``. Raises StateError."""
        if not self._settings.durable:
            raise StateError(
                f"step {state.step} is in durable storage and FABRIC_DURABLE is not set here: set it"
            )
        return find_checkpoint(self._job(), self._settings.job, state)

    def _job(self) -> Storage:
        return Storage(self._settings.durable).at(self._settings.job)


def peers_hold_state(settings: Settings) -> bool | None:
    """Whether the job needs no storage to begin: another live member has the state, or the job is over.

    None where no lighthouse answers. Raises Unauthorized.
    """
    lighthouses = Lighthouses(settings.lighthouse, settings.job, settings.token.decode(), settings.tls)
    with ThreadPoolExecutor(1, "fabric-ask") as pool:  # a thread of its own: the caller may run an event loop
        try:
            job = pool.submit(lighthouses.ask, lighthouses.path()).result()
        except Unreachable:
            return None
        except Refused:
            return False
    over = bool(job["record"] and job["record"]["complete"])
    others = [x for x in job["members"] if x["replica"] != settings.replica and x["connected"]]
    return over or any(not x["joining"] and x["verdict"] == "alive" for x in others)
