"""The values that a script advances, while its loop goes over steps that the job has made.

With a Trainer these are its hooks at the begin of a training and of an epoch, which the members have run.
"""

import copy
from collections.abc import Mapping
from typing import Any

from fabric.client.loop.shared_state import with_state


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

    def keep(self) -> None:
        """Note the values as the job has them."""
        self._kept = {name: copy.deepcopy(x.state_dict()) for name, x in self._objects.items()}
        self._groups = [
            [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in x.param_groups]
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
