"""The two slots in the checkpoint server's memory that hold this replica's snapshots."""

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fabric.ckpt_server.attach.server_handle import ServerHandle
from fabric.ckpt_server.format.manifest import of_rank, state_digest
from fabric.ckpt_server.state.snapshot import Copier
from fabric.errors import FabricError
from fabric.model import SnapshotRef

_SLOTS = 2
_SMALL_BYTES = 64 << 20  # memory of up to this size is allocated within milliseconds
_SLACK_BYTES = 64 << 10  # spare bytes, because numbers in a header get longer


class SnapshotSlots:
    """Chooses the slot of the next snapshot, and prepares its memory. Several threads may call it."""

    def __init__(self, handle: ServerHandle, copier: Copier) -> None:
        self.handle = handle
        self._copier = copier
        # Keep the server's snapshots as long as possible: overwrite the newest one last.
        self._next = (handle.slots[-1] + 1) % _SLOTS if handle.slots else 0
        # slot -> the state that the server serves from it
        self._held = dict(zip(handle.slots, handle.snapshots, strict=True))
        self._preparing = self._lacks = False  # memory is being allocated; the allocation failed
        # (generation, step) -> slot and manifest of this rank's part, kept until all ranks have their parts.
        self._unnamed: dict[tuple[int, int], tuple[int, dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def has_room(self, nbytes: int, submit: Callable[[Callable[[], None]], None]) -> bool:
        """Return whether the next snapshot's memory is allocated; begin to allocate it if not.

        A large state's memory is allocated in the background, because a copy that waits for it delays the
        trainer. If the allocation fails, the copy fails too and reports why.
        """
        if nbytes <= _SMALL_BYTES or self._lacks:
            return True
        if not self._preparing and not self._holds(self._next, nbytes):
            self._preparing = True
            submit(lambda: self.prepare(nbytes))
        return not self._preparing

    def _holds(self, slot: int, nbytes: int) -> bool:
        return self.handle.holds("snapshot", slot, nbytes)

    def prepare(self, nbytes: int) -> None:
        """On the snapshot worker: allocate the memory of both slots before a copy needs it."""
        slots, lacks = (self._next, 1 - self._next), True
        self._preparing = not all(self._holds(slot, nbytes) for slot in slots)
        with contextlib.suppress(FabricError):  # the copy that needs the memory reports the error
            for slot in slots:
                self._copier.prepare(self.memory(slot, nbytes))
            lacks = False
        self._preparing, self._lacks = False, lacks

    def memory(self, slot: int, nbytes: int) -> memoryview:
        """Return the memory of a slot, of ``nbytes`` or a little more. Raises FabricError."""
        wanted = nbytes if self._holds(slot, nbytes) else nbytes + _SLACK_BYTES
        return self.handle.allocate("snapshot", slot, wanted)

    def take(self) -> int:
        """Return the slot to overwrite: the older slot, unless only the newer slot is without readers."""
        with self._lock:
            for slot in (self._next, 1 - self._next):
                if self.handle.begin("snapshot", slot, unless_read=True):
                    break
            else:
                slot = self._next
                self.handle.begin("snapshot", slot)
            self._held.pop(slot, None)
            self._next = (slot + 1) % _SLOTS
            self._unnamed = {key: part for key, part in self._unnamed.items() if part[0] != slot}
            return slot

    def take_other(self, kept: int) -> int:
        """Return the other slot than ``kept``, to overwrite now and again with the next snapshot."""
        with self._lock:
            self._next = 1 - kept
            self.handle.begin("snapshot", self._next)
            self._held.pop(self._next, None)
            return self._next

    def give_back(self, slot: int) -> None:
        """Use ``slot`` for the next snapshot, unless it is served, and keep the other slot."""
        with self._lock:
            if slot not in self._held:
                self._next = slot

    def held(self, state: SnapshotRef) -> int:
        """Return the slot from which the server serves this state, or -1; the server may have ended since."""
        with self._lock:
            return next((slot for slot, ref in self._held.items() if ref == state), -1)

    def look(self, slot: int, nbytes: int) -> memoryview:
        """Return the bytes of a slot, and use the other slot for the next snapshot. Raises FabricError."""
        with self._lock:
            self._next = (slot + 1) % _SLOTS
        return self.handle.allocate("snapshot", slot, nbytes)

    def publish(self, slot: int, manifest: Mapping[str, Any]) -> None:
        """Make the server serve the snapshot in ``slot``. Raises FabricError."""
        self.handle.publish_snapshot(slot, manifest)
        self._held[slot] = SnapshotRef(manifest["generation"], manifest["step"], state_digest(manifest))

    def keep_unnamed(self, generation: int, step: int, slot: int, manifest: dict[str, Any]) -> None:
        """Keep this rank's part until ``publish_part``, or until its slot is overwritten."""
        with self._lock:
            self._unnamed[generation, step] = (slot, manifest)

    def publish_part(self, generation: int, step: int, rank: int, digests: Sequence[str]) -> bool:
        """Serve this rank's part under the digests of all ranks. Raises FabricError.

        If the part was overwritten or ``digests`` is empty, drop the part and return False.
        """
        with self._lock:
            slot, manifest = self._unnamed.pop((generation, step), (-1, {}))
            if slot < 0 or not digests:
                return False
            self.publish(slot, of_rank(manifest, rank, digests))
            return True
