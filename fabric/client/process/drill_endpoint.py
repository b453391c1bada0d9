"""Obeys a drill in this process: holds it or kills it at a named point of a step, or changes its data there.

The endpoint exists only with ``FABRIC_DRILL=1``. Only a process of the same user on the same host reaches it,
by the socket ``drill.sock`` in the run folder. One drill at a time; the end of its connection ends its order.
"""

import contextlib
import ctypes
import json
import logging
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from fabric.client.process.debug_endpoint import LocalEndpoint, receive_line
from fabric.errors import FabricError, Refused
from fabric.ftar.buckets import Bucket
from fabric.runtime.drill_orders import (
    CLOCK,
    DATA_POINTS,
    DRILL_SOCKET_NAME,
    LINKS,
    MAX_ORDER_BYTES,
    PointOrder,
    read_order,
)
from fabric.runtime.failpoints import Data
from fabric.runtime.private_folder import peer_of
from fabric.transport.tcp import open_links

# Linux: options of SOL_SOCKET, and the place of the counter of dropped packets in SO_MEMINFO.
_ATTACH_FILTER, _DETACH_FILTER, _MEMINFO = 26, 27, 55
_MEMINFO_FORMAT, _DROPS = "9I", 8
# Classic BPF: load a random number, jump where it is at least k, return k (the bytes of the packet to keep).
_LOAD, _JUMP_AT_LEAST, _RETURN = 0x20, 0x35, 0x06
_RANDOM = 0xFFFFF000 + 56
_KEEP_ALL = 0xFFFFFFFF
_POLL_S = 0.02


class LinkDamage:
    """Packets to the TCP links of this process are lost, from now to ``end``, on new links too.

    ``lost``: the share of the packets. Raises Refused where this process has no TCP link.

    A filter on each link's socket drops them before TCP sees them, so nothing is acknowledged, and TCP sends
    again. A process may filter its own sockets without any right. Links inside a host do not use TCP.
    """

    def __init__(self, lost: float) -> None:
        # The filter drops this share of the packets.
        self._program = [(_RETURN, 0, 0, 0)]
        if lost < 1.0:
            keeps = [(_JUMP_AT_LEAST, 0, 1, int(lost * 2**32)), (_RETURN, 0, 0, _KEEP_ALL)]
            self._program = [(_LOAD, 0, 0, _RANDOM), *keeps, *self._program]
        self._damaged: dict[socket.socket, int] = {}  # socket -> the packets that it had dropped before
        self._over = threading.Event()
        self._thread: threading.Thread | None = None
        self._damage_links()
        if not self._damaged:
            raise Refused(
                "this trainer has no TCP link to a peer, and a link inside its host cannot be cut: drill a "
                "replica whose peers are on other hosts"
            )

    def tell(self, report: Callable[..., None]) -> None:
        """Go on with new links, and report the evidence once the kernel has dropped packets."""
        name = "fabric-drill-links"
        self._thread = threading.Thread(target=self._run, args=(report,), name=name, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let all packets pass again."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
        for link in self._damaged:
            with contextlib.suppress(OSError):
                link.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)

    def _run(self, report: Callable[..., None]) -> None:
        is_told = False
        while not self._over.wait(_POLL_S):
            self._damage_links()
            dropped = sum(max(0, _drops(link) - before) for link, before in self._damaged.items())
            if dropped and not is_told:
                is_told = True
                about = f"the kernel has dropped packets to its {len(self._damaged)} links"
                report(hit=LINKS, step=0, about=about)

    def _damage_links(self) -> None:
        for link in open_links():
            if link in self._damaged:
                continue
            with contextlib.suppress(OSError):  # the link has just ended
                before = _drops(link)
                lines = b"".join(struct.pack("HBBI", *line) for line in self._program)
                code = ctypes.create_string_buffer(lines)
                program = struct.pack("@HP", len(self._program), ctypes.addressof(code))
                link.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, program)
                self._damaged[link] = before


def _drops(link: socket.socket) -> int:
    """Return how many packets to this socket the kernel has dropped; 0 for a closed socket."""
    with contextlib.suppress(OSError):
        size = struct.calcsize(_MEMINFO_FORMAT)
        info = link.getsockopt(socket.SOL_SOCKET, _MEMINFO, size)
        return int(struct.unpack(_MEMINFO_FORMAT, info)[_DROPS])
    return 0


LEAP_S = 3600.0
_HOST_CLOCKS = (time.time, time.time_ns)


def damage(action: str, data: object) -> str:
    """Flip a bit of a bucket's gradients or of a snapshot, or put a NaN there; return what was changed.

    Returns an empty string where there is nothing to change. Its stream is that of the caller.
    """
    if isinstance(data, memoryview):
        return _flip_byte(data.cast("B"))
    assert isinstance(data, Bucket)
    for name, gradient in data.local_gradients():
        if not gradient.numel():
            continue
        with torch.no_grad():
            place = gradient.abs().argmax().reshape(1)
            value = gradient.take(place)
            before = float(value)
            if action == "nan":
                value.fill_(torch.nan)
            else:  # a bit of the mantissa, so that the value stays finite
                value.view(torch.uint8)[max(0, value.element_size() - 2)] ^= 1
            gradient.put_(place, value)
        return f"element {int(place)} of the gradient of {name} is {float(value):g} instead of {before:g}"
    return ""


class ClockLeap:
    """``time.time`` and ``time.time_ns`` of this process are LEAP_S ahead, from now to ``end``."""

    def __init__(self) -> None:
        seconds, nanoseconds = _HOST_CLOCKS
        self._set(lambda: seconds() + LEAP_S, lambda: nanoseconds() + int(LEAP_S * 1e9))

    def tell(self, report: Callable[..., None]) -> None:
        report(hit=CLOCK, step=0, about=f"its clock is {LEAP_S:g} s ahead")

    def end(self) -> None:
        self._set(*_HOST_CLOCKS)

    @staticmethod
    def _set(seconds: Callable[[], float], nanoseconds: Callable[[], int]) -> None:
        time.time, time.time_ns = seconds, nanoseconds


def _flip_byte(data: memoryview) -> str:
    if not data.nbytes:
        return ""
    place = data.nbytes // 2
    data[place] ^= 1
    return f"bit 0 of byte {place} of {data.nbytes} is flipped"


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
        self._endpoint = LocalEndpoint(run_dir, DRILL_SOCKET_NAME, "fabric-drill", self._hear)

    def hit(self, name: str, step: int, data: Data = None) -> None:
        """Obey the order for this point, if there is one; an order to flip snapshots acts until its end."""
        replaced = self._replaced
        if name == "publish" and replaced is not None:
            replaced.flipped_slots -= 1
            if replaced.flipped_slots <= 0:
                self._replaced = None
                replaced.report(over="publish", step=step)
                replaced.obeyed.set()
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

    def close(self) -> None:
        self._endpoint.close()

    def _hear(self, asking: socket.socket) -> None:
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
        if peer_of(asking)[1] != os.geteuid():
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
