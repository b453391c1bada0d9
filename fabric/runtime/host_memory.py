"""The memory that this process may still take, by the machine and by its cgroups."""

import contextlib
from pathlib import Path


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the bytes that this process can still take: the least that the machine and its cgroups allow."""
    # Where the free memory is unknown, the kernel decides.
    limits = [bytes_of(proc / "meminfo", "MemAvailable") or 1 << 62]
    with contextlib.suppress(OSError):
        for line in (proc / "self/cgroup").read_text().splitlines():
            hierarchy, _, path = line.partition(":")[2].partition(":")
            if not hierarchy:
                limits += _unified(cgroup, path.strip("/"))
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


def _unified(root: Path, path: str) -> list[int]:
    """Return the bytes that this cgroup, and each cgroup above it, still allows."""
    groups = [root]
    for part in filter(None, path.split("/")):
        groups.append(groups[-1] / part)
    return [room for group in groups for room in _room(group, "memory.max", "memory.current")]


def _room(group: Path, limit: str, usage: str) -> list[int]:
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        reclaimable = _inactive_file(group / "memory.stat")
    except (OSError, ValueError):
        return []
    return [int(most) - used + reclaimable] if most.isdecimal() else []


def _inactive_file(stat: Path) -> int:
    for line in stat.read_text().splitlines():
        if line.startswith("inactive_file "):
            return int(line.split()[1])
    return 0
