"""Calls of the Linux kernel: the clock, memory, a child that ends with its parent, a process's pidfd.

The seccomp profile of a container, or a sandbox, may forbid these calls. The error then names the call.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fabric.errors import ConfigError

# The clock of the protocol cores also counts while the machine is suspended; the monotonic clock does not.
# A member limits its time without a lighthouse by this clock, because the lighthouse counts that time too.
seconds_since_boot: Callable[[], float] = partial(time.clock_gettime, time.CLOCK_BOOTTIME)


def boot_id() -> str:
    """Return the kernel's id of this boot of the machine; empty where the kernel gives none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()[:64]
    except OSError:
        return ""


# The memory that this process may still take, by the machine and by its cgroups.


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still take: the least that the machine and its cgroups allow."""
    # Where the free memory is unknown, the kernel decides.
    limits = [bytes_of(proc / "meminfo", "MemAvailable") or 1 << 62]
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            hierarchy, _, path = line.partition(":")[2].partition(":")
            if not hierarchy:
                # Each cgroup above this one has a limit too.
                group = cgroup / path.strip("/")
                for each in (group, *group.parents[: len(group.parts) - len(cgroup.parts)]):
                    limits += _room(each, "memory.max", "memory.current")
            elif "memory" in hierarchy.split(","):
                limits += _room(cgroup / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes")
    return max(min(limits), 0)


def bytes_of(path: Path, name: str) -> int | None:
    """Return the bytes of a line in a file of /proc that counts kB; None where there is none."""
    with contextlib.suppress(OSError):
        for line in path.read_text().splitlines():
            if line.startswith(f"{name}:"):
                return int(line.split()[1]) * 1024
    return None


def _room(group: Path, limit: str, usage: str) -> list[int]:
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        reclaimable = int(counts.get("inactive_file", 0))
    except (OSError, ValueError):
        return []
    return [int(most) - used + reclaimable] if most.isdecimal() else []


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


_SIOCGIFADDR = 0x8915  # the request for an interface's IPv4 address


class NetworkInterface(NamedTuple):
    """An interface of this host with an IPv4 address."""

    name: str
    address: str
    mbit_s: int  # -1 where the driver gives no speed, as for a virtual interface


def network_interfaces(net: Path = Path("/sys/class/net")) -> list[NetworkInterface]:
    """Return the interfaces of this host that have an IPv4 address."""
    interfaces = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            speed = -1
            with contextlib.suppress(OSError, ValueError):
                speed = int((net / name / "speed").read_text())
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("40s", name.encode()))
                interfaces.append(NetworkInterface(name, socket.inet_ntoa(reply[20:24]), speed))
    return interfaces


def speeds_of(
    addresses: Collection[str], interfaces: Sequence[NetworkInterface]
) -> tuple[str, NetworkInterface | None]:
    """Name the interfaces with these addresses and a known speed; return a faster one of the host too."""
    used = [x for x in interfaces if x.address in addresses and x.mbit_s > 0]
    fastest = max(interfaces, key=lambda x: x.mbit_s, default=None)
    is_faster = fastest is not None and bool(used) and fastest.mbit_s > max(x.mbit_s for x in used)
    return ", ".join(f"{x.name} with {x.mbit_s} Mbit/s" for x in used), fastest if is_faster else None
