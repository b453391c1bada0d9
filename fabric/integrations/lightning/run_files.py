"""The files of a run, and the states of its callbacks: one folder and one log, whichever replica writes.

Lightning numbers the folder of a logger in each process. Here the number is shared state. A replica that
becomes the writer goes on in the job's folder, and first writes what the writer before it may have missed.
"""

import csv
import importlib
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from fabric.integrations.lightning.release import ROOT

_pl: Any = importlib.import_module(ROOT)
_callbacks: Any = importlib.import_module(f"{ROOT}.callbacks")
_loggers: Any = importlib.import_module(f"{ROOT}.loggers")
_ranks: Any = importlib.import_module("lightning_utilities.core.rank_zero").rank_zero_only
_log_hyperparams: Any = importlib.import_module(f"{ROOT}.loggers.utilities")._log_hyperparams  # noqa: SLF001


def overrides(thing: Any, base: Any, name: str) -> bool:
    """Whether the class of ``thing`` has a method ``name`` of its own in place of that of ``base``."""
    return getattr(type(thing), name) is not getattr(base, name)


def saves_by_time(callback: Any) -> bool:
    """Whether ``callback`` is a ModelCheckpoint that follows the clock of its own replica."""
    return getattr(callback, "_train_time_interval", None) is not None


class CallbackStates:
    """The states of all callbacks of a Trainer that have one, and the ``files`` to which their paths lead."""

    def __init__(self, trainer: Any, files: Any) -> None:
        self._files = files
        stateful = [x for x in trainer.callbacks if overrides(x, _pl.Callback, "state_dict")]
        shared = [x for x in stateful if not saves_by_time(x)]
        self._callbacks = {f"{n} {type(x).__name__}": x for n, x in enumerate(shared)}

    def state_dict(self) -> dict[str, Any]:
        states = {}
        for name, callback in self._callbacks.items():
            states[name] = callback.state_dict()
            if isinstance(callback, _callbacks.ModelCheckpoint):
                start = callback.dirpath or ""
                states[name] = _with_paths(states[name], partial(os.path.relpath, start=start))
                del states[name]["dirpath"]
        return {"files": self._files.state_dict(), "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the folders first, and then the callbacks' states."""
        self._files.load_state_dict(state["files"])
        for name, saved in state["states"].items():
            callback = self._callbacks[name]
            if isinstance(callback, _callbacks.ModelCheckpoint):
                own = _with_paths(saved, lambda x, y=callback: os.path.normpath(Path(y.dirpath or "", x)))
                callback.load_state_dict({**own, "dirpath": callback.dirpath})
                callback.current_score = saved["current_score"]  # which Lightning leaves out
            else:
                callback.load_state_dict(saved)


def averaged_models(trainer: Any) -> dict[str, Any]:
    """Return the models of WeightAveraging, which its own state lacks, as objects of the shared state."""
    models = [getattr(x, "_average_model", None) for x in trainer.callbacks]
    return {f"average {n}": x for n, x in enumerate(models) if x is not None}


class HookState:
    """The state that a LightningModule brings into checkpoints, and takes from them, by its hooks."""

    def __init__(self, module: Any, trainer: Any) -> None:
        self._module, self._trainer = module, trainer

    def state_dict(self) -> dict[str, Any]:
        """Return what the hook adds to a checkpoint."""
        checkpoint = self._checkpoint()
        before = set(checkpoint)
        self._module.on_save_checkpoint(checkpoint)
        return {name: value for name, value in checkpoint.items() if name not in before}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Hand what the hook of another replica has added to this one's hook."""
        self._module.on_load_checkpoint({**self._checkpoint(), **state})

    def _checkpoint(self) -> dict[str, Any]:
        trainer = self._trainer
        return {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": _pl.__version__,
            "state_dict": self._module.state_dict(),
        }


def hook_states(trainer: Any) -> dict[str, Any]:
    """Return the states that the module's and the data module's own code keeps, as objects to share."""
    module, data = trainer.lightning_module, trainer.datamodule
    states: dict[str, Any] = {}
    hooks = ("on_save_checkpoint", "on_load_checkpoint")
    if all(overrides(module, _pl.LightningModule, x) for x in hooks):
        states["module hooks"] = HookState(module, trainer)
    if data is not None and overrides(data, _pl.LightningDataModule, "state_dict"):
        states["data module"] = data
    return states


def _with_paths(state: Mapping[str, Any], change: Any) -> dict[str, Any]:
    """Return a ModelCheckpoint's state with other paths: its folder may be another one on each host."""
    best = {path and change(path): score for path, score in state["best_k_models"].items()}
    names = ("best_model_path", "kth_best_model_path", "last_model_path")
    return {**state, "best_k_models": best, **{x: state[x] and change(state[x]) for x in names}}


class RunFiles:
    """The numbers of a Trainer's log folders, and the checkpoints in the folders of its callbacks."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._numbered = [x for x in trainer.loggers if hasattr(x, "_get_next_version")]
        kept = [x for x in trainer.callbacks if isinstance(x, _callbacks.ModelCheckpoint)]
        timed = {x.dirpath for x in kept if saves_by_time(x)}
        self._checkpoints = [x for x in kept if x.dirpath and x.dirpath not in timed]
        self._saved = {
            f"{n} {path.relative_to(x.dirpath)}"
            for n, x in enumerate(self._checkpoints)
            for path in Path(x.dirpath).rglob("*")
            if path.is_file()
        }
        for callback in self._checkpoints:
            callback.file_exists = self._exists

    # --- checkpoints ----------------------------------------------------------------------------------------

    def note_saved(self, path: Any) -> None:
        """Note that the job saves a checkpoint at ``path``, on whichever replica."""
        self._saved |= self._names(path)

    def note_removed(self, path: Any) -> None:
        self._saved -= self._names(path)

    def _exists(self, path: Any, _trainer: Any = None) -> bool:
        """Whether the job has a file at ``path``: the same answer on all replicas, at any time."""
        return bool(self._names(path) & self._saved)

    def _names(self, path: Any) -> set[str]:
        names = ((n, os.path.relpath(str(path), x.dirpath)) for n, x in enumerate(self._checkpoints))
        return {f"{n} {name}" for n, name in names if not name.startswith(os.pardir)}

    # --- shared state ---------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the numbers of the log folders, and the names of the checkpoints."""
        return {"versions": [x.version for x in self._numbered], "saved": sorted(self._saved)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for logger, version in zip(self._numbered, state["versions"], strict=True):
            if logger.version != version:
                before = logger.log_dir
                logger._version, logger._experiment = version, None  # noqa: SLF001
                for callback in self._checkpoints:
                    if str(callback.dirpath).startswith(before + os.sep):  # it lies in the logger's folder
                        callback.dirpath = str(
                            Path(logger.log_dir, os.path.relpath(callback.dirpath, before))
                        )
        self._saved = set(state["saved"])


def write_nothing(trainer: Any) -> None:
    """Let this replica write neither folders nor logs, until a step shows that it is the writer."""
    _ranks.rank = 1
    for callback in _config_savers(trainer):
        callback.already_saved = True


def _config_savers(trainer: Any) -> list[Any]:
    """Return the callbacks that write LightningCLI's settings. The import of their class would cost time."""
    return [x for x in trainer.callbacks if "SaveConfigCallback" in (y.__name__ for y in type(x).__mro__)]


class LogWriter:
    """Lets one replica write the logs of ``trainer``, and another one go on where that replica ends."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # Calls since the newest commit, where another replica writes.
        self._missed: list[tuple[Any, Any, int | None]] = []
        for logger in trainer.loggers:
            logger.log_metrics = self._watched(logger, logger.log_metrics)

    def turn(self, is_writer: bool, committed: bool = False) -> None:
        """Note whether this replica writes; ``committed``: a step has just been committed."""
        begins = is_writer and _ranks.rank != 0
        _ranks.rank = 0 if is_writer else 1
        if begins:
            self._begin()
        if committed:
            self._missed.clear()

    def _watched(self, logger: Any, write: Any) -> Any:
        def log_metrics(metrics: Any, step: int | None = None) -> None:
            if _ranks.rank:
                self._missed.append((logger, metrics, step))
            else:
                write(metrics=metrics, step=step)

        return log_metrics

    def _begin(self) -> None:
        """Go on with the logs of the writer before, which may have ended before its newest lines."""
        trainer, kinds = self._trainer, (_loggers.CSVLogger,)
        logged = {id(x): _go_on(x) for x in trainer.loggers if isinstance(x, kinds)}
        if trainer.enable_autolog_hparams:
            _log_hyperparams(trainer)
        for callback in _config_savers(trainer):
            callback.already_saved, callback.overwrite = False, True  # the writer before wrote the same file
            callback.setup(trainer, trainer.lightning_module, "fit")
        for logger, metrics, step in self._missed:
            if not logged.get(id(logger), set()) & {(step, name) for name in metrics if name != "epoch"}:
                logger.log_metrics(metrics=metrics, step=step)
                logger.save()


def _go_on(logger: Any) -> set[tuple[int, str]]:
    """Let a CSVLogger append to the file of the writer before; return the steps and names in the file."""
    path = Path(logger.log_dir, "metrics.csv")
    aside = path.with_suffix(".kept")
    if path.is_file():
        path.replace(aside)  # Lightning deletes a file that it finds
    writer = logger.experiment
    if not aside.is_file():
        return set()
    content = aside.read_bytes()
    lines = content[: content.rfind(b"\n") + 1]  # the writer before may have ended within a line
    if lines != content:
        aside.write_bytes(lines)
    aside.replace(path)
    rows = list(csv.DictReader(lines.decode().splitlines()))
    writer.metrics_keys = sorted(rows[0]) if rows else []
    return {(int(row["step"]), name) for row in rows for name, value in row.items() if value}
