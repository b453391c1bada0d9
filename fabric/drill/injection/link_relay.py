"""A relay in front of a replica: it forwards connections, and plays the faults of links without any right.

Peers dial the relay's address, a loopback address of its own, and the relay dials the replica at the same
port. A cut holds bytes back and closes no connection, as a network does that loses every packet.
"""

import contextlib
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial

from msgspec import Struct, field

from fabric.errors import ConfigError

_PIECE_BYTES = 1 << 16
# The dialler names itself within so many bytes.
_GREETING_BYTES = 4096
_NAME = re.compile(rb'"replica":"([^"\\\\]{1,64})"')
_LOOK_S = 0.5
_HOLD_S = 0.05
# A piece of at least so many bytes is of a gradient; greetings and messages are shorter.
_GRADIENT_BYTES = 2048


class LinkWeather(Struct):
    """The faults of one replica's links, and what they have done. The relays read it for every piece."""

    holds_to: bool = False  # hold the bytes to the replica
    holds_from: bool = False  # hold the bytes from the replica
    delay_s: float = 0.0  # delay of each piece to the replica
    flips: bool = False  # flip one bit of the next large piece to the replica
    held: int = 0  # pieces that a cut has held back
    delayed: int = 0  # pieces that were delayed
    reset: int = 0  # connections that were reset
    flipped: int = 0  # bits that were flipped
    lock: threading.Lock = field(default_factory=threading.Lock)

    def clear(self) -> None:
        """End all faults; the counts stay."""
        self.holds_to = self.holds_from = self.flips = False
        self.delay_s = 0.0

    def passes(self, data: bytes) -> bytes:
        """Return ``data`` on its way to the replica, with one bit flipped if that fault is due."""
        with self.lock:
            if not self.flips or len(data) < _GRADIENT_BYTES:
                return data
            self.flips = False
            self.flipped += 1
        changed = bytearray(data)
        changed[len(data) // 2] ^= 1
        return bytes(changed)


class _Connection:
    """One forwarded connection. ``near`` is the dialler's end."""

    def __init__(self, near: socket.socket, far: socket.socket, dialler: LinkWeather) -> None:
        self.near, self.far = near, far
        self.dialler = dialler  # the weather of the dialler, once its greeting has named it


class LinkRelay:
    """Listens at ``host`` and forwards each port of ``ports`` (0: any) to 127.0.0.1, to the port behind it.

    ``weathers`` holds the faults by replica: those of ``replica``, which is behind this relay, and those of
    the replicas that dial it.
    """

    def __init__(
        self, host: str, ports: Mapping[int, int], replica: str, weathers: Mapping[str, LinkWeather]
    ) -> None:
        self.weather = weathers[replica]
        self._weathers = weathers
        self._over = threading.Event()
        self._guard = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._connections: list[_Connection] = []
        self._threads: list[threading.Thread] = []
        self.ports: list[int] = []
        try:
            for port, behind in ports.items():
                listener = socket.create_server((host, port))
                self._listeners.append(listener)
                self.ports.append(listener.getsockname()[1])
                self._start(partial(self._accept, listener, behind))
        except OSError as error:
            self.close()
            raise ConfigError(
                f"the drill's relay cannot listen at {host} ({error.strerror}): end the other drill there"
            ) from error

    def close(self) -> None:
        self._over.set()
        with self._guard:
            sockets = [sock for link in self._connections for sock in (link.near, link.far)]
        for sock in (*self._listeners, *sockets):
            _end(sock, socket.SHUT_RDWR)
        for listener in self._listeners:
            listener.close()
        for thread in self._threads:
            thread.join(timeout=2.0)

    def reset_one(self) -> bool:
        """End the oldest connection; return whether there was one."""
        with self._guard:
            link = self._connections.pop(0) if self._connections else None
        if link is None:
            return False
        for sock in (link.near, link.far):
            _end(sock, socket.SHUT_RDWR)
        self.weather.reset += 1
        return True

    def _start(self, work: Callable[[], None]) -> None:
        thread = threading.Thread(target=work, name="fabric-relay", daemon=True)
        self._threads = [x for x in self._threads if x.is_alive()] + [thread]
        thread.start()

    def _accept(self, listener: socket.socket, port: int) -> None:
        while not self._over.is_set():
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = None
            with contextlib.suppress(OSError):
                far = socket.create_connection(("127.0.0.1", port), timeout=2.0)
            if far is None:
                near.close()
                continue
            far.settimeout(None)
            for sock in (near, far):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link = _Connection(near, far, LinkWeather())
            with self._guard:
                self._connections.append(link)
            self._start(partial(self._carry, link))

    def _carry(self, link: _Connection) -> None:
        """Forward both directions of one connection until it ends."""
        back = threading.Thread(target=self._forward_out, args=(link,), daemon=True)
        back.start()
        self._forward_in(link)
        back.join()
        with self._guard:
            if link in self._connections:
                self._connections.remove(link)
        link.near.close()
        link.far.close()

    def _forward_in(self, link: _Connection) -> None:
        """Forward from the dialler to the replica behind this relay."""
        begun = b""
        for data in self._pieces(link.near, lambda: self.weather.holds_to or link.dialler.holds_from):
            if len(begun) < _GREETING_BYTES:
                begun += data[:_GREETING_BYTES]
                if name := _NAME.search(begun):
                    link.dialler = self._weathers.get(name[1].decode(), link.dialler)
            if self.weather.delay_s:
                time.sleep(self.weather.delay_s)
                self.weather.delayed += 1
            if not _send(link.far, self.weather.passes(data)):
                break
        _end(link.far, socket.SHUT_WR)

    def _forward_out(self, link: _Connection) -> None:
        """Forward from the replica behind this relay to the dialler."""
        for data in self._pieces(link.far, lambda: self.weather.holds_from or link.dialler.holds_to):
            if not _send(link.near, data):
                break
        _end(link.near, socket.SHUT_WR)

    def _pieces(self, source: socket.socket, is_held: Callable[[], bool]) -> Iterator[bytes]:
        """Yield the bytes of ``source`` until its end; while ``is_held``, they stay in the kernel."""
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as ready:
            ready.register(source, selectors.EVENT_READ)
            while not self._over.is_set():
                if not ready.select(_LOOK_S):
                    continue
                if is_held():
                    for weather in self._weathers.values():
                        weather.held += weather.holds_to or weather.holds_from
                    time.sleep(_HOLD_S)
                    continue
                data = source.recv(_PIECE_BYTES)
                if not data:
                    return
                yield data


def _send(sock: socket.socket, data: bytes) -> bool:
    try:
        sock.sendall(data)
    except OSError:
        return False
    return True


def _end(sock: socket.socket, how: int) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(how)
