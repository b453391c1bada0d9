"""Follows the journals of a running job, line by line as they grow."""

import json
from pathlib import Path
from typing import Any

from fabric.audit.journal import MAX_LINE_BYTES


class JournalFollower:
    """Reads the lines appended to one journal since the last look.

    ``counts`` has the number of complete lines of each process, to check the journal later.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._rest = b""
        self.counts: list[int] = []

    def poll(self) -> list[dict[str, Any]]:
        """Return the entries of the lines that were completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                arrived = file.read(MAX_LINE_BYTES)
        except FileNotFoundError:
            return []
        self._offset += len(arrived)
        *lines, self._rest = (self._rest + arrived).split(b"\n")
        entries = [entry for entry in map(_decode, lines) if entry is not None]
        for entry in entries:
            if entry["event"] == "start" or not self.counts:
                self.counts.append(0)
            self.counts[-1] += 1
        return entries


def _decode(raw: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(raw)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("event"), str) else None
