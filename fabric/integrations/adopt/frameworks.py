"""``--adopt`` in a script that trains with a framework: the framework's own adapter takes over.

The adapter takes over when the script makes a trainer, and not when the script imports the framework: many
scripts import one for its models alone.
"""

import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The module of a framework's trainer -> the adapter, which has a function ``adopt_trainer``.
ADAPTERS = {
    "lightning.pytorch.trainer.trainer": "fabric.integrations.lightning",
    "pytorch_lightning.trainer.trainer": "fabric.integrations.lightning",
}


class FrameworkFinder(MetaPathFinder):
    """Calls ``adopt`` with the name of each module of ``ADAPTERS`` that has been imported."""

    def __init__(self, adopt: Callable[[str], None]) -> None:
        self._adopt = adopt
        self._searches = False  # a search of its own for the module is under way

    def find_spec(self, name: str, _path: Sequence[str] | None, _target: Any = None) -> ModuleSpec | None:
        """Return the module's spec, whose loader calls ``adopt`` after the module's code."""
        if name not in ADAPTERS or self._searches:
            return None
        self._searches = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._searches = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            loader.exec_module = functools.partial(self._execute, loader.exec_module, name)
        return spec

    def _execute(self, execute: Callable[[ModuleType], None], name: str, module: ModuleType) -> None:
        execute(module)
        self._adopt(name)


@contextlib.contextmanager
def adopted_frameworks(hand_over: Callable[[str], None]) -> Iterator[None]:
    """Within this context call ``hand_over`` with the adapter's name when the script makes a trainer."""
    with contextlib.ExitStack() as stack:

        def adopt(name: str) -> None:
            adapter = importlib.import_module(ADAPTERS[name])
            taken_over = functools.partial(hand_over, ADAPTERS[name])
            stack.callback(adapter.adopt_trainer(sys.modules[name].Trainer, taken_over))

        finder = FrameworkFinder(adopt)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        for name in ADAPTERS:
            if name in sys.modules:
                adopt(name)
        yield
