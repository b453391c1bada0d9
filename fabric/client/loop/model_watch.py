"""Refuses optimizers and models that cannot stay equal on all replicas, and names them.

Refused are optimizers that evaluate the loss again, or hold parameters that nobody shares, and models whose
parameters changed after ``attach``.
"""

import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from fabric.ckpt_server.state.optimizer_extras import remember
from fabric.ckpt_server.state.training_state import capture
from fabric.client.loop.later_changes import refuse_later_changes
from fabric.client.loop.shared_state import SharedValue, with_state
from fabric.client.loop.unshared_objects import (
    ADVICE,
    MORE_OPTIMIZERS,
    AverageWatch,
    OptimizerWatch,
    UnsharedWatch,
    tensors_in,
)
from fabric.client.process.rank_group import RankGradients, RankGroup
from fabric.errors import ConfigError, StateError

# Number of steps between two searches for new parameters: a search walks over every module.
LOOK_EVERY = 10
# Steps in which the objects of ``state=`` are compared before and after the micro-batches.
_COMPARED_STEPS = 3


def refuse_optimizers(optimizers: Collection[torch.optim.Optimizer]) -> None:
    """Raise ConfigError for an optimizer that computes gradients inside ``step``, or is one rank's own."""
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise ConfigError(
            "torch.optim.LBFGS evaluates the loss again inside step, on one replica's own data, so that the "
            "replicas would part: use an optimizer that takes the gradient as it is, such as AdamW or SGD"
        )
    for optimizer in optimizers:
        if type(optimizer).__name__ in ("ZeroRedundancyOptimizer", "PostLocalSGDOptimizer"):
            raise ConfigError(
                f"{type(optimizer).__name__} keeps a state that a rank which joins cannot take over: use the "
                "optimizer that it wraps, or fully_shard"
            )


def refuse_gradient_hooks(model: torch.nn.Module) -> None:
    """Raise ConfigError for a hook of the user's that may change what a parameter's ``.grad`` has added up.

    Hooks of torch's own wrappers communicate, and hooks of ``register_hook`` see one backward pass. Refused
    too is a communication hook of DDP with a state, which a rank that joins would lack.
    """
    for hook, state in (x for module in model.modules() for x in vars(module).get("_comm_hooks", ())):
        if state is not None and not isinstance(state, torch.distributed.ProcessGroup):
            raise ConfigError(
                f"DDP's communication hook {getattr(hook, '__name__', hook)} keeps a "
                f"{type(state).__name__}, which a rank that joins would lack: leave the hook out, choose one "
                'without a state, or say unshared="ignore"'
            )
    for name, parameter in model.named_parameters():
        hooks = getattr(parameter, "_post_accumulate_grad_hooks", None) or {}
        for hook in hooks.values():
            module = getattr(getattr(hook, "func", hook), "__module__", None) or ""
            if module.partition(".")[0] not in ("torch", "fabric"):
                raise ConfigError(
                    f"{name} has a hook of register_post_accumulate_grad_hook, which sees the gradients that "
                    "this replica has added up, before those of all replicas are averaged: change .grad "
                    "before optimizer.step(), use register_hook, which sees the gradient of a micro-batch "
                    'times its weight, or say unshared="ignore"'
                )


def accept_optimizers(
    model: torch.nn.Module, optimizers: Mapping[str, torch.optim.Optimizer], state: Mapping[str, Any]
) -> list[torch.Tensor]:
    """Remember the optimizers; return their parameters outside the model, which ``state`` must hold.

    Raises ConfigError for an optimizer that cannot stay equal on all replicas.
    """
    refuse_optimizers(optimizers.values())
    inside = {id(parameter) for parameter in model.parameters()}
    outside = []
    for name, optimizer in optimizers.items():
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        outside += [p for p in held if p.requires_grad and id(p) not in inside]
        states = [with_state(x).state_dict() for x in state.values()] if outside else []
        shared = {tensor.data_ptr() for tensor in tensors_in(states)}
        lost = next((p for p in outside if p.data_ptr() not in shared), None)
        if lost is not None:
            raise ConfigError(
                f"the {name} has a parameter of shape {list(lost.shape)} that is not in the model, so its "
                "gradient is not averaged and no other replica has it: make it a parameter of the model, or, "
                "where your loop makes its gradient from averaged gradients, pass it in state="
            )
        remember(optimizer, model.named_parameters())
    return outside


class ModelWatch:
    """Remembers which parameters were attached; ``check`` raises StateError naming the first that changed."""

    def __init__(
        self,
        model: torch.nn.Module,
        parameters: Sequence[tuple[str, torch.nn.Parameter]],
        unshared: UnsharedWatch,
        outside: Sequence[torch.Tensor] = (),
        shared: Mapping[str, object] | None = None,
        group: RankGroup | None = None,
        compares: bool = True,
    ) -> None:
        """``compares``: whether ranks that train models of their own are refused."""
        self.ranks = RankGradients(model, group, compares)
        # None where the user has said that what is not shared is meant to be so.
        self.averages: AverageWatch | None = None
        self.others: OptimizerWatch | None = None
        self.compared_steps = _COMPARED_STEPS  # in so many steps ``begin_step`` looks; 0 for adapters
        self._model = model
        self._unshared = unshared
        self._scaled = False
        self._outside = outside  # parameters of the optimizers that are not in the model
        self._attached = [(name, p, p.shape, p.dtype) for name, p in parameters]
        # The dicts, generators and objects of a script's own class among the shared state: micro-batches may
        # leave these changed, unseen by other checks.
        own = {name: type(x).__module__.partition(".")[0] for name, x in (shared or {}).items()}
        self._kept = {
            name: x
            for name, x in (shared or {}).items()
            if isinstance(x, SharedValue)
            or (own[name] not in ("torch", "fabric") and not isinstance(x, torch.nn.Module))
        }
        self._digests: dict[str, str] = {}

    def begin(self) -> None:
        """Check before this process joins its job. Raises ConfigError, see UnsharedWatch."""
        self._unshared.check_when_changed()
        if self.others is not None:
            self.others.begin()

    def watch_others(
        self, shared: Iterable[Any], optimizers: Iterable[torch.optim.Optimizer], held: Iterable[Any]
    ) -> None:
        """Look for averages of the model outside ``shared``, and for optimizers that nothing here holds."""
        trained = [parameter for _, parameter, _, _ in self._attached]
        self.averages = AverageWatch(trained, shared)
        self.others = OptimizerWatch(trained, optimizers, held)

    def say_in(self, words: Mapping[str, str]) -> None:
        """Use these words in sentences, in place of those for a loop of one's own."""
        self.compared_steps = 0
        if self.averages is not None:
            self.averages.advice = words.get(ADVICE, ADVICE)
        if self.others is not None:
            self.others.advice = words.get(MORE_OPTIMIZERS, MORE_OPTIMIZERS)

    def end(self) -> None:
        if self.others is not None:
            self.others.end()

    def begin_step(self) -> None:
        """Note, in the first steps, what the objects of ``state=`` hold before the micro-batches."""
        if self.compared_steps:
            self.compared_steps -= 1
            self._digests = {name: capture({name: x}, 0).digest() for name, x in self._kept.items()}

    def check(self, step: int) -> None:
        """Check before the exchange of ``step``: other members expect the attached parameters."""
        self.ranks.check()
        self.ranks.compare()
        if self.others is not None:
            self.others.step = step
        before, self._digests = self._digests, {}
        for name, digest in before.items():
            if capture({name: self._kept[name]}, 0).digest() != digest:
                raise ConfigError(
                    f"the micro-batches of step {step} change state[{name!r}], and each replica changes it "
                    "by its own data: change it after the loop over the micro-batches by values that all "
                    "replicas have alike, such as step.metrics, or keep it out of state="
                )
        if not self._scaled:
            # By now a scaler that the user's code uses has scaled a loss, so the check finds this scaler.
            self._scaled = True
            self._unshared.check()
            self._check_outside()
            if self.others is not None:
                refuse_later_changes(sys._getframe(), self._model, self.others)  # noqa: SLF001
        for name, parameter, shape, dtype in self._attached:
            if not parameter.requires_grad:
                raise _changed(name, "was frozen")
            if (parameter.shape, parameter.dtype) != (shape, dtype):
                was, is_ = f"{dtype}{list(shape)}", f"{parameter.dtype}{list(parameter.shape)}"
                raise _changed(name, f"was {was} and is {is_}")
        if step % LOOK_EVERY == 0:
            self._look()
            self._unshared.check_when_changed()
        if self.averages is not None:
            self.averages.look(step)

    def _check_outside(self) -> None:
        """Refuse a gradient from backward: only gradients of the model's parameters are averaged."""
        for parameter in self._outside:
            if parameter.grad is not None and parameter.grad.count_nonzero():
                raise ConfigError(
                    f"backward gave a gradient to a parameter of shape {list(parameter.shape)} of the "
                    "optimizer that is not in the model, so each replica would move it by its own data: make "
                    "it a parameter of the model that attach gets"
                )

    def _look(self) -> None:
        now = {name: p for name, p in self._model.named_parameters() if p.requires_grad}
        for name, parameter, _, _ in self._attached:
            current = now.pop(name, None)
            if current is None:
                raise _changed(name, "was removed")
            if current is not parameter:
                raise _changed(name, "was replaced by another tensor")
        if now:
            raise _changed(next(iter(now)), "was added or unfrozen")


def _changed(name: str, what: str) -> StateError:
    remedy = "change the model before its training"
    if "frozen" in what:
        remedy += (
            ", or let it require gradients all the time, and give it to the optimizer later or set the "
            "learning rate of its group to 0"
        )
    return StateError(
        f"the parameter {name} {what} after the training began, and the other replicas do not know that: "
        f"{remedy}, and start all replicas again"
    )
