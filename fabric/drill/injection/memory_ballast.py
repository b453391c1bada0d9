"""A process that holds memory until it is closed, or until the process that started it dies."""

import subprocess
import sys
from pathlib import Path

from fabric.runtime.host_memory import available_bytes, bytes_of

_MOST_BYTES = 1 << 30
_SHARE = 4
# The ballast writes to each page, then waits for the end of its input.
_BALLAST = "import sys; held = b'1' * int(sys.argv[1]); print(len(held), flush=True); sys.stdin.read()"


class Ballast:
    """Takes a quarter of this host's free memory, 1 GB at most."""

    def __init__(self) -> None:
        self._bytes = min(_MOST_BYTES, available_bytes() // _SHARE)
        command = [sys.executable, "-S", "-c", _BALLAST, str(self._bytes)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def evidence(self) -> str:
        """The kernel's count of the memory once it is all held, or an empty string."""
        held = bytes_of(Path(f"/proc/{self.pid}/status"), "VmRSS") or 0
        return f"process {self.pid} holds {held >> 20} MB" if held >= self._bytes else ""

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
