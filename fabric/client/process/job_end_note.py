"""A file on this host's disk that notes the job's end, for a job that ends while no lighthouse answers.

The next process of the replica reads the note, tells the lighthouse, and ends. The lighthouse then marks the
job complete. While the checkpoint server lives, it tells the lighthouse too.
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
    """Write the note to the replica's folder, where other users cannot write. A full disk loses the note."""
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
