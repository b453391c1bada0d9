"""The global parameters of DiLoCo: what the replicas share, while inner steps change each model.

A pseudo-gradient is the global parameters minus the local ones. It lies in the global parameters' ``.grad``,
is averaged like any gradient, and the outer optimizer applies it to the global parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from fabric.client.gradients.buffer_choices import Buffers, choose_buffers
from fabric.client.gradients.gradient_backend import device_of
from fabric.client.outer.outer_schedule import cut_fragments
from fabric.errors import ConfigError


@dataclass(frozen=True, slots=True)
class _Pair:
    """A trainable parameter of the model with its global copy."""

    name: str
    local: torch.nn.Parameter
    shared: torch.nn.Parameter
    fragment: int


class GlobalParameters:
    """``module`` has copies of the model's trainable parameters, under the names of the model's state.

    Frozen parameters and buffers are the model's own tensors. ``cuts``: the fragment of each parameter, by
    name; by default consecutive parameters of about equal size. Raises ConfigError.
    """

    def __init__(self, model: torch.nn.Module, fragments: int, cuts: Mapping[str, int] | None = None) -> None:
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        numbers = cut_fragments([p.numel() for _, p in trainable], fragments)
        if cuts is not None:
            numbers = [cuts[name] for name, _ in trainable]
            empty = set(range(fragments)) - set(numbers)
            if empty:
                raise ConfigError(
                    f"fragment {min(empty)} has no trainable parameter of its own: give each fragment one"
                )
        copies = {id(p): torch.nn.Parameter(p.detach().clone()) for _, p in trainable}
        self.fragments = {name: number for (name, _), number in zip(trainable, numbers, strict=True)}
        self.module = _mirror(model, copies, {})
        self._pairs = [_Pair(name, p, copies[id(p)], self.fragments[name]) for name, p in trainable]

    def move(self, outer: torch.optim.Optimizer) -> None:
        """Let ``outer``, which was made for the model's parameters, update their global copies.

        Raises ConfigError, and changes nothing, unless it has each trainable parameter and no state yet.
        """
        if outer.state:
            raise ConfigError(
                "the outer optimizer has made steps already: make it just before diloco is called"
            )
        copies = {id(x.local): x.shared for x in self._pairs}
        given = {id(p) for group in outer.param_groups for p in group["params"]}
        left_out = next((x.name for x in self._pairs if id(x.local) not in given), "")
        strange = bool(given - set(copies))
        if left_out or strange:
            what = "has a parameter that is not trainable in the model" if strange else f"lacks {left_out}"
            raise ConfigError(
                f"the outer optimizer {what}: make it of model.parameters(), as SGD(model.parameters(), ...)"
            )
        for group in outer.param_groups:
            group["params"] = [copies[id(p)] for p in group["params"]]

    @property
    def has_gradient(self) -> bool:
        """Whether a pseudo-gradient lies in ``.grad``."""
        return any(x.shared.grad is not None for x in self._pairs)

    @torch.no_grad()
    def set_gradient(self, fragment: int) -> None:
        """Put the pseudo-gradient of ``fragment`` into ``.grad``; the other fragments have None."""
        for x in self._pairs:
            x.shared.grad = x.shared - x.local if x.fragment == fragment else None

    def keep_gradient(self, fragment: int) -> None:
        """Drop the gradients of all other fragments: their optimizer state must not move."""
        for x in self._pairs:
            if x.fragment != fragment:
                x.shared.grad = None

    @torch.no_grad()
    def load(self, fragment: int | None = None, alpha: float = 0.0) -> None:
        """Set the local parameters to alpha * local + (1 - alpha) * global, of one or all fragments."""
        for x in self._pairs:
            if fragment is None or x.fragment == fragment:
                x.local.lerp_(x.shared, 1 - alpha) if alpha else x.local.copy_(x.shared)


def local_buffers(model: torch.nn.Module, buffers: Buffers) -> dict[str, str]:
    """Return the choice ``ignore`` for the buffers that inner steps change.

    Raises ConfigError for a model whose parts cannot be shared by outer steps.
    """
    trainable = tuple((name, p) for name, p in model.named_parameters() if p.requires_grad)
    if len({p.device for _, p in trainable}) > 1:
        device_of(trainable)  # raises an error that names two parameters
    if not trainable:
        raise ConfigError("the model has no parameter that requires a gradient: there is nothing to exchange")
    choices = choose_buffers(model, "average" if buffers == "refuse" else buffers)
    for name in choices.carried:
        raise ConfigError(
            f"forward changes the buffer {name!r} in inner steps, differently on each replica: "
            'pass buffers="ignore" to keep such buffers local, or use a layer without running statistics'
        )
    return dict.fromkeys(choices.local, "ignore")


def _mirror(
    module: torch.nn.Module, copies: dict[int, torch.nn.Parameter], met: dict[int, torch.nn.Module]
) -> torch.nn.Module:
    """Return a module with the names of ``module``, with ``copies`` in place of trainable parameters."""
    if id(module) in met:
        return met[id(module)]
    mirror = met[id(module)] = torch.nn.Module()
    for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
        mirror.register_parameter(name, copies.get(id(parameter), parameter))
    kept = set(module.state_dict(keep_vars=True))
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        mirror.register_buffer(name, buffer, persistent=name in kept)
    for name, child in module._modules.items():  # noqa: SLF001  (named_children leaves out repeated ones)
        mirror.add_module(name, _mirror(child, copies, met) if child is not None else None)
    return mirror
