"""Slots for reduced gradients in the checkpoint server's shared memory, used in turn.

A round reduces straight into a slot, so publishing its gradient costs no copy. Two slots hold the last two
committed gradients, and a third slot takes the round under way. While a replica catches up, more slots keep
the gradients of more steps: five of any size, because a state takes a few steps to be fetched and loaded, and
further slots up to a limit in bytes. When the server is gone or hangs, the round uses private, unpublished
memory.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.wire.gradient_index import PublishedGradient
from fabric.errors import FabricError, StateError
from fabric.ftar.device.cuda import CudaEvent
from fabric.ftar.plane import DataPlane
from fabric.protocol.messages.member_events import PreparedRound

_LEAST_SLOTS = 3
_LEAST_LISTENING, _MOST_LISTENING = 6, 32


@dataclass(slots=True)
class GradientSlot:
    """One result buffer."""

    index: int
    buffer: torch.Tensor
    epoch: int = 0  # epoch of the round that was reduced into this slot
    step: int = -1  # step of the round that was reduced into this slot
    published: bool = False
    labelled: bool = False  # published through shared memory, without a request to the server
    shared: bool = True  # the buffer lies in the server's memory
    used: int = 0  # sequence number of the slot's last use, as a cold start goes back to lower steps; 0: none
    bytes_digest: str = ""  # digest of the buffer, where the round's digest covers more than the buffer
    absent: frozenset[str] = frozenset()  # the parameters for which no member of the round has a gradient
    copied: CudaEvent | None = None  # the event at which the device has copied the result to the buffer

    def settle(self) -> None:
        """Wait until the buffer holds its round's result. Raises RuntimeError for a lost device."""
        if (copied := self.copied) is not None:
            copied.wait()
            self.copied = None


@dataclass(slots=True)
class GradientSlots:
    """The slots of one trainer."""

    handle: ServerHandle
    nbytes: int  # size of one flat gradient
    layout: str
    plane: DataPlane  # the data plane, through which neighbours of this member may read a slot in place
    limit_bytes: int = 2**30  # limit in bytes for all slots together
    listening: bool = False  # whether a replica catches up: slots of more steps are kept
    wanted: bool = False  # whether another replica was in the roster, or asked for a state, since the start
    _slots: list[GradientSlot] = field(default_factory=list)
    _prepared: GradientSlot | None = None
    _uses: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def reserve(self) -> None:
        """Allocate the slots of the first rounds in advance, one at a time: a round may begin in between."""
        for index in range(_LEAST_SLOTS):
            with self._lock:
                if len(self._slots) < _LEAST_SLOTS and all(slot.index != index for slot in self._slots):
                    self._slots.append(self._allocate(index))

    def for_round(self, epoch: int, step: int) -> GradientSlot:
        """Return the slot that the round of ``step`` in ``epoch`` may overwrite."""
        with self._lock:
            slot = next((s for s in self._slots if s.step == step and not s.published), None)
            if slot is None:
                slot, self._prepared = self._prepared or self._next(), None
            slot.settle()
            self._uses += 1
            slot.epoch, slot.step, slot.published, slot.used = epoch, step, False, self._uses
            slot.bytes_digest = ""
            return slot

    def prepare(self) -> None:
        """Withdraw the slot of the next round now, so that the round need not ask the server for it.

        Do nothing while a round is under way: the round has its slot, and two published gradients must stay.
        """
        with self._lock:
            newest = max(self._slots, key=lambda s: s.used, default=None)
            if self._prepared is None and newest is not None and newest.published:
                self._prepared = self._next()

    def _next(self) -> GradientSlot:
        if not self._is_full() and all(slot.used for slot in self._slots):
            used = {s.index for s in self._slots}
            slot = self._allocate(next(i for i in range(len(used) + 1) if i not in used))
            self._slots.append(slot)
            return slot
        oldest, slot = min(enumerate(self._slots), key=lambda x: x[1].used)
        if slot.shared and not slot.used:
            return slot  # the slot was never published, so the server need not withdraw it
        if slot.shared:
            try:
                self.handle.begin("gradient", slot.index)
            except FabricError:
                slot = self._slots[oldest] = self._without_server(slot)
        else:
            slot = self._slots[oldest] = self._allocate(slot.index, slot.buffer)
        return slot

    def _without_server(self, slot: GradientSlot) -> GradientSlot:
        """Return a buffer in place of ``slot`` that no server serves.

        The memory of a server that is gone stays mapped, so this method returns the slot itself. A server
        that hangs may wake and serve the slot's old content, so this method returns new memory.
        """
        if not self.handle.hangs:
            slot.shared = False
            return slot
        self.plane.unregister(slot.buffer)
        return GradientSlot(
            slot.index, torch.zeros(self.nbytes, dtype=torch.uint8, device="cpu"), shared=False
        )

    def _is_full(self) -> bool:
        """Whether the next round reuses an existing slot."""
        listening = max(_LEAST_LISTENING, min(_MOST_LISTENING, self.limit_bytes // max(self.nbytes, 1)))
        return len(self._slots) >= (listening if self.listening else _LEAST_SLOTS)

    def _allocate(self, index: int, private: torch.Tensor | None = None) -> GradientSlot:
        """Make a slot in the server's memory, or in ``private`` memory while there is no server."""
        try:
            self.handle.allocate_gradient_index()
            memory = self.handle.allocate("gradient", index, max(self.nbytes, 1))
            self.handle.begin("gradient", index)
        except FabricError:
            if private is None:
                private = torch.zeros(self.nbytes, dtype=torch.uint8, device="cpu")
            return GradientSlot(index, private, shared=False)
        buffer = torch.frombuffer(memory, dtype=torch.uint8)[: self.nbytes]
        self.plane.register(self.handle.descriptor("gradient", index), buffer)
        if private is not None:
            self.plane.unregister(private)
        return GradientSlot(index, buffer)

    def publish(self, generation: int, held: PreparedRound) -> None:
        """Serve the committed gradient in the slot of its round. Raises FabricError.

        Do nothing where a later round has overwritten the slot, because a cold start may redo an unpublished
        step. Withdraw the next round's slot in the same request, where that is possible.
        """
        if (slot := self._of(held)) is not None:
            slot.settle()
        with self._lock:
            slot = self._of(held)
            if slot is None or slot.published:
                return
            slot.published, slot.labelled = True, False
            if not slot.shared:
                raise StateError(f"the gradient of step {held.step} is not published: there was no server")
            following = self._following(slot)
            then_begin = following.index if following is not None else -1
            self.handle.publish_gradient(
                slot.index, *self._described(generation, held, slot), then_begin=then_begin
            )
            self._prepared = following or self._prepared

    def label(self, generation: int, held: PreparedRound) -> bool:
        """Publish through shared memory, without a request to the server; never wait. Raises FabricError.

        Return False where the caller must still call ``publish`` and ``prepare``: while a replica catches up
        and waits for new gradients, where only a request to the server can publish or withdraw, and while the
        device still copies the gradient to the slot."""
        if self.listening or not self._lock.acquire(blocking=False):
            return False
        try:
            slot = self._of(held)
            if slot is None or not slot.shared or slot.published:
                return False
            if slot.copied is not None and not slot.copied.done():
                return False
            if not self.handle.publish_via_shm(slot.index, *self._described(generation, held, slot)):
                return False
            slot.published = slot.labelled = True
            following = self._following(slot)
            if following is not None and (
                not following.used or (following.labelled and self.handle.withdraw_via_shm(following.index))
            ):
                self._prepared = following
            return self._prepared is not None
        finally:
            self._lock.release()

    def _following(self, slot: GradientSlot) -> GradientSlot | None:
        """Return the next round's slot, if it can and must be withdrawn when ``slot`` is published."""
        following = min(self._slots, key=lambda s: s.used)
        ahead = slot.used == self._uses and self._prepared is None and self._is_full()
        return following if ahead and following.shared and following is not slot else None

    def _described(
        self, generation: int, held: PreparedRound, slot: GradientSlot
    ) -> tuple[PublishedGradient, dict[str, Any]]:
        """Return the gradient's description, and the metadata that the server sends with it."""
        gradient = PublishedGradient(
            generation=generation,
            step=held.step,
            epoch=held.epoch,
            nbytes=self.nbytes,
            digest=slot.bytes_digest or held.gradient_digest,
            weight=held.weight,
            layout=self.layout,
        )
        return gradient, {
            "contributions": {name: list(ids) for name, ids in held.contributions},
            "metrics": dict(held.metrics),
            **({"nonfinite": held.nonfinite} if held.nonfinite else {}),
            **({"round_digest": held.gradient_digest} if slot.bytes_digest else {}),
        }

    def find(self, step: int) -> GradientSlot:
        """Return the slot of the newest round of ``step``."""
        # No lock: another thread may hold it while it waits for the server. The main thread asks for the step
        # that it applies next, and no later round takes the slot of that step earlier.
        slot = self._newest(step)
        assert slot is not None, f"no round of step {step} was reduced here"
        return slot

    def _of(self, held: PreparedRound) -> GradientSlot | None:
        """Return the slot into which the round was reduced, or None."""
        slot = self._newest(held.step)
        return slot if slot is not None and slot.epoch == held.epoch else None

    def _newest(self, step: int) -> GradientSlot | None:
        """Return the slot that was last used for ``step``."""
        return max((s for s in tuple(self._slots) if s.step == step), key=lambda s: s.used, default=None)

    def reset(self) -> None:
        """Prepare for a new server.

        This trainer may still read the slots of the last two steps, so these stay mapped until overwritten.
        """
        with self._lock:
            self._prepared = None
            # A step may have had several rounds, all in one slot: count slots, and not rounds.
            by_use = sorted(self._slots, key=lambda s: s.used)
            for slot in by_use[:-2]:
                self.plane.unregister(slot.buffer)
            self._slots = by_use[-2:]
            for slot in self._slots:
                slot.shared = False
