"""The training loop of a script that knows nothing of fabric: when it exchanges, and when it only counts.

The loop exchanges at the first use of its gradient: clipping, unscaling, or the optimizer's step. A replica
that joins has the job's state at once, but its loop's own counters (epochs, hand-set learning rates, log
intervals) begin at 0. So its loop goes over the steps that the job has made, without computing them: no
forward, no backward, no update, no data are read. The job's gradient waits until the loop has come to its
step. A loop that is ahead of the job cannot go back, so its process starts again.
"""

import contextlib
import functools
import json
import os
import shutil
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils import clip_grad
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader

import fabric.client
from fabric.client.data.loader import data_slot_of
from fabric.client.data.randomness import seed_everything
from fabric.client.gradients.forward_buffers import default_buffers
from fabric.client.loop.hand_updates import HandUpdates
from fabric.client.loop.later_changes import ONE_TRAINING
from fabric.client.loop.step import Step
from fabric.client.loop.unshared_objects import ADVICE, MORE_OPTIMIZERS, belongs
from fabric.errors import ConfigError
from fabric.integrations.adopt.adopted_data import AdoptedData, InputWatch
from fabric.integrations.adopt.living_objects import OWN_WAY, TrainingObjects
from fabric.integrations.script_state import (
    RepeatedOutputs,
    ScriptGradients,
    ScriptState,
    leave_behind,
    say_goes_over,
)
from fabric.integrations.user_source import measured_value
from fabric.runtime.config import Settings, parse_replicas

Attach = Callable[..., fabric.client.Session | fabric.client.SoloSession]

# Sentences for a loop of one's own, for a script that calls nothing of fabric.
_WORDS = {
    "let it count session.committed_step, so that all loops end at the same step": (
        "end the script's loop after a number of steps; with --adopt it cannot follow what it measures, "
        "because a replica that joins has not measured what the others have"
    ),
    "session.loader": "the DataLoader",
    MORE_OPTIMIZERS: OWN_WAY,
    ADVICE: "with --adopt fabric cannot share it: attach the model with fabric.client.attach(..., state=)",
}


class AdoptedLoop:
    """The state of one script's loop; the replacements of ``patched`` call it. ``attach`` is fabric's own."""

    def __init__(self, settings: Settings, attach: Attach) -> None:
        self.number = 0  # the step that the loop is at, as the job counts
        self.computes = True  # whether forward, backward and data are real
        self.session: fabric.client.Session | None = None
        self.objects: TrainingObjects | None = None
        self._settings = settings
        self._attach = attach
        self._slot = data_slot_of(settings.replica, parse_replicas(settings.replicas)[1], None)
        self.data = AdoptedData(self, parse_replicas(settings.replicas)[1], self._slot)
        self._inputs: InputWatch | None = None
        self._outputs = RepeatedOutputs()
        self._by_hand = HandUpdates()
        self._has_gradient = False  # a backward pass has run since the last update
        self._is_between = False  # the update is done, and the script has not got its next batch
        self._exchanged = False  # the gradient of this step is exchanged, and the update is to come
        self.updates = True  # whether that update is real
        self.has_left = False  # the session has ended this process
        self._waiting: Step | None = None  # a committed step to which the loop has not come yet
        self._skipped = False  # the newest step that the loop has come to has no update
        self._gradients: ScriptGradients | None = None
        self._schedule: ScriptState  # the values that the loop advances, as they were before an exchange

    # --- what the script does -----------------------------------------------------------------------------

    def on_backward(self, losses: object) -> None:
        """The script is about to run a backward pass from ``losses``."""
        if self.session is None:
            if self._by_hand.have_begun():
                raise ConfigError(
                    "the script changes parameters by hand between backward passes, and --adopt exchanges at "
                    "the step of an optimizer: let an optimizer such as torch.optim.SGD change them, or "
                    f"{OWN_WAY}"
                )
            self._by_hand.note(losses)
        has_schedulers = self.objects is not None and bool(self.objects.schedulers)
        if self._exchanged and not has_schedulers and not self._holds_gradient():
            # All replicas have dropped a gradient, as one whose norm is not finite. A scheduler that does not
            # advance then would be ahead in a replica that joins.
            self.after_update()
        if self._exchanged:
            raise ConfigError(
                "the script runs another backward pass between the first use of the gradient and its update, "
                f"which --adopt cannot exchange: {OWN_WAY}"
            )
        if self._gradients is not None and self._waiting is None and not self._has_gradient:
            self._gradients.keep()
        self._has_gradient = True
        self.data.note_backward()

    def _holds_gradient(self) -> bool:
        """Whether a parameter that the script trains has a gradient that is not zero."""
        assert self.objects is not None
        gradients = (p.grad for group in self.objects.optimizer.param_groups for p in group["params"])
        return any(x is not None and bool(torch.count_nonzero(x)) for x in gradients)

    def after_backward(self) -> None:
        """The gradients are as the script's backward pass made them, or zeros where it did not run."""
        if self._gradients is not None and self.computes:
            self._gradients.note()
        elif self._gradients is not None:
            self._gradients.fill()

    def on_gradient_use(self) -> None:
        """Exchange, at the first use of the gradient since the backward pass."""
        if self._has_gradient and not self._exchanged:
            self._exchanged = True
            self._reach_update()

    def on_update(self, optimizer: torch.optim.Optimizer, arguments: Any, named: Any) -> None:
        """Exchange if clipping has not. Leave no gradient, and so no update, where the loop only counts."""
        own = optimizer if self.objects is None else self.objects.optimizer
        if optimizer is not own and not belongs(optimizer, [own]):
            raise ConfigError(
                f"the script trains with another {type(optimizer).__name__} than in its first step, and a "
                f"job is one training: {ONE_TRAINING}"
            )
        if (arguments[1] if len(arguments) > 1 else named.get("closure")) is not None:
            raise ConfigError(
                f"the script gives its optimizer a closure, which computes gradients in the step: {OWN_WAY}"
            )
        if not self._has_gradient:
            raise ConfigError(
                "the script's optimizer makes a step without a backward pass before it, so --adopt does not "
                f"know what to exchange: {OWN_WAY}"
            )
        self.on_gradient_use()
        if not self.updates and self._gradients is not None:
            self._gradients.drop()

    def after_update(self) -> None:
        """The update of this step is done, or was left out, as by a scaler."""
        if not self.updates and self._gradients is not None:
            self._gradients.show()
        elif self._skipped and self._gradients is not None:
            self._gradients.put_back()
            self._skipped = False
        self._has_gradient = self._exchanged = False
        if self.data.sampler is not None:
            self._is_between = True
            seed_everything(0, self.number, -1)
        elif self.session is not None:  # another seed on each replica
            seed_everything(0, self.number, self._slot)

    def before_batch(self) -> None:
        """The script is about to get a batch of the job: from now on its random numbers are its replica's.

        Those between an update and this are equal on all replicas, as noise on the weights must be.
        """
        if self._is_between:
            self._is_between = False
            seed_everything(0, self.number, self._slot)

    def resume_at(self, step: int, batches_per_step: int, skipped: int) -> None:
        """The script has loaded a file that it saved when the loop had made ``step`` steps."""
        if self.session is None:
            self.number = step
            self.data.resume(step, batches_per_step, skipped)

    def finish(self) -> None:
        """The script has ended: leave the job. Raises ConfigError where the script has not trained here."""
        if self.session is None and self.number:
            sys.stderr.write(
                f"fabric: {self._settings.replica}: the script has loaded its file of step {self.number} and "
                "has ended without a further step: nothing is left to train\n"
            )
            return
        if self.session is None:
            raise ConfigError(
                "the script has ended without an optimizer step in this process, and --adopt does not follow "
                f"the processes that a script starts: start each rank with fabric launch, or {OWN_WAY}"
            )
        self._outputs.close()
        self.session.close()

    @property
    def is_writer(self) -> bool:
        """Whether this process writes the script's files: not while its loop only counts."""
        if self.session is None:
            return True
        return self._waiting is None and self.session.is_writer

    # --- the steps of the job -----------------------------------------------------------------------------

    def _reach_update(self) -> None:
        """Bring the gradient of step ``number`` into ``.grad``, or find that the job has made that step."""
        if self.session is None:
            self._begin()
        if self._waiting is None:
            self._exchange()
        self.number += 1
        self.data.next_step()
        if self._waiting is not None and self._waiting.number < self.number:
            step, self._waiting = self._waiting, None
            assert self._gradients is not None
            self._gradients.bring_back()
            self._schedule.release()
            assert self.session is not None
            self.session.handover.resume(step.number)
            self.updates, self._skipped = True, step.skipped
            self._set_computes(not step.replayed)
        elif self._waiting is not None:
            self.updates = False

    def _exchange(self) -> None:
        session, objects, gradients = self.session, self.objects, self._gradients
        assert session is not None and objects is not None and gradients is not None
        if self.computes:
            gradients.check()
        else:
            gradients.drop()
        if self._inputs is not None and self.computes:
            session.metrics(**self._inputs.take())
        self._schedule.keep()
        try:
            step = session.exchange(weight=self.data.weight)
        except SystemExit:
            self.has_left = True
            raise
        if step.number < self.number:
            leave_behind(self._settings.replica, self.number, step.number)
        if self._inputs is not None and self.computes:
            self._inputs.judge(step.metrics)
        if step.number == self.number:
            self.updates, self._skipped = True, step.skipped
            self._set_computes(not step.replayed)
            return
        # Let the loop count up to the step without computing; its schedulers go with it from where they were.
        say_goes_over(self._settings.replica, self.number, step.number)
        self._waiting = step
        gradients.set_aside()
        gradients.fill()
        self._schedule.put_back()
        self._schedule.hold(objects.model)
        self._set_computes(False)

    def _set_computes(self, computes: bool) -> None:
        """Let the loop compute, or only count. At the job's step it computes if its gradients are wanted."""
        assert self.objects is not None
        if computes != self.computes:
            self.computes = computes
            self._outputs.close() if computes else self._outputs.open(self.objects.model)

    def _begin(self) -> None:
        """Attach what the script has made by now."""
        objects = TrainingObjects.find()
        measured = measured_value(sys._getframe(1), [objects.model])  # noqa: SLF001
        if measured:
            raise ConfigError(
                f"{measured}, and a replica that joins has not measured what the others have: end the loop "
                f"after a number of steps, and weigh the loss by a count of steps, or {OWN_WAY}"
            )
        self.data.begin()
        buffers = default_buffers(objects.model)
        self._gradients = ScriptGradients(objects.model)
        state = objects.state | {"gradients": self._gradients}
        session = self._attach(
            objects.model, objects.optimizer, state=state, buffers=buffers, step=self.number
        )
        assert isinstance(session, fabric.client.Session)
        session.say_in(_WORDS)
        session.randomness.gives_back = False
        self.objects, self.session = objects, session
        self._schedule = ScriptState(objects.schedule, [objects.optimizer])
        if self.data.sampler is not None:
            session.draw_from(self.data.sampler)
        else:
            self._inputs = InputWatch(objects.model)
        averaged = ", its buffers averaged" if buffers == "average" else ""
        sys.stderr.write(
            f"fabric: {self._settings.replica}: adopted {objects.describe()}{averaged} and "
            f"{self.data.describe()}; torch.save writes at one replica only\n"
        )


# The places of PyTorch at which an adopted script is noticed, while it runs. Each replacement calls the
# original but where the loop only counts.

# The name of the entry in the archive's only folder; torch does not look for it.
_ENTRY = "fabric-step.json"
_MAX_BYTES = 4096
_WRITTEN_S, _PAUSE_S = 60.0, 0.02
Call = Callable[..., Any]
# Scripts rename, copy and remove the files that they have saved by these functions.
_CHANGES = {
    os: ("replace", "rename", "remove", "unlink", "link"),
    shutil: ("copyfile", "copy", "copy2", "copytree", "move", "rmtree"),
}


class SavedFiles:
    """Stands for ``torch.save`` and ``torch.load`` while ``loop`` runs; ``job`` is the job's name.

    One replica writes each file, under another name first. It alone renames, copies and removes the file.
    The file has an entry more, with the step of the loop. So a script that goes on from its own file, as
    after a restart, begins at that step.
    """

    def __init__(self, loop: AdoptedLoop, job: str) -> None:
        self._loop = loop
        self._job = job
        # The files that the script has saved or loaded, and their copies, each with the step of its newest
        # save; -1 where the file does not say its step.
        self._saved: dict[Path, int] = {}

    def save(self, original: Callable[..., None], obj: Any, f: Any, *arguments: Any, **named: Any) -> None:
        """Write the file at the one replica that writes; streams are the script's own matter."""
        if not isinstance(f, str | os.PathLike):
            original(obj, f, *arguments, **named)
            return
        notes_step = self._loop.session is not None and named.get("_use_new_zipfile_serialization", True)
        self._saved[Path(f).absolute()] = self._loop.number if notes_step else -1
        if self._loop.is_writer:
            path = Path(f)
            partial = path.with_name(f".{path.name}.{os.getpid()}")
            try:
                original(obj, partial, *arguments, **named)
                self._note_step(partial)
                partial.replace(path)
                _mark_of(path).unlink(missing_ok=True)
            finally:
                partial.unlink(missing_ok=True)

    def load(self, original: Callable[..., Any], f: Any, *arguments: Any, **named: Any) -> Any:
        """Read the file, and let the loop begin at its step, if it is one of this job's.

        A replica that does not write waits until the writer has written what the script has saved, or loads
        an older file at the same step: a replica that has joined may save where the writer does not. The file
        is read again where the writer has put a newer one into its place meanwhile.
        """
        if not isinstance(f, str | os.PathLike):
            return original(f, *arguments, **named)
        path = Path(f)
        saved = self._saved.setdefault(path.absolute(), -1)
        waits, until = saved >= 0 and not self._loop.is_writer, time.monotonic() + _WRITTEN_S
        while True:
            before, noted = _identity(path), _noted(path)
            step = self._step_of(noted)
            if self._loop.session is not None and self._loop.is_writer and 0 <= step < self._loop.number:
                # Tell the others that the writer has come to this step without saving the file again.
                with contextlib.suppress(OSError):
                    _mark_of(path).write_text(json.dumps({"job": self._job, "step": self._loop.number}))
            marked: dict[str, Any] = {}
            with contextlib.suppress(OSError, ValueError):  # there is no mark, or half of one
                marked = json.loads(_mark_of(path).read_text()) if waits else {}
            is_written = step >= saved or (step >= 0 and self._step_of(marked) >= self._loop.number)
            if is_written or not waits:
                value = original(f, *arguments, **named)
                if _identity(path) == before:
                    break
            elif self._loop.is_writer or time.monotonic() > until:
                raise ConfigError(
                    f"the script loads {path}, which it saved at step {saved}, and the replica that writes "
                    "has not written it here: let all replicas share the folder, or start them again"
                )
            else:
                time.sleep(_PAUSE_S)
        if step >= 0:
            self._loop.resume_at(step, int(noted.get("batches", 0)), int(noted.get("skipped", 0)))
        return value

    def close(self) -> None:
        """Remove the marks at the end of the job, also those of a writer that was killed."""
        for path in self._saved:
            with contextlib.suppress(OSError):
                _mark_of(path).unlink()

    def _step_of(self, noted: Mapping[str, Any]) -> int:
        """Return the step of the loop that a file notes; -1 where another job, or none, wrote it."""
        return int(noted.get("step", -1)) if noted.get("job") == self._job else -1

    def change(self, original: Call, *arguments: Any, **named: Any) -> Any:
        """Rename, copy or remove a saved file at the replica that writes; others are the script's matter.

        A file or folder that is not there was changed by the replica that wrote before.
        """
        values = (*arguments, *named.values())
        paths = [Path(x).absolute() for x in values if isinstance(x, str | os.PathLike)]
        is_relative = any(x.endswith("dir_fd") and named[x] is not None for x in named)
        if is_relative or not paths or not any(paths[0] in (x, *x.parents) for x in self._saved):
            return original(*arguments, **named)
        for target in paths[1:]:
            self._saved |= dict.fromkeys((target, target / paths[0].name), self._saved.get(paths[0], -1))
        if self._loop.is_writer:
            try:
                return original(*arguments, **named)
            except FileNotFoundError:
                if os.path.lexists(paths[0]):
                    raise
        return paths[-1]

    def symlink(self, original: Call, src: Any, dst: Any, *arguments: Any, **named: Any) -> None:
        """Make the link at the replica that writes, if it names a saved file, seen from the link's folder."""
        target = Path(dst).absolute().parent / src
        self.change(lambda *_: original(src, dst, *arguments, **named), target, dst)

    def _note_step(self, path: Path) -> None:
        if self._loop.session is None or not zipfile.is_zipfile(path):
            return
        batches, skipped = self._loop.data.batches_per_step, self._loop.data.skipped
        step = {"job": self._job, "step": self._loop.number, "batches": batches, "skipped": skipped}
        with zipfile.ZipFile(path, "a") as file:
            file.writestr(_place(file), json.dumps(step))


def _identity(path: Path) -> tuple[int, int] | None:
    """Tell a file from one that takes its name later."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns


def _mark_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.loaded")


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
def patched(loop: AdoptedLoop, job: str) -> Iterator[None]:
    """Within this context ``loop`` notices what the script does."""
    files = SavedFiles(loop, job)
    scaler = torch.amp.GradScaler
    with contextlib.ExitStack() as stack:
        stack.callback(files.close)
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
            (os, "symlink", lambda _, original: functools.partial(files.symlink, original)),
            *(
                (owner, name, lambda _, original: functools.partial(files.change, original))
                for owner, names in _CHANGES.items()
                for name in names
            ),
        ):
            original = getattr(owner, name)
            setattr(owner, name, replace(loop, original))
            stack.callback(setattr, owner, name, original)
        optimizer: Any = torch.optim.Optimizer
        stack.callback(setattr, optimizer, "profile_hook_step", vars(optimizer)["profile_hook_step"])
        optimizer.profile_hook_step = _hook_step(loop, optimizer.profile_hook_step)
        # A partial: a replay calls hooks of fabric's modules in another thread, and this one may exchange.
        before = register_optimizer_step_pre_hook(functools.partial(loop.on_update))
        stack.callback(before.remove)
        after = register_optimizer_step_post_hook(lambda *_: loop.after_update())
        stack.callback(after.remove)
        yield


def _backward(loop: AdoptedLoop, original: Call) -> Call:
    @functools.wraps(original)
    def backward(tensors: Any, *arguments: Any, **named: Any) -> None:
        loop.on_backward(tensors)
        if loop.computes:
            original(tensors, *arguments, **named)
        loop.after_backward()

    return backward


def _clip(loop: AdoptedLoop, original: Call) -> Call:
    @functools.wraps(original)
    def clip(parameters: Any, *arguments: Any, **named: Any) -> Any:
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        loop.on_gradient_use()
        return original(parameters, *arguments, **named)

    return clip


def _unscale(loop: AdoptedLoop, original: Call) -> Call:
    @functools.wraps(original)
    def unscale_(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        loop.on_gradient_use()
        if loop.updates:
            original(scaler, optimizer)

    return unscale_


def _scaler_step(loop: AdoptedLoop, original: Call) -> Call:
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


def _scaler_update(loop: AdoptedLoop, original: Call) -> Call:
    @functools.wraps(original)
    def update(scaler: torch.amp.GradScaler, *arguments: Any, **named: Any) -> None:
        if loop.updates:
            original(scaler, *arguments, **named)

    return update


def _hook_step(loop: AdoptedLoop, original: Call) -> Any:
    """Let the classes of the script's own optimizers, which may need each gradient, leave updates out."""

    def hook(step: Call) -> Call:
        @functools.wraps(step)
        def update(*arguments: Any, **named: Any) -> Any:
            return step(*arguments, **named) if loop.updates else None

        hooked: Call = original(update)
        return hooked

    return staticmethod(hook)


# Python binds functions of a class to the instance, but not methods of another object.
def _iterate(loop: AdoptedLoop, _: Call) -> Call:
    return lambda loader, data=loop.data: data.iterate(loader)


def _length(loop: AdoptedLoop, _: Call) -> Call:
    return lambda loader, data=loop.data: data.length(loader)
