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
        """Read the file, and let the loop begin at its step, if it is one of this job's."""
        value = original(f, *arguments, **named)
        if isinstance(f, str | os.PathLike):
            self._resume(Path(f))
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

    def _resume(self, path: Path) -> None:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as file:
            place = _place(file)
            if place not in file.namelist() or file.getinfo(place).file_size > _MAX_BYTES:
                return
            noted = json.loads(file.read(place))
        if noted["job"] == self._job:
            skipped = int(noted.get("skipped", 0))
            self._loop.resume_at(int(noted["step"]), int(noted["batches"]), skipped)


def _place(file: zipfile.ZipFile) -> str:
    folder = next(iter(file.namelist()), "").partition("/")[0]
    return f"{folder}/{_ENTRY}"
