"""The lock on a replica's folder on this host, and the incarnation number that its holder gets."""

import fcntl
import logging
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric.client.process.rank_group import RankGroup
from fabric.errors import ConfigError
from fabric.model import Value
from fabric.runtime.config import Settings
from fabric.runtime.private_folder import make_private, open_private

_log = logging.getLogger(__name__)
_ABOVE = "claim_above"  # the file with the number that the next process must reach
# The lock file holds incarnations, newest first, each in a field of this many bytes.
_NUMBER_BYTES = 32
# The number of earlier incarnations in the file: a process may end before its session opens, so the newest
# incarnation that the leader knows may be older than the newest incarnation on this host.
_REMEMBERED = 16

# A claim lies this many numbers at most above the number that a lighthouse named. It is drawn, because the
# host that lost the replica may start it again too, and no two processes may claim the same number.
_SPREAD = 1 << 20

# The kernel releases a lock when the process ends, so the descriptors of lock files stay open.
_claims: dict[Path, int] = {}  # folder -> descriptor; the newest claim is the last


class ProcessIdentity(Value):
    """Which process this is."""

    incarnation: int
    # Incarnations that ran on this host before and have ended, newest first.
    predecessors: tuple[int, ...]
    # The ranks of this replica, None where it is one process.
    group: RankGroup | None = None

    @property
    def rank(self) -> int:
        return self.group.rank if self.group is not None else 0

    @property
    def size(self) -> int:
        return self.group.size if self.group is not None else 1


def claim_identity(settings: Settings, group: RankGroup | None) -> ProcessIdentity:
    """Claim this rank's folder; all ranks of a replica share one incarnation. Raises ConfigError."""
    incarnation, predecessors = claim(settings.of_rank(group.rank if group is not None else 0).home)
    if group is None:
        return ProcessIdentity(incarnation, predecessors)
    claimed = {
        "replica": settings.replica,
        "job": settings.job,
        "incarnation": incarnation,
        "before": predecessors,
    }
    agreed = group.ask(claimed, _agree)
    newest = agreed["newest"]
    # Every rank writes the file: the next process may have fewer ranks, and its incarnation must be newer.
    os.pwrite(next(reversed(_claims.values())), f"{newest}\n".encode().ljust(_NUMBER_BYTES), 0)
    # Only rank 0 commits for the replica: an ended process of rank 0 can commit nothing more.
    return ProcessIdentity(newest, tuple(agreed["before"]), group)


def _agree(claims: list[dict[str, Any]]) -> list[Mapping[str, Any]]:
    """Let rank 0 answer what all ranks claim."""
    for rank, other in enumerate(claims):
        if (other["replica"], other["job"]) != (claims[0]["replica"], claims[0]["job"]):
            raise ConfigError(
                f"rank {rank} says it is {other['replica']!r} and rank 0 says {claims[0]['replica']!r}: give "
                "all ranks of a replica the same FABRIC_REPLICA and FABRIC_JOB"
            )
    newest = max(other["incarnation"] for other in claims)
    return [{"newest": newest, "before": claims[0]["before"]}] * len(claims)


def claim(home: Path) -> tuple[int, tuple[int, ...]]:
    """Lock this replica's folder; return the new incarnation, and earlier incarnations here, newest first.

    The lock is a POSIX record lock: it ends with the process, and forked workers do not inherit it. So its
    holder knows that every earlier process on this host, but not on other hosts, has ended.
    """
    path = home / "trainer.lock"
    try:
        make_private(home)
        descriptor = open_private(path, os.O_CREAT | os.O_RDWR)
    except OSError as error:
        raise ConfigError(
            f"the folder {home} cannot be used ({error.strerror}): name one of this user in FABRIC_RUN_DIR"
        ) from error
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise ConfigError(
            f"another living process has this replica id on this host ({path} is locked): give every "
            "replica its own FABRIC_REPLICA, or end that process first"
        ) from None
    _claims.pop(home, None)
    _claims[home] = descriptor
    text = os.pread(descriptor, _NUMBER_BYTES * (1 + _REMEMBERED), 0).decode("ascii", "replace")
    before = tuple(int(word) for word in text.split() if word.isdigit())[:_REMEMBERED]
    incarnation = max(int(time.time() * 1000), max(before, default=0) + 1, _above(home))
    history = "".join(f"{number}\n".ljust(_NUMBER_BYTES) for number in (incarnation, *before))
    os.pwrite(descriptor, history.encode(), 0)
    return incarnation, before


def claim_above(incarnation: int) -> None:
    """Let the next process in this process's folder claim a number above ``incarnation``.

    The number is not in the lock file, because that process ran on another host: nobody here saw it end.
    """
    path = next(reversed(_claims)) / _ABOVE
    try:
        with os.fdopen(open_private(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), "w") as file:
            file.write(str(incarnation + 1 + secrets.randbelow(_SPREAD)))
    except OSError as error:
        _log.warning(
            "fabric: %s cannot be written (%s), so the next process is refused as well: set the host's clock "
            "or make the file writable",
            path,
            error.strerror,
        )


def _above(home: Path) -> int:
    """Return the number to claim at least; 0 where no lighthouse has named one."""
    try:
        with os.fdopen(open_private(home / _ABOVE, os.O_RDONLY), "rb") as file:
            text = file.read(_NUMBER_BYTES).decode("ascii", "replace")
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0
