"""A proxy in front of a host, which slows the traffic to the host down when ``is_slow`` is set."""

import contextlib
import selectors
import socket
import threading
import time

SLOW_BYTES_PER_S = 20_000
_TURN_S = 0.05
# A small buffer, so that bytes that the proxy holds back stay under way at their sender.
_BUFFER_BYTES = 64 * 1024


class SlowLink:
    """Forwards ``host:port`` to 127.0.0.1:``port``, where the replica listens; answers come back at full
    speed."""

    host = "127.0.0.2"

    def __init__(self, bytes_per_s: int = SLOW_BYTES_PER_S) -> None:
        self.is_slow = threading.Event()
        self._slow_bytes = int(bytes_per_s * _TURN_S)
        self._over = threading.Event()
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER_BYTES)
        self._listener.bind((self.host, 0))
        self._listener.listen()
        self.port = self._listener.getsockname()[1]
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = [self._listener]

    def __enter__(self) -> "SlowLink":
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for found in self._sockets:
            with contextlib.suppress(OSError):
                found.shutdown(socket.SHUT_RDWR)
            found.close()
        for thread in self._threads:
            thread.join(timeout=5)

    def _start(self, target, *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._over.is_set():
                near, _ = self._listener.accept()
                far = socket.create_connection(("127.0.0.1", self.port))
                self._sockets += [near, far]
                self._start(self._forward, near, far, True)
                self._start(self._forward, far, near, False)

    def _forward(self, source: socket.socket, target: socket.socket, slowed: bool) -> None:
        with contextlib.suppress(OSError), selectors.DefaultSelector() as ready:
            ready.register(source, selectors.EVENT_READ)
            while not self._over.is_set():
                if not ready.select(0.2):
                    continue
                slow = slowed and self.is_slow.is_set()
                data = source.recv(self._slow_bytes if slow else 1 << 16)
                if not data:
                    target.shutdown(socket.SHUT_WR)
                    return
                target.sendall(data)
                if slow:
                    time.sleep(_TURN_S)
