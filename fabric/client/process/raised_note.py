"""A file on this host's disk that notes the exception for which this replica's last process left the job.

With FABRIC_ON_EXCEPTION=restart an exception outside a micro-batch is noted here. The same exception at the
same step of the next process shows a defect of the script: another restart would meet it again.
"""

import contextlib
import json
from pathlib import Path

_NAME = "raised.json"


def repeats(home: Path, step: int, reason: str) -> bool:
    """Note the exception; return whether this replica's last process left for ``reason`` at ``step`` too."""
    noted: object = None
    with contextlib.suppress(OSError, ValueError):
        noted = json.loads((home / _NAME).read_text())
    path = home / f"{_NAME}.new"
    with contextlib.suppress(OSError):  # a full disk loses the note
        path.write_text(json.dumps([step, reason]))
        path.replace(home / _NAME)
    return noted == [step, reason]
