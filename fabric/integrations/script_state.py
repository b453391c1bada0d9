"""A script's values, gradients and outputs, while its loop goes over steps that the job has made.

The values are those that the script advances. With a Trainer its hooks at the begin of a training and of an
epoch do so, which the members have run.
"""

import copy
import sys
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TextIO

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fabric.client.loop.shared_state import with_state
from fabric.errors import ConfigError
from fabric.exit_codes import RESTART
from fabric.ftar.buckets import local_part
from fabric.integrations.adopt.living_objects import OWN_WAY

_PLAIN = (bool, int, float, str, type(None))


class ScriptState:
    """The state of schedulers and other objects, and the settings of the optimizers' groups.

    A loop that goes over steps may change them as it likes. They have the job's values again when the loop is
    at the job's step.
    """

    def __init__(self, objects: Mapping[str, Any], optimizers: list[Any]) -> None:
        self._objects = {name: with_state(x) for name, x in objects.items()}
        self._optimizers = optimizers
        self._kept: dict[str, Any] | None = None
        self._groups: list[list[dict[str, Any]]] = []
        self._held: list[
            tuple[torch.Tensor, torch.Tensor]
        ] = []  # tensors, and their values as the job has them
        self._moments: list[dict[Any, dict[str, Any]]] = []  # the content of each optimizer's ``state``

    def keep(self) -> None:
        """Note the values as the job has them."""
        self._kept = {name: _copied(x.state_dict()) for name, x in self._objects.items()}
        self._groups = [
            [_copied({k: v for k, v in group.items() if k != "params"}) for group in x.param_groups]
            for x in self._optimizers
        ]

    def put_back(self) -> None:
        """Restore the values of ``keep``."""
        if self._kept is None:
            return
        for name, value in self._kept.items():
            self._objects[name].load_state_dict(value)
        for optimizer, groups in zip(self._optimizers, self._groups, strict=True):
            for group, values in zip(optimizer.param_groups, groups, strict=True):
                group.update(values)
        self._kept = None

    def hold(self, model: torch.nn.Module) -> None:
        """Note the model and the optimizers' moments, in host memory: the loop may change them by hand."""
        self._moments = [{p: dict(values) for p, values in x.state.items()} for x in self._optimizers]
        tensors = [
            *model.parameters(),
            *model.buffers(),
            *filter(torch.is_tensor, tree_leaves(self._moments)),
        ]
        self._held = [(x, local_part(x).detach().to("cpu", copy=True)) for x in tensors]

    @torch.no_grad()
    def release(self) -> None:
        """Restore what ``hold`` has noted."""
        for tensor, value in self._held:
            local_part(tensor).copy_(value)
        for optimizer, moments in zip(self._optimizers, self._moments, strict=False):
            optimizer.state.clear()
            optimizer.state.update(moments)
        self._held, self._moments = [], []


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a state. Most values are plain numbers, whose copy by ``deepcopy`` costs a step too much."""
    return {k: v if type(v) in _PLAIN else copy.deepcopy(v) for k, v in values.items()}


class ScriptGradients:
    """The ``.grad`` of a model's parameters: as backward made them, or while one waits for the loop.

    A script that does not clear its gradient after an update adds to the job's average in its next step. So
    what it keeps is a part of the shared state. It is put back after a step without an update, such as the
    first one of a job whose replicas all start again.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._waiting: list[torch.Tensor | None] | None = None
        self._zeros: list[torch.Tensor] = []  # the gradient of steps that the loop goes over
        self._marks: list[tuple[int, int]] = []  # identity and version of each gradient after backward
        self._kept: dict[str, torch.Tensor] = {}  # the gradients that are left when a step begins, by number
        self.note()

    def keep(self) -> None:
        """Note what the script has left before the first backward pass of a step."""
        left = {str(n): p.grad for n, p in enumerate(self._parameters) if p.grad is not None}
        self._kept = {n: x.detach().clone() for n, x in left.items() if local_part(x).any()}

    def put_back(self) -> None:
        """Let ``.grad`` be what ``keep`` has noted, or the job's."""
        for number, gradient in self._kept.items():
            self._parameters[int(number)].grad = gradient.clone()

    def state_dict(self) -> dict[str, torch.Tensor]:
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        self._kept = {n: x.detach().clone() for n, x in state.items()}

    def note(self) -> None:
        """Note the gradients as they are after a backward pass."""
        self._zeros = []
        self._marks = self._look()

    def check(self) -> None:
        """Raise ConfigError if the script has changed a gradient since ``note``."""
        if self._look() != self._marks:
            raise ConfigError(
                "the script changes its gradients between the backward pass and torch's clipping or the "
                f"update, before --adopt can average them: {OWN_WAY}"
            )

    def drop(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def fill(self) -> None:
        """Leave a gradient of zeros, for code of the script that reads or changes ``.grad``."""
        self._zeros = self._zeros or [torch.zeros_like(parameter) for parameter in self._parameters]
        for zeros in self._zeros:
            zeros.zero_()
        self.show()

    def show(self) -> None:
        """Put the zeros of ``fill`` back, for code that reads ``.grad`` after an update that is left out."""
        for parameter, zeros in zip(self._parameters, self._zeros, strict=True):
            parameter.grad = zeros

    def set_aside(self) -> None:
        """Let the gradients wait for ``bring_back``, unless others wait already."""
        if self._waiting is None:
            self._waiting = [parameter.grad for parameter in self._parameters]
            self.drop()

    def bring_back(self) -> bool:
        """Put the gradients that ``set_aside`` has taken into ``.grad``; return whether there are any."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            for parameter, gradient in zip(self._parameters, waiting, strict=True):
                parameter.grad = gradient
            self._zeros = []
        return waiting is not None

    def _look(self) -> list[tuple[int, int]]:
        gradients: list[Any] = [parameter.grad for parameter in self._parameters]
        return [(0, 0) if g is None else (id(g), g._version) for g in gradients]  # noqa: SLF001


class RepeatedOutputs:
    """Between ``open`` and ``close`` the model's calls are answered from memory, and prints are dropped.

    A call with inputs of shapes seen before returns the outputs of then. The loop's own code between forward
    and backward thus runs as ever, and costs next to nothing. The outputs have no graph, so that a gradient
    is zero for ``torch.autograd.grad`` and at an input, as of a gradient penalty or an attack on the input.
    """

    def __init__(self) -> None:
        self._undo: Callable[[], None] | None = None
        self._stdout: TextIO | None = None

    def open(self, model: torch.nn.Module) -> None:
        if self._undo is not None:
            return
        kind, outputs = type(model), dict[object, Any]()
        own, call = "__call__" in vars(kind), kind.__call__

        def repeat(module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
            if module is not model:
                return call(module, *arguments, **named)
            key = _shapes((arguments, named, model.training, torch.is_grad_enabled()))
            for given in tree_leaves((arguments, named)):
                if torch.is_tensor(given) and given.requires_grad and given.is_leaf and given.grad is None:
                    given.grad = torch.zeros_like(given)
            if key not in outputs:
                outputs[key] = _without_changes(model, lambda: call(module, *arguments, **named))
            return tree_map(_as_new, outputs[key])

        autograd: Any = torch.autograd
        run_engine = autograd._engine_run_backward  # noqa: SLF001

        def run_without_graph(losses: Any, *arguments: Any, **named: Any) -> Any:
            # After the losses come their gradients, two flags and the inputs.
            if named.get("accumulate_grad", True):
                return run_engine(losses, *arguments, **named)
            return tuple(map(torch.zeros_like, arguments[3]))

        def undo() -> None:
            autograd._engine_run_backward = run_engine  # noqa: SLF001
            if own:
                kind.__call__ = call  # type: ignore[method-assign]
            else:
                del kind.__call__

        kind.__call__ = repeat  # type: ignore[method-assign]
        autograd._engine_run_backward = run_without_graph  # noqa: SLF001
        self._undo = undo
        self._stdout, sys.stdout = sys.stdout, _Nowhere(sys.stdout)

    def close(self) -> None:
        if self._undo is not None:
            self._undo()
            assert self._stdout is not None
            sys.stdout, self._undo = self._stdout, None


class _Nowhere:
    """A standard output that drops what is printed. A loop that only counts prints figures of no step."""

    def __init__(self, behind: TextIO) -> None:
        self._behind = behind

    def __getattr__(self, name: str) -> Any:
        return getattr(self._behind, name)

    def write(self, text: str) -> int:
        return len(text)


def _shapes(value: Any) -> object:
    """Return the tensors' shapes and types and the other values, as far as these are plain."""
    return tuple(
        (x.shape, x.dtype, x.device)
        if torch.is_tensor(x)
        else (type(x), x if isinstance(x, bool | int | float | str) else None)
        for x in tree_leaves(value)
    )


def _without_changes(model: torch.nn.Module, forward: Callable[[], Any]) -> Any:
    """Return the outputs without their graph; the model's buffers stay as they were."""
    kept = [(buffer, buffer.clone()) for buffer in model.buffers()]
    outputs = tree_map(lambda x: x.detach() if torch.is_tensor(x) else x, forward())
    with torch.no_grad():
        for buffer, value in kept:
            buffer.copy_(value)
    return outputs


def _as_new(value: Any) -> Any:
    """Return a tensor of its own, with which a loss can be made and, as far as the loop sees, derived."""
    if not torch.is_tensor(value):
        return value
    fresh = value.clone()
    if fresh.is_floating_point() and torch.is_grad_enabled():
        fresh.requires_grad_().grad = fresh.new_zeros(()).expand_as(fresh)  # for retain_grad
    return fresh


def say_goes_over(replica: str, number: int, step: int) -> None:
    """Say that the loop, which is at step ``number``, goes over the steps that the job has made."""
    sys.stderr.write(
        f"fabric: {replica}: the job is at step {step}, and the script's loop goes over {step - number} "
        "steps without computing them\n"
    )


def leave_behind(replica: str, number: int, step: int) -> NoReturn:
    """End this process, because its loop is at step ``number`` and the job goes on from an earlier one."""
    sys.stderr.write(
        f"fabric: {replica}: the job goes on from step {step} and the script's loop is at step {number}, and "
        "cannot go back: this process starts again\n"
    )
    raise SystemExit(RESTART)
