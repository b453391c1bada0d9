"""A TCP proxy that flips one bit of the first large piece, once."""

import contextlib
import socket
import threading


class CorruptingProxy:
    """Forwards from ``listen`` to ``target``; ``corrupted`` is set after the flip.

    Pieces of at least ``at_least`` bytes are gradients; shorter pieces (greetings, messages) pass unchanged.
    """

    def __init__(self, listen: tuple[str, int], target: tuple[str, int], at_least: int) -> None:
        self.corrupted = threading.Event()
        self._target, self._at_least = target, at_least
        self._lock = threading.Lock()
        self._sockets: list[socket.socket] = []
        self._server = socket.create_server(listen)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for source, sink in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(self._pass(data))
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _pass(self, data: bytes) -> bytes:
        with self._lock:
            if self.corrupted.is_set() or len(data) < self._at_least:
                return data
            self.corrupted.set()
        changed = bytearray(data)
        changed[-1] ^= 1
        return bytes(changed)

    def close(self) -> None:
        self._server.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
