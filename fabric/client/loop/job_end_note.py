"""Word of the job's end, left on this host's disk by a process that no lighthouse could hear.

The next process of the replica tells the lighthouse, which marks the job complete, and ends. The checkpoint
server tells it too, as long as it lives; the file is for when it does not.
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
    """Write it to the replica's folder, where no other user can. A full disk loses it."""
    path = home / f"{_NAME}.new"
    with contextlib.suppress(OSError):
        path.write_text(json.dumps(asdict(ended)))
        path.replace(home / _NAME)


def find(home: Path) -> JobEnd | None:
    """What an earlier process has left in the replica's folder."""
    try:
        return decode_as(JobEnd, json.loads((home / _NAME).read_text()), _NAME)
    except (OSError, ValueError, ProtocolError):
        return None
