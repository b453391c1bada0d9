"""Obeys a drill in this process: holds it or kills it at a named point of a step, or changes its data there.

The endpoint exists only with ``FABRIC_DRILL=1``. Only a process of the same user on the same host reaches it,
by the socket ``drill.sock`` in the run folder. One drill at a time; the end of its connection ends its order.
"""

import contextlib
import json
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from fabric.client.process.drill_damage import ClockLeap, damage
from fabric.client.process.link_damage import LinkDamage
from fabric.client.process.local_socket import is_own_user, listen, receive_line
from fabric.errors import FabricError, Refused
from fabric.runtime.drill_orders import (
    DATA_POINTS,
    DRILL_SOCKET_NAME,
    MAX_ORDER_BYTES,
    PointOrder,
    read_order,
)
from fabric.runtime.failpoints import Data

log = logging.getLogger(__name__)

_PEER_S = 5.0
# Flipped snapshots lie in two slots. After an order's end, so many more snapshots replace them.
_SLOTS = 2
_REPLACED_S = 600.0


# The actions that begin at once and last until the end of their order.
_LASTING: Mapping[str, Callable[[], ClockLeap | LinkDamage]] = {
    "leap": ClockLeap,
    "cut": lambda: LinkDamage(lost=1.0),
    "lose": lambda: LinkDamage(lost=0.2),
}


class _HeldOrder:
    """An order under way, and the connection that it came by."""

    def __init__(self, order: PointOrder, asking: socket.socket) -> None:
        self.order = order
        self.over = threading.Event()  # the thread at the point may go on
        self.obeyed = threading.Event()  # that thread has gone on, or will never stop there
        self.flipped_slots = 0  # slots that may hold a flipped snapshot
        self.lasting: ClockLeap | LinkDamage | None = None
        self._answered = threading.Event()
        self._asking = asking

    def accept(self) -> None:
        """Answer that the order is taken, which comes before every report."""
        self._send({"ok": True})
        self._answered.set()

    def report(self, **body: object) -> None:
        """Tell the drill; a thread may reach the point before the order is answered, and waits for that."""
        self._answered.wait(_PEER_S)
        self._send(body)

    def _send(self, body: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):  # the drill is gone, and its order with it
            self._asking.sendall(json.dumps(body).encode() + b"\n")


class DrillEndpoint:
    """Takes orders from a daemon thread; ``hit`` obeys them in the thread that reaches the point."""

    def __init__(self, run_dir: Path) -> None:
        self._guard = threading.Lock()
        self._held: _HeldOrder | None = None
        self._replaced: _HeldOrder | None = None  # an order that is over, whose snapshots are being replaced
        self._path = run_dir / DRILL_SOCKET_NAME
        self._listener = listen(run_dir, DRILL_SOCKET_NAME)
        threading.Thread(target=self._accept, name="fabric-drill", daemon=True).start()

    def hit(self, name: str, step: int, data: Data = None) -> None:
        """Obey the order for this point, if there is one; an order to flip snapshots acts until its end."""
        if name == "publish" and self._replaced is not None:
            self._count_replaced(self._replaced, step)
        held = self._held
        if held is None or held.order.point != name or step < held.order.step:
            return
        if held.order.micro_batch >= 0 and (
            step != held.order.step or data is None or data() != held.order.micro_batch
        ):
            return
        if name in DATA_POINTS and data is not None:
            self._damage(held, step, data())
            return
        with self._guard:
            if self._held is not held:
                return
            self._held = None
        order = held.order
        log.warning("fabric: drill %s: %s at %s of step %d", order.drill, order.action, name, step)
        held.report(hit=name, step=step)
        if order.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        held.over.wait(order.seconds)
        held.report(over=name, step=step)
        held.obeyed.set()

    def _damage(self, held: _HeldOrder, step: int, data: object) -> None:
        order = held.order
        with self._guard:
            about = damage(order.action, data) if self._held is held else ""
            if not about:
                return
            if order.point == "publish":
                held.flipped_slots = _SLOTS
            else:
                self._held = None
        log.warning("fabric: drill %s: at %s of step %d %s", order.drill, order.point, step, about)
        held.report(hit=order.point, step=step, about=about)
        if order.point != "publish":
            held.report(over=order.point, step=step)
            held.obeyed.set()

    def _count_replaced(self, held: _HeldOrder, step: int) -> None:
        held.flipped_slots -= 1
        if held.flipped_slots <= 0:
            self._replaced = None
            held.report(over="publish", step=step)
            held.obeyed.set()

    def close(self) -> None:
        """Take no more orders."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                asking, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(asking,), name="fabric-drill", daemon=True).start()

    def _serve(self, asking: socket.socket) -> None:
        """Take one order, and drop it at the end of its connection."""
        held: _HeldOrder | None = None
        with asking, contextlib.suppress(OSError):
            try:
                asking.settimeout(_PEER_S)
                held = self._take(asking)
                begin = _LASTING.get(held.order.action)
                asking.settimeout(held.order.seconds if begin is not None else None)
                held.lasting = begin() if begin is not None else None
                held.accept()
                if held.lasting is not None:
                    held.lasting.tell(held.report)
                while asking.recv(MAX_ORDER_BYTES):
                    pass
            except FabricError as error:
                asking.sendall(json.dumps({"ok": False, "error": str(error)}).encode() + b"\n")
            finally:
                if held is not None:
                    self._drop(held)

    def _take(self, asking: socket.socket) -> _HeldOrder:
        if not is_own_user(asking):
            raise Refused("this process obeys drills of its own user alone: drill as that user")
        line = receive_line(asking, MAX_ORDER_BYTES)
        if line is None:
            raise Refused("the order of a drill was cut short: send one line")
        held = _HeldOrder(read_order(line), asking)
        with self._guard:
            if self._held is not None:
                raise Refused(
                    f"the drill {self._held.order.drill} has an order for this process: wait for its end"
                )
            self._held = held
        return held

    def _drop(self, held: _HeldOrder) -> None:
        held.over.set()
        if held.lasting is not None:
            held.lasting.end()
            held.report(over=held.order.point)
        with self._guard:
            if self._held is held:
                self._held = None
                if held.flipped_slots:
                    self._replaced = held
                else:
                    held.obeyed.set()
        # Its last report needs the connection.
        held.obeyed.wait(_REPLACED_S if held.flipped_slots else _PEER_S)
