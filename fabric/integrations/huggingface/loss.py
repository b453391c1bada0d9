"""How a Trainer's loss of one micro-batch enters the average of a step.

The Trainer's rule for R processes: what their micro-batches give to ``backward`` is summed and divided by R,
or by their number in a short last step that has fewer than R.
A loss that is divided by ``num_items_in_batch`` is a sum over tokens, divided by the tokens of the whole
step. No replica knows that number before the step. So such a loss is divided by the micro-batch's own
tokens, and weighed by them.
"""

import enum
import math
from typing import Any

import torch

from fabric.errors import ConfigError

_CONVERSIONS = {
    torch.Tensor.item,
    torch.Tensor.tolist,
    torch.Tensor.numpy,
    torch.Tensor.detach,
    torch.Tensor.__int__,
    torch.Tensor.__float__,
    torch.Tensor.__index__,
}


class Rule(enum.Enum):
    """How the losses of micro-batches make the loss of a step."""

    UNKNOWN = enum.auto()  # no loss of this process has shown it
    TOKENS = enum.auto()  # the loss is divided by num_items_in_batch
    SUM = enum.auto()  # the loss does not depend on num_items_in_batch


class ItemCount(torch.Tensor):
    """``num_items_in_batch`` of the first micro-batch. It notes whether the loss made a number of it."""

    converted = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As Tensor's, with the note."""
        if func in _CONVERSIONS:
            ItemCount.converted = True
        return super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]


class LossRule:
    """Finds out once how the loss of ``trainer`` depends on ``num_items_in_batch``."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        # A Trainer may say it. Releases of transformers before 5.19 do not ask.
        is_scaled = getattr(trainer, "loss_is_scaled_for_ga", None)
        self.rule = {None: Rule.UNKNOWN, True: Rule.TOKENS, False: Rule.SUM}[is_scaled]
        self.number: float | None = None  # num_items_in_batch of the micro-batch, or None
        self._count: torch.Tensor | None = None

    def items(self, batch: Any) -> Any:
        """Return ``num_items_in_batch`` of one micro-batch, as the loss is to get it."""
        trainer = self._trainer
        items = trainer._get_num_items_in_batch([batch], trainer.args.device)  # noqa: SLF001
        self._count, self.number = None, None if items is None else float(items)
        if items is None or self.rule is not Rule.UNKNOWN or not torch.is_tensor(items):
            return items
        count = items.to(torch.float32)
        if not trainer.args.torch_compile:  # a compiled model makes no number of a tensor
            count, ItemCount.converted = count.as_subclass(ItemCount), False
        self._count = count.requires_grad_()
        return self._count

    def look_at(self, loss: torch.Tensor) -> None:
        """Learn the rule from the first loss, before its backward. Raises ConfigError where none holds."""
        count, self._count = self._count, None
        if count is None:
            return
        slopes: Any = torch.autograd.grad(loss, [count], retain_graph=True, allow_unused=True)
        slope = slopes[0]
        name = type(self._trainer).__name__
        remedy = f"set loss_is_scaled_for_ga in {name}, as the Trainer's documentation of compute_loss says"
        if slope is None:
            if isinstance(count, ItemCount) and ItemCount.converted:
                raise ConfigError(
                    f"the loss of {name} makes a number of num_items_in_batch, so FabricTrainer cannot see "
                    f"whether it divides by it: {remedy}"
                )
            self.rule = Rule.SUM
            return
        value, part = float(loss), float(slope) * (self.number or 0.0)
        if value == 0.0 or abs(value + part) <= 1e-3 * abs(value):
            self.rule = Rule.TOKENS  # loss = sum / count, whose slope is -loss / count
        elif not math.isnan(value):
            raise ConfigError(
                f"{name} divides only a part of the loss by num_items_in_batch (as with a router's auxiliary "
                "loss), which FabricTrainer cannot keep equal: turn the other part off, or divide all of it "
                f"and {remedy}"
            )


def weight_of(rule: Rule, number: float | None) -> float:
    """Return the weight of a micro-batch in the step's average."""
    return 1.0 if number is None or rule is Rule.SUM else number
