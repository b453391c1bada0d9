"""Counts the sockets on which a process listens, as the kernel knows them."""

import contextlib
from pathlib import Path

_LISTENS = "0A"  # a TCP socket's state
_ACCEPTS = 1 << 16  # the flag of a unix socket that listens


def listening(pid: int) -> dict[str, int]:
    """How many sockets of each kind this process listens on."""
    own = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            own.add(str(link.readlink()))

    def rows(name: str) -> list[list[str]]:
        return [row.split() for row in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]]

    tcp = [f"socket:[{row[9]}]" for row in rows("tcp") + rows("tcp6") if row[3] == _LISTENS]
    unix = [f"socket:[{row[6]}]" for row in rows("unix") if int(row[3], 16) == _ACCEPTS]
    return {"tcp": len(own.intersection(tcp)), "unix": len(own.intersection(unix))}
