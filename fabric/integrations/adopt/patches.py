"""The places of PyTorch at which an adopted script is noticed, while it runs.

Each replacement calls the original but where the loop only counts, see ``adopted_loop.py``.
"""

import contextlib
import functools
import json
import os
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

if TYPE_CHECKING:
    from fabric.integrations.adopt.adopted_loop import AdoptedLoop

# The name of the entry in the archive's only folder; torch does not look for it.
_ENTRY = "fabric-step.json"
_MAX_BYTES = 4096
Call = Callable[..., Any]


class SavedFiles:
    """Stands for ``torch.save`` and ``torch.load`` while ``loop`` runs; ``job`` is the job's name.

    One replica writes each file, under another name first. The file has an entry more, with the step of the
    loop. So a script that goes on from its own file, as after a restart, begins at that step.
    """

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


@contextlib.contextmanager
def patched(loop: "AdoptedLoop", job: str) -> Iterator[None]:
    """Within this context ``loop`` notices what the script does."""
    files = SavedFiles(loop, job)
    scaler = torch.amp.GradScaler
    with contextlib.ExitStack() as stack:
        for owner, name, replace in (
            (torch.autograd, "backward", _backward),
            (torch.nn.utils, "clip_grad_norm_", _clip),
            (clip_grad, "clip_grad_norm_", _clip),
            (torch.nn.utils, "clip_grad_value_", _clip),
            (clip_grad, "clip_grad_value_", _clip),
            (scaler, "unscale_", _unscale),
            (scaler, "step", _scaler_step),
            (scaler, "update", _scaler_update),
            (DataLoader, "__iter__", _iterate),
            (DataLoader, "__len__", _length),
            (torch, "save", lambda _, original: functools.partial(files.save, original)),
            (torch, "load", lambda _, original: functools.partial(files.load, original)),
        ):
            original = getattr(owner, name)
            setattr(owner, name, replace(loop, original))
            stack.callback(setattr, owner, name, original)
        before = register_optimizer_step_pre_hook(functools.partial(_before_step, loop))
        stack.callback(before.remove)
        after = register_optimizer_step_post_hook(lambda *_: loop.after_update())
        stack.callback(after.remove)
        yield


def _backward(loop: "AdoptedLoop", original: Call) -> Call:
    @functools.wraps(original)
    def backward(*arguments: Any, **named: Any) -> None:
        loop.on_backward()
        if loop.computes:
            original(*arguments, **named)
        loop.after_backward()

    return backward


def _clip(loop: "AdoptedLoop", original: Call) -> Call:
    @functools.wraps(original)
    def clip(parameters: Any, *arguments: Any, **named: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        loop.on_gradient_use()
        return original(parameters, *arguments, **named)

    return clip


def _unscale(loop: "AdoptedLoop", original: Call) -> Call:
    @functools.wraps(original)
    def unscale_(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        loop.on_gradient_use()
        if loop.updates:
            original(scaler, optimizer)

    return unscale_


def _scaler_step(loop: "AdoptedLoop", original: Call) -> Call:
    @functools.wraps(original)
    def step(scaler: torch.amp.GradScaler, optimizer: Any, *arguments: Any, **named: Any) -> float | None:
        if not scaler.is_enabled():
            result: float | None = original(scaler, optimizer, *arguments, **named)
            return result
        loop.on_gradient_use()
        result = original(scaler, optimizer, *arguments, **named) if loop.updates else None
        loop.after_update()  # where a gradient is not finite, the optimizer's own step is not called
        return result

    return step


def _scaler_update(loop: "AdoptedLoop", original: Call) -> Call:
    @functools.wraps(original)
    def update(scaler: torch.amp.GradScaler, *arguments: Any, **named: Any) -> None:
        if loop.updates:
            original(scaler, *arguments, **named)

    return update


def _before_step(loop: "AdoptedLoop", optimizer: Any, arguments: Any, named: Any) -> None:
    closure = arguments[1] if len(arguments) > 1 else named.get("closure")  # the optimizer comes first
    if not loop.on_update(optimizer, closure):
        # The optimizers change no parameter without a gradient.
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None


# Python binds functions of a class to the instance, but not methods of another object.
def _iterate(loop: "AdoptedLoop", _: Call) -> Call:
    return lambda loader, data=loop.data: data.iterate(loader)


def _length(loop: "AdoptedLoop", _: Call) -> Call:
    return lambda loader, data=loop.data: data.length(loader)
