"""When this replica snapshots its state, and how: into two slots of the server's memory, in turn.

The copy starts at a step boundary and is joined before the user's update code may change anything. The
policy keeps the cost under a share of the step time, and no snapshot older than ten minutes; a newcomer's
request is served on top of either.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fabric.ckpt_server.handle import ServerHandle
from fabric.ckpt_server.manifest import of_rank
from fabric.ckpt_server.snapshot import Copier, build_manifest
from fabric.ckpt_server.state import StateView, capture
from fabric.errors import FabricError
from fabric.protocol.member_io import Snapshotted
from fabric.protocol.rank_orders import NameSnapshot, SnapshotNamed

MAX_AGE_S = 600.0
_SLOTS = 2


@dataclass(slots=True)
class OverheadBudget:
    """Due when the last copy's cost is at most ``share`` of the time since, or after MAX_AGE_S."""

    share: float
    taken: float = -1.0
    cost_s: float = 0.0

    def is_due(self, now: float) -> bool:
        if self.taken < 0:
            return True
        age = now - self.taken
        return age >= MAX_AGE_S or (self.share > 0 and self.cost_s <= self.share * age)

    def record(self, now: float, cost_s: float) -> None:
        self.taken, self.cost_s = now, cost_s


class Snapshots:
    """One at a time. ``submit`` runs a job on the keeper thread; ``post`` takes Snapshotted; ``recover``
    starts a dead server again. ``rank`` is mine in a replica of several ranks: there a part is served only
    when ``name`` says that all ranks have theirs."""

    def __init__(
        self,
        handle: ServerHandle,
        objects: Mapping[str, object],
        copier: Copier,
        budget: OverheadBudget,
        who: tuple[str, str],
        on_device: bool,
        recover: Callable[[], None],
        rank: int | None = None,
    ) -> None:
        self._handle = handle
        self._objects = objects
        self._copier = copier
        self._budget = budget
        self._job, self._replica = who
        # What the server still holds from before stays as long as it can: the newest is overwritten last.
        self._next_slot = (handle.slots[-1] + 1) % _SLOTS if handle.slots else 0
        self._copied = threading.Event()
        self._copied.set()
        self._on_device = on_device
        self._recover = recover
        self._rank = rank
        # Parts that wait for those of the other ranks, by (generation, step): the slot and the manifest.
        self._unnamed: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        self._slots_lock = threading.Lock()

    def is_due(self) -> bool:
        """Whether the policy wants one at this boundary."""
        return self._copied.is_set() and self._budget.is_due(time.monotonic())

    def start(
        self,
        step: int,
        generation: int,
        submit: Callable[[Callable[[], None]], None],
        post: Callable[[Snapshotted], None],
    ) -> None:
        """Begin to copy the state at ``step``, which must not change until ``wait_copied`` returns."""
        self._copied.wait()
        started = time.monotonic()
        view = capture(self._objects, step)
        try:
            slot = self._take_slot()
            target = self._handle.allocate("snapshot", slot, view.nbytes)
            self._copier.start(view, target)
        except FabricError:
            submit(self._recover)
            post(Snapshotted(step, "", generation))
            return
        self._copied.clear()
        submit(lambda: self._finish(view, slot, (step, generation), started, post))

    def _take_slot(self) -> int:
        """The slot to overwrite: the older one, unless somebody reads it and nobody reads the other."""
        with self._slots_lock:
            for slot in (self._next_slot, 1 - self._next_slot):
                if self._handle.begin("snapshot", slot, unless_read=True):
                    break
            else:
                slot = self._next_slot
                self._handle.begin("snapshot", slot)
            self._next_slot = (slot + 1) % _SLOTS
            self._unnamed = {key: held for key, held in self._unnamed.items() if held[0] != slot}
            return slot

    def name(self, order: NameSnapshot, post: Callable[[SnapshotNamed], None]) -> None:
        """Serve my part of a snapshot under the digests of all ranks, unless its slot was taken since."""
        done = False
        with self._slots_lock:
            slot, manifest = self._unnamed.pop((order.generation, order.step), (-1, {}))
            if slot >= 0 and order.digests and self._rank is not None:
                try:
                    self._handle.publish_snapshot(slot, of_rank(manifest, self._rank, order.digests))
                    done = True
                except FabricError:
                    self._recover()
        post(SnapshotNamed(order.step, order.generation, done))

    def _finish(
        self,
        view: StateView,
        slot: int,
        when: tuple[int, int],
        started: float,
        post: Callable[[Snapshotted], None],
    ) -> None:
        step, generation = when
        digest = ""
        try:
            try:
                digests = self._copier.join()
            finally:
                self._budget.record(time.monotonic(), time.monotonic() - started)
                self._copied.set()
            manifest = build_manifest(
                view,
                digests,
                job=self._job,
                replica=self._replica,
                generation=generation,
                created=time.time(),
            )
            if self._rank is None:
                self._handle.publish_snapshot(slot, manifest)
            else:
                self._unnamed[generation, step] = (slot, manifest)
            digest = digests.digest
        except FabricError:
            # The server died under us: the newcomer is told that this replica missed the step.
            self._recover()
            digest = ""
        post(Snapshotted(step, digest, generation))

    def wait_copied(self) -> None:
        """Return once the state may change: on a device, once the compute stream is told to wait."""
        if self._on_device and not self._copied.is_set():
            self._copier.fence()
        else:
            self._copied.wait()

    def target(self, nbytes: int) -> tuple[int, memoryview]:
        """A slot for a state that is fetched: it becomes this replica's own snapshot."""
        # A copy under way has a slot that nothing was published from yet, and must not lose it.
        self._copied.wait()
        slot = self._take_slot()
        return slot, self._handle.allocate("snapshot", slot, nbytes)
