"""Shared memory that the kernel always frees: sealed memfds, allocated in full before use.

A memfd has no name, so the kernel frees it when the last process that maps it has ended, in whatever way. All
of its pages are allocated at once: a machine without enough memory gives an error here, and does not start
the OOM killer later. A seal forbids shrinking, so that no other holder of the descriptor can make the
server's reads fault.
"""

import contextlib
import errno
import fcntl
import mmap
import os

from fabric.errors import Refused
from fabric.runtime.host_memory import available_bytes
from fabric.runtime.system_calls import create_memfd

# The largest part of the available memory that one allocation may take.
_SHARE = 0.95
_FAULT_BYTES = 16 << 20
_MADV_POPULATE_READ = 22


class Memfd:
    """A memfd of ``capacity`` bytes (whole pages), which never shrinks; ``view`` is read-only.

    Raises ConfigError where the kernel refuses to make it.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.capacity = 0
        self.view = memoryview(b"")
        self.fd = create_memfd(f"fabric-{name}")
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)

    def grow(self, nbytes: int) -> None:
        """Make room for ``nbytes``; content and existing mappings stay. Blocks for seconds.

        Raises Refused, with nothing changed, where the machine has not that much memory.
        """
        capacity = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if capacity <= self.capacity:
            return
        needed, available = capacity - self.capacity, available_bytes()
        if needed > available * _SHARE:
            raise _too_large(self.name, needed, available)
        try:
            os.posix_fallocate(self.fd, 0, capacity)
            mapped = mmap.mmap(self.fd, capacity, mmap.MAP_SHARED, mmap.PROT_READ)
            # Enter all pages, so that the first transfer has no page faults: in small steps, because a call
            # holds the interpreter's lock. An older kernel enters pages at first use.
            with contextlib.suppress(OSError):
                for begin in range(0, len(mapped), _FAULT_BYTES):
                    mapped.madvise(_MADV_POPULATE_READ, begin, min(_FAULT_BYTES, len(mapped) - begin))
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                raise
            raise _too_large(self.name, needed, available, f", but: {error.strerror}") from error
        self.capacity, self.view = capacity, memoryview(mapped)

    def close(self) -> None:
        """Release the memory; a process that has mapped it keeps it."""
        self.view = memoryview(b"")
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _too_large(name: str, needed: int, available: int, but: str = "") -> Refused:
    """Return the refusal to grow; ``but``: the kernel's error, where the memory seemed to be available."""
    return Refused(
        f"the {name} needs {_mebibytes(needed)} more of shared memory and {_mebibytes(available)} are"
        f" available on this host{but}: give it more memory, or run fewer replicas on it"
    )


def _mebibytes(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.1f} MiB"
