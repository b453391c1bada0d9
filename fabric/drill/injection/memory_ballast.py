"""A process that holds memory until it is closed, or until the process that started it dies."""

import subprocess
import sys
from pathlib import Path

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
        held = _memory_fields(Path(f"/proc/{self.pid}/status")).get("VmRSS", 0)
        return f"process {self.pid} holds {held >> 20} MB" if held >= self._bytes else ""

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def available_bytes() -> int:
    """Return the memory that new processes of this host can get."""
    return _memory_fields(Path("/proc/meminfo")).get("MemAvailable", 0)


def _memory_fields(path: Path) -> dict[str, int]:
    """Return the lines of a file in /proc that count kB, in bytes."""
    fields: dict[str, int] = {}
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return fields
    for line in lines:
        name, _, value = line.partition(":")
        words = value.split()
        if len(words) == 2 and words[1] == "kB":
            fields[name] = int(words[0]) * 1024
    return fields
