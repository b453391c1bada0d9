"""Limits the size of a checkpoint server's log, which no other program rotates.

The process that starts the server opens the file for appending. So the file is copied and cut, not replaced.
"""

import asyncio
import contextlib
import logging
import os
import shutil
from pathlib import Path

log = logging.getLogger(__name__)

MOST_BYTES = 16 << 20
_LOOK_S = 60.0


async def keep_bounded(path: Path) -> None:
    """Check the size from time to time, until cancelled."""
    while True:
        try:
            await asyncio.to_thread(bound, path)
        except OSError as error:
            log.warning("the log %s cannot be cut: %s", path, error.strerror)
        await asyncio.sleep(_LOOK_S)


def bound(path: Path, most: int = MOST_BYTES) -> None:
    """Copy a log of more than ``most`` bytes to ``NAME.1``, and empty it. Raises OSError."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        source = os.open(path, os.O_RDWR | flags)
    except FileNotFoundError:  # the server's output does not go to this file
        return
    with os.fdopen(source, "r+b") as file:
        if os.fstat(source).st_size <= most:
            return
        older = path.with_name(f"{path.name}.1")
        with contextlib.suppress(FileNotFoundError):
            older.unlink()
        target = os.open(older, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o600)
        with os.fdopen(target, "wb") as copy:
            shutil.copyfileobj(file, copy)
        os.ftruncate(source, 0)
