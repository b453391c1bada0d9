"""One exchange over a device ring: a thread that moves headers and bytes while streams move the data.

    device memory --down--> slot --TCP, or shared memory--> slot --up--> accumulate on the device

Events order the streams. The host reads an event only to know when a slot may be sent or used again. It
sleeps in one ``poll`` on the sockets, the abort and a descriptor that events wake. The number of slots per
direction bounds the chunks under way. Only the two side streams wait for the compute stream.

An abort ends the exchange at once. Work that is already enqueued still runs, and writes to memory that no
exchange reads. The next exchange waits for that work before it uses a slot again.
"""

import os
import select
import time

from fabric.errors import Mismatch, ProtocolError, RoundAborted
from fabric.ftar.device.device_links import DeviceLinks
from fabric.ftar.device.piece_order import PieceOrder
from fabric.ftar.device.pieces import Incoming, Outgoing
from fabric.ftar.device.workspace import DeviceWorkspace, ReductionTask
from fabric.ftar.epochs import Bounds, Waiting, lost


class DeviceExchange:
    """One reduction of ``task`` over ``links``; ``run`` once."""

    def __init__(
        self, task: ReductionTask, links: DeviceLinks, space: DeviceWorkspace, pieces: PieceOrder
    ) -> None:
        self._task, self._links, self._space = task, links, space
        links.credits = 0
        self._out = Outgoing(task, links, space, pieces.sends)
        self._in = Incoming(task, links, space, pieces.receives)
        self._poll = select.poll()
        self._poll.register(links.wake, select.POLLIN)
        self._poll.register(space.wakeup_fd, select.POLLIN)

    def run(self, bounds: Bounds, waiting: Waiting) -> None:
        """Reduce. Raises RoundAborted; ``waiting`` is kept up to date throughout."""
        space = self._space
        for event in space.unfinished:
            space.device.when(event, space.wake)
        last_s = time.monotonic()
        while not (self._out.done and self._in.done):
            self._links.check()
            before = self._in.completed
            moved, counted = self._move()
            if counted:
                last_s = time.monotonic()
            if self._in.completed > before:
                self._task.on_piece()
            if not moved or not counted:
                bound_s = bounds.exchange_s if self._in.everybody else bounds.entry_s
                self._wait(last_s + bound_s, waiting, may_sleep=not moved)
        self._links.check()

    def _move(self) -> tuple[bool, bool]:
        """Move all bytes that can move now; return whether any moved, and whether they count as progress."""
        space = self._space
        space.unfinished = [event for event in space.unfinished if not event.done()]
        if space.unfinished:
            return False, False  # an aborted exchange still reads and writes the slots
        settled = self._in.settle()
        moved, counted = self._receive()
        self._out.stage(self._in.arrived)
        sent = self._send()
        return moved or sent or settled, counted or sent or settled

    def _send(self) -> bool:
        try:
            return self._out.pump()
        except OSError as error:
            # The next member may have sent the reason of an abort before its link ended.
            self._links.hear_back()
            raise lost(self._links.ring.next, error) from error

    def _receive(self) -> tuple[bool, bool]:
        peer = self._links.ring.previous
        try:
            return self._in.pump()
        except ProtocolError as error:
            raise RoundAborted(
                f"{peer} in the exchange of epoch {self._links.ring.epoch}: {error}",
                peer,
                mismatch=isinstance(error, Mismatch),
            ) from error
        except EOFError as error:
            raise lost(peer, None) from error
        except OSError as error:
            raise lost(peer, error) from error

    def _awaited(self) -> str:
        """Name the peer for which this member waits; empty while it waits for its own device."""
        ring = self._links.ring
        if self._in.copying or self._out.copying or self._space.unfinished:
            return ""
        return ring.previous if self._in.receiving else ring.next

    def _wait(self, deadline_s: float, waiting: Waiting, may_sleep: bool) -> None:
        peer = self._awaited()
        started_s = time.monotonic()
        if started_s >= deadline_s:
            who = f"{peer} stalled" if peer else "the copies of this member's own device did not end"
            raise RoundAborted(
                f"{who} in the exchange of epoch {self._links.ring.epoch}: nothing moved within the bound",
                peer,
            )
        if not may_sleep:
            return
        waiting.peer = waiting.last = peer
        try:
            ready = self._sleep(deadline_s - started_s)
        finally:
            waiting.peer = ""
            if peer:
                waited_s = time.monotonic() - started_s
                waiting.seconds[peer] = waiting.seconds.get(peer, 0.0) + waited_s
        assert self._links.next is not None
        if ready.get(self._links.next.fileno(), 0) & ~select.POLLOUT:
            self._links.hear_back()

    def _sleep(self, timeout_s: float) -> dict[int, int]:
        links, poll = self._links, self._poll
        assert links.next is not None and links.previous is not None
        poll.register(links.next, select.POLLIN | (select.POLLOUT if self._out.blocked else 0))
        # Poll the previous link only when data is due on it: a closed link would wake the poll in a loop.
        wants = self._in.receiving and not self._space.unfinished
        if wants:
            poll.register(links.previous, select.POLLIN)
        ready = dict(poll.poll(timeout_s * 1000 + 1))
        if wants:
            poll.unregister(links.previous)
        if self._space.wakeup_fd in ready:
            os.eventfd_read(self._space.wakeup_fd)
        return ready
