"""The counters of a Trainer as shared state: a replica that joins logs and reports as the others do."""

from collections.abc import Mapping
from typing import Any

import torch

from fabric.integrations.huggingface.trl import TrlFigures

# Attributes of the Trainer, and of its state, that count since the training began.
_OF_TRAINER = ("_total_loss_scalar", "_globalstep_last_logged", "_initial_global_step", "current_flos")
_OF_STATE = ("num_input_tokens_seen", "total_flos", "best_metric", "best_global_step")


class TrainerCounters:
    """``trainer`` may lack the attributes until its loop begins; the counters begin at ``step`` then."""

    def __init__(self, trainer: Any, step: int, figures: TrlFigures) -> None:
        self._trainer = trainer
        self._figures = figures
        self._values: dict[str, Any] = {
            "_tr_loss": 0.0,
            "_total_loss_scalar": 0.0,
            "_globalstep_last_logged": step,
            "_initial_global_step": step,
            "current_flos": 0.0,
            **{name: getattr(trainer.state, name) for name in _OF_STATE},
            "callbacks": _callback_states(trainer),
            "figures": figures.state_dict(),
        }

    @property
    def has_callback_states(self) -> bool:
        """Whether callbacks have a state, which an evaluation may change."""
        return bool(self._values["callbacks"])

    def collect(self) -> None:
        """Take the counters from the Trainer, at a step boundary."""
        trainer = self._trainer
        # The Trainer adds these up when it logs, and where it saves: on the one replica that writes.
        trainer.state.total_flos += trainer.current_flos
        trainer.current_flos = 0.0
        self._values = {
            "_tr_loss": trainer._tr_loss.item(),  # noqa: SLF001
            **{name: getattr(trainer, name) for name in _OF_TRAINER},
            **{name: getattr(trainer.state, name) for name in _OF_STATE},
            "callbacks": _callback_states(trainer),
            "figures": self._figures.state_dict(),
        }

    def apply(self) -> None:
        """Put the counters into the Trainer."""
        trainer, values = self._trainer, self._values
        trainer._tr_loss = torch.tensor(values["_tr_loss"], device=trainer.args.device)  # noqa: SLF001
        for name in _OF_TRAINER:
            setattr(trainer, name, values[name])
        for name in _OF_STATE:
            setattr(trainer.state, name, values[name])
        self._figures.load_state_dict(values["figures"])
        for callback, attributes in zip(_stateful(trainer), values["callbacks"], strict=False):
            for name, value in attributes.items():
                setattr(callback, name, value)

    def state_dict(self) -> dict[str, Any]:
        """Return the counters of the last step boundary."""
        return self._values

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the job's counters."""
        self._values = dict(state)
        self.apply()


def _stateful(trainer: Any) -> list[Any]:
    """Return the callbacks that the Trainer itself saves in its checkpoints, such as early stopping."""
    return [x for x in trainer.callback_handler.callbacks if hasattr(x, "state") and hasattr(x, "from_state")]


def _callback_states(trainer: Any) -> list[dict[str, Any]]:
    return [dict(callback.state()["attributes"]) for callback in _stateful(trainer)]
