"""``torch.save`` and ``torch.load`` of an adopted script.

One replica writes each file, under another name first. The file has an entry more, with the step of the loop.
So a script that goes on from its own file, as after a restart, begins at that step.
"""

import json
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fabric.integrations.adopt.adopted_loop import AdoptedLoop

# The name of the entry in the archive's only folder; torch does not look for it.
_ENTRY = "fabric-step.json"
_MAX_BYTES = 4096


class SavedFiles:
    """Stands for ``torch.save`` and ``torch.load`` while ``loop`` runs; ``job`` is the job's name."""

    def __init__(self, loop: "AdoptedLoop", job: str) -> None:
        self._loop = loop
        self._job = job

    def save(self, original: Callable[..., None], obj: Any, f: Any, *arguments: Any, **named: Any) -> None:
        """Write the file at the one replica that writes; streams are the script's own matter."""
        if not isinstance(f, str | os.PathLike):
            original(obj, f, *arguments, **named)
        elif self._loop.is_writer:
            path = Path(f)
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                original(obj, partial, *arguments, **named)
                self._note_step(partial)
                partial.replace(path)
            finally:
                partial.unlink(missing_ok=True)

    def load(self, original: Callable[..., Any], f: Any, *arguments: Any, **named: Any) -> Any:
        """Read the file, and let the loop begin at its step, if it is one of this job's.

        The file is read again where the writer has put a newer one into its place meanwhile.
        """
        if not isinstance(f, str | os.PathLike):
            return original(f, *arguments, **named)
        path, read = Path(f), False
        while not read:
            before = _identity(path)
            value, noted = original(f, *arguments, **named), _noted(path)
            read = _identity(path) == before
        if noted.get("job") == self._job:
            step, batches, skipped = (int(noted.get(x, 0)) for x in ("step", "batches", "skipped"))
            self._loop.resume_at(step, batches, skipped)
        return value

    def _note_step(self, path: Path) -> None:
        if self._loop.session is None or not zipfile.is_zipfile(path):
            return
        step = {
            "job": self._job,
            "step": self._loop.number,
            "batches": self._loop.data.batches_per_step,
            "skipped": self._loop.data.skipped,
        }
        with zipfile.ZipFile(path, "a") as file:
            file.writestr(_place(file), json.dumps(step))


def _identity(path: Path) -> tuple[int, int] | None:
    """Tell a file from one that takes its name later."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _noted(path: Path) -> dict[str, Any]:
    """Return what ``_note_step`` has written into a file; empty without it."""
    if not zipfile.is_zipfile(path):
        return {}
    with zipfile.ZipFile(path) as file:
        place = _place(file)
        if place not in file.namelist() or file.getinfo(place).file_size > _MAX_BYTES:
            return {}
        noted: dict[str, Any] = json.loads(file.read(place))
        return noted


def _place(file: zipfile.ZipFile) -> str:
    folder = next(iter(file.namelist()), "").partition("/")[0]
    return f"{folder}/{_ENTRY}"
