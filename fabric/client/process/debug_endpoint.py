"""Answers the checkpoint server's questions: this process's stacks, its position, torch's flight recording.

The endpoint has its own thread and socket, so it answers while other threads are stuck, if its thread gets
the interpreter lock. Without the lock, a signal makes the interpreter write the stacks to a file.
``fabric.ckpt_server.server.debug_probe`` asks the questions.
"""

import contextlib
import faulthandler
import itertools
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from fabric.ckpt_server.wire.channel_protocol import (
    DEBUG_SOCKET_NAME,
    STACKS_NAME,
    STACKS_SIGNAL,
    LineBuffer,
    encode_line,
)
from fabric.errors import ConfigError, FabricError, Refused
from fabric.protocol.messages.wire import decode_line
from fabric.runtime.private_folder import open_private, peer_of, socket_path


class LocalEndpoint:
    """A socket in the run folder, whose connections a daemon thread passes to ``hear``, until ``close``.

    It takes the place of an older one. ``thread``: the thread's name. Raises OSError.
    """

    def __init__(self, run_dir: Path, name: str, thread: str, hear: Callable[[socket.socket], None]) -> None:
        self._path = run_dir / name
        self._path.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with socket_path(run_dir, name) as short_path:
            self._listener.bind(short_path)
        self._path.chmod(0o600)
        self._listener.listen(8)
        threading.Thread(target=self._run, args=(hear,), name=thread, daemon=True).start()

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._path.unlink()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which then closes the listener

    def _run(self, hear: Callable[[socket.socket], None]) -> None:
        with self._listener, contextlib.suppress(OSError):
            while True:
                hear(self._listener.accept()[0])


def receive_line(asking: socket.socket, most_bytes: int) -> bytes | None:
    """Return the first line, or None where the connection ends before it. Raises ProtocolError, OSError."""
    lines = LineBuffer(most_bytes)
    while (line := lines.next_line()) is None:
        received = asking.recv(most_bytes)
        if not received:
            return None
        lines.feed(received)
    return line


_MAX_QUESTION_BYTES = 4096
_PEER_S = 5.0
_MAX_FRAMES = 100

# The interpreter writes stacks to this file while the process lives, so the file stays open.
_dump_file: IO[bytes] | None = None

Answers = Mapping[str, Callable[[], Mapping[str, object]]]


class DebugEndpoint:
    """Answers ``answers`` by name on ``run_dir``'s socket, from a daemon thread, until ``close``.

    If the socket cannot be made, this process trains without an endpoint.
    """

    def __init__(self, run_dir: Path, answers: Answers) -> None:
        self._answers = answers
        self._endpoint: LocalEndpoint | None = None
        with contextlib.suppress(OSError, ConfigError):
            _write_stacks_on_signal(run_dir / STACKS_NAME)
            self._endpoint = LocalEndpoint(run_dir, DEBUG_SOCKET_NAME, "fabric-debug", self._hear)

    def close(self) -> None:
        endpoint, self._endpoint = self._endpoint, None
        if endpoint is not None:
            endpoint.close()

    def _hear(self, asking: socket.socket) -> None:
        with asking, contextlib.suppress(OSError, FabricError):
            asking.settimeout(_PEER_S)
            line = receive_line(asking, _MAX_QUESTION_BYTES) if peer_of(asking)[1] == os.geteuid() else None
            if line is not None:
                asking.sendall(encode_line(self._answer(decode_line(line))))

    def _answer(self, question: Mapping[str, Any]) -> Mapping[str, object]:
        try:
            if question.get("pid") != os.getpid():
                raise Refused(f"the question is for process {question.get('pid')}, this is {os.getpid()}")
            answer = self._answers.get(str(question.get("ask")))
            if answer is None:
                raise Refused(f"this trainer knows no answer to {str(question.get('ask'))[:40]!r}")
            return {"ok": True, **answer()}
        except Exception as error:  # noqa: BLE001  (the server that asks gets the reason; the trainer goes on)
            text = str(error) if isinstance(error, FabricError) else f"{type(error).__name__}: {error}"
            return {"ok": False, "error": text}


def stacks() -> dict[str, object]:
    """Return the Python stacks of all threads, the main thread first, most recent call first."""
    names = {thread.ident: thread for thread in threading.enumerate()}
    main = threading.main_thread().ident
    threads = []
    for ident, frame in sorted(sys._current_frames().items(), key=lambda kv: kv[0] != main):  # noqa: SLF001
        thread = names.get(ident)
        calls = itertools.islice(traceback.walk_stack(frame), _MAX_FRAMES)
        threads.append(
            {
                "name": thread.name if thread is not None else hex(ident),
                "tid": thread.native_id if thread is not None else 0,
                "stack": [f"{x.f_code.co_filename}:{line} {x.f_code.co_name}" for x, line in calls],
            }
        )
    return {"threads": threads}


def flight() -> dict[str, object]:
    """Return torch's own recording of collectives, in JSON. Raises Refused where there is none."""
    c10d: Any = getattr(torch._C, "_distributed_c10d", None)  # noqa: SLF001
    dump = getattr(c10d, "_dump_fr_trace_json", None) or getattr(c10d, "_dump_nccl_trace_json", None)
    if dump is None:
        raise Refused(f"torch {torch.__version__} has no flight recorder that speaks JSON")
    if not torch.distributed.is_initialized():
        raise Refused("this trainer has no process group of torch's, so torch has recorded nothing")
    text = bytes(dump()).decode(errors="replace")
    if '"entries"' not in text:
        raise Refused(
            "torch has recorded no collective: start the trainer with TORCH_FR_BUFFER_SIZE=2000 set"
        )
    return {"recording": text}


def _write_stacks_on_signal(path: Path) -> None:
    """Have the interpreter write all stacks to ``path`` at STACKS_SIGNAL.

    If the user's code handles that signal, its handler stays and there is no file.
    """
    global _dump_file
    path.unlink(missing_ok=True)
    if _dump_file is None and signal.getsignal(STACKS_SIGNAL) is not signal.SIG_DFL:
        return
    # Append to the file: the server truncates it before each dump, and appending starts at the new end.
    descriptor = open_private(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    file = os.fdopen(descriptor, "ab", buffering=0)
    faulthandler.register(STACKS_SIGNAL, file=file, all_threads=True, chain=False)
    _dump_file = file
