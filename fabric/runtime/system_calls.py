"""Calls of the Linux kernel: a child that ends with its parent, a process's pidfd, and memory without a name.

The seccomp profile of a container, or a sandbox, may forbid these calls. The error then names the call.
"""

import ctypes
import errno
import os
from collections.abc import Callable

from fabric.errors import ConfigError

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)
_REMEDIES = {
    errno.EMFILE: "raise its limit on open files (ulimit -n), where the trainer is started",
    errno.ENFILE: "raise the host's limit on open files (sysctl fs.file-max)",
    errno.EPERM: "let the container's seccomp profile allow {call}",
    errno.EACCES: "let the container's security profile allow {call}",
    errno.ENOSYS: "let the container's seccomp profile or sandbox allow {call}, or use a kernel that has it",
    errno.ENOMEM: "give the host or the container more memory",
}


def die_with(parent: int, number: int) -> Callable[[], None]:
    """Return a function for a child of ``parent`` to run first, as ``preexec_fn``.

    It asks the kernel to send the signal ``number`` to the child when the thread that starts the child ends.
    """

    def ask() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)  # the parent died before this process asked to die with it

    return ask


def refused(call: str, error: OSError) -> str:
    """Return the end of a sentence: why the kernel refuses ``call``, and the remedy."""
    remedy = _REMEDIES.get(error.errno or 0, "read the kernel's log (dmesg)")
    return f"({call}: {error.strerror}): {remedy.format(call=call)}"


def open_pidfd(pid: int) -> int:
    """Return a descriptor of process ``pid``. Raises ProcessLookupError, and ConfigError for a refusal."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        raise
    except OSError as error:
        raise ConfigError(f"process {pid} cannot be watched {refused('pidfd_open', error)}") from error


def create_memfd(name: str) -> int:
    """Return a descriptor of new shared memory, which can be sealed. Raises ConfigError for a refusal."""
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        why = refused("memfd_create", error)
        raise ConfigError(f"the shared memory {name!r} cannot be made {why}") from error
