"""A small file system in memory that the drill can fill: a tmpfs, in a mount namespace of the drill's own.

The processes that the drill starts afterwards see it. The kernel unmounts it with the last of them, so that
nothing is left behind when the drill is killed.
"""

import ctypes
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from fabric.errors import Refused

_CLONE_NEWNS = 0x20000
_CAP_SYS_ADMIN = 21
# Used with care: the file system lies in the memory of this host.
_SHARE = 4
_MOST_BYTES = 1 << 30


def may_mount() -> bool:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
    return False


class SmallDisk:
    """The file system at ``path``. Make it in the thread that starts the processes. Raises Refused."""

    def __init__(self, path: Path, available_bytes: int) -> None:
        self.path = path
        self.nbytes = min(_MOST_BYTES, available_bytes // _SHARE)
        path.mkdir(exist_ok=True)
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNS):
            reason = os.strerror(ctypes.get_errno())
            raise Refused(f"the drill gets no mount namespace ({reason}): leave disk-full away")
        self._mount("--make-rprivate", "/")
        self._mount("-t", "tmpfs", "-o", f"size={self.nbytes}", "fabric-drill", str(path))

    def fill(self) -> None:
        """Shrink the file system to what it holds. Raises Refused."""
        held = os.statvfs(self.path)
        used = (held.f_blocks - held.f_bfree) * held.f_frsize
        self._resize(max(used, held.f_frsize))

    def empty(self) -> None:
        """Give the file system its room again. Raises Refused."""
        self._resize(self.nbytes)

    @property
    def free_bytes(self) -> int:
        held = os.statvfs(self.path)
        return held.f_bavail * held.f_frsize

    def _resize(self, nbytes: int) -> None:
        self._mount("-o", f"remount,size={nbytes}", "fabric-drill", str(self.path))

    @staticmethod
    def _mount(*words: str) -> None:
        command: Sequence[str] = ["mount", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise Refused(f"{' '.join(command)} failed ({done.stderr.strip()}): leave disk-full away")
