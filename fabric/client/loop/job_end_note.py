"""A note of the job's end on this host's disk, for the case that no lighthouse was in reach.

The next process of the replica tells the lighthouse, which marks the job complete, and ends. The checkpoint
server tells the lighthouse too while it lives; the file serves after that.
"""

import contextlib
import json
from dataclasses import asdict
from pathlib import Path

from fabric.errors import ProtocolError
from fabric.model import JobEnd
from fabric.protocol.messages.wire import decode_as

_NAME = "ended.json"


def leave(home: Path, ended: JobEnd) -> None:
    """Write the note to the replica's folder, which other users cannot write. A full disk loses the note."""
    path = home / f"{_NAME}.new"
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(asdict(ended)))
        path.replace(home / _NAME)


def find(home: Path) -> JobEnd | None:
    """Return the note that an earlier process left in the replica's folder, if any."""
    try:
        return decode_as(JobEnd, json.loads((home / _NAME).read_text()), _NAME)
    except (OSError, ValueError, ProtocolError):
        return None
