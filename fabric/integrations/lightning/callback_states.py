"""The states of callbacks, and of the hooks that Lightning saves in checkpoints, as shared state."""

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fabric.integrations.lightning.release import ROOT

_pl: Any = importlib.import_module(ROOT)
_callbacks: Any = importlib.import_module(f"{ROOT}.callbacks")
_Paths = dict[str, Any]


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
        """Return the callbacks' states by name."""
        states = {
            name: _relative(x) if isinstance(x, _callbacks.ModelCheckpoint) else x.state_dict()
            for name, x in self._callbacks.items()
        }
        return {"files": self._files.state_dict(), "states": states}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the folders first, and then the callbacks' states."""
        self._files.load_state_dict(state["files"])
        for name, saved in state["states"].items():
            callback = self._callbacks[name]
            if isinstance(callback, _callbacks.ModelCheckpoint):
                callback.load_state_dict(_absolute(callback, saved))
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

    @staticmethod
    def is_used(module: Any) -> bool:
        """Whether ``module`` has both hooks."""
        base = _pl.LightningModule
        return all(overrides(module, base, x) for x in ("on_save_checkpoint", "on_load_checkpoint"))

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
    if HookState.is_used(module):
        states["module hooks"] = HookState(module, trainer)
    if data is not None and overrides(data, _pl.LightningDataModule, "state_dict"):
        states["data module"] = data
    return states


# --- the paths of a ModelCheckpoint, which may lie in another folder on each host ---------------------------


def _relative(callback: Any) -> dict[str, Any]:
    """Return the callback's state with its paths relative to its folder."""
    folder = str(callback.dirpath or "")
    state = _with_paths(callback.state_dict(), lambda path: os.path.relpath(path, folder) if path else "")
    return {name: value for name, value in state.items() if name != "dirpath"}


def _absolute(callback: Any, state: Mapping[str, Any]) -> dict[str, Any]:
    folder = str(callback.dirpath or "")
    own = _with_paths(state, lambda path: os.path.normpath(Path(folder, path)) if path else "")
    return {**own, "dirpath": callback.dirpath}


def _with_paths(state: Mapping[str, Any], change: Any) -> _Paths:
    best = {change(path): score for path, score in state["best_k_models"].items()}
    names = ("best_model_path", "kth_best_model_path", "last_model_path")
    return {**state, "best_k_models": best, **{name: change(state[name]) for name in names}}
