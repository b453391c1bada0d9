"""The gradients of an adopted script: as its backward pass made them, and the one that waits for its loop."""

from typing import Any

import torch

from fabric.errors import ConfigError
from fabric.integrations.adopt.living_objects import OWN_WAY


class ScriptGradients:
    """The ``.grad`` of a model's parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._waiting: list[torch.Tensor | None] = []
        self._zeros: list[torch.Tensor] = []  # the gradient of steps that the loop goes over
        self._marks: list[tuple[int, int]] = []  # identity and version of each gradient after backward
        self.note()

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
        """Leave no gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def fill(self) -> None:
        """Leave a gradient of zeros, for code of the script that reads or changes ``.grad``."""
        self._zeros = self._zeros or [torch.zeros_like(parameter) for parameter in self._parameters]
        for parameter, zeros in zip(self._parameters, self._zeros, strict=True):
            parameter.grad = zeros.zero_()

    def set_aside(self) -> None:
        """Let the gradients wait for ``bring_back``."""
        self._waiting = [parameter.grad for parameter in self._parameters]
        self.drop()

    def bring_back(self) -> None:
        """Put the gradients that ``set_aside`` has taken into ``.grad``."""
        for parameter, gradient in zip(self._parameters, self._waiting, strict=True):
            parameter.grad = gradient
        self._waiting, self._zeros = [], []

    def _look(self) -> list[tuple[int, int]]:
        gradients: list[Any] = [parameter.grad for parameter in self._parameters]
        return [(0, 0) if g is None else (id(g), g._version) for g in gradients]  # noqa: SLF001
