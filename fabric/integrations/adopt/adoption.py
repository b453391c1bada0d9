"""Runs a script as one replica of the job that the environment names.

If the script trains with a framework, the framework's own adapter takes over: when the script makes a
trainer, and not when it imports the framework. Many scripts import one for its models alone.
"""

import contextlib
import functools
import importlib
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import numpy as np
import torch
import xxhash

import fabric.client
from fabric.client.process.excepthook import install_excepthook
from fabric.errors import ConfigError
from fabric.integrations.adopt.adopted_loop import AdoptedLoop, patched
from fabric.integrations.adopt.living_objects import OWN_WAY
from fabric.runtime import config


@dataclass(frozen=True, slots=True)
class Adapter:
    """Our class, and the class of a framework in whose place it is put."""

    own: str  # the framework's class, in the module that ADAPTERS names
    module: str
    ours: str  # class of ``module``


_LIGHTNING = Adapter("Trainer", "fabric.integrations.lightning", "FabricStrategy")
# The module that has a framework's trainer -> its adapter.
ADAPTERS = {
    "accelerate": Adapter("Accelerator", "fabric.integrations.accelerate", "FabricAccelerator"),
    "transformers.trainer": Adapter("Trainer", "fabric.integrations.transformers", "FabricTrainer"),
    "lightning.pytorch.trainer.trainer": _LIGHTNING,
    "pytorch_lightning.trainer.trainer": _LIGHTNING,
}

_REPLACED = "fabric_replaced"  # attribute of a class in another's place: that other class


def replace_class(own: Any, ours: Any, hand_over: Callable[[], None]) -> Callable[[], None]:
    """Put a subclass of ``ours`` in the place of ``own`` in its package; return how to undo that."""
    make = ours.__init__

    @functools.wraps(make)
    def make_adopted(self: Any, *arguments: Any, **named: Any) -> None:
        if not isinstance(self, adopted):
            raise ConfigError(f"the script makes a {ours.__name__} already: run it without --adopt")
        hand_over()
        make(self, *arguments, **named)

    kept = {"__module__": own.__module__, "__doc__": own.__doc__, _REPLACED: own}
    adopted = type(own.__name__, (ours,), kept)
    package = own.__module__.partition(".")[0]
    modules = [x for name, x in list(sys.modules.items()) if name.partition(".")[0] == package]
    places = [x for x in modules if vars(x).get(own.__name__) is own]
    for module in places:
        setattr(module, own.__name__, adopted)
    ours.__init__ = make_adopted

    def undo() -> None:
        ours.__init__ = make
        for module in places:
            setattr(module, own.__name__, own)

    return undo


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
def adopted_frameworks(hand_over: Callable[[str, str], None]) -> Iterator[None]:
    """Within this context call ``hand_over`` with the names of a framework's class and of ours when the
    script makes a trainer."""
    with contextlib.ExitStack() as stack:

        def adopt(name: str) -> None:
            adapter, framework = ADAPTERS[name], sys.modules[name]
            # A framework makes the trainers of another as they are: its own adapter counts on that.
            others = {
                k: v for k, v in vars(framework).items() if isinstance(v, type) and _REPLACED in vars(v)
            }
            for other, adopted in others.items():
                setattr(framework, other, vars(adopted)[_REPLACED])
            announce = functools.partial(hand_over, f"{name.partition('.')[0]}.{adapter.own}", adapter.ours)
            module = importlib.import_module(adapter.module)
            own, ours = getattr(framework, adapter.own), getattr(module, adapter.ours)
            if issubclass(ours, own):
                stack.callback(replace_class(own, ours, announce))
            else:
                stack.callback(module.adopt_trainer(own, announce))

        finder = FrameworkFinder(adopt)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        for name in ADAPTERS:
            if name in sys.modules:
                adopt(name)
        yield


def run_adopted(run: Callable[[], None]) -> None:
    """Call ``run``, which runs the script, and leave the job after it. With FABRIC_DISABLE=1 only call it.

    A mistake ends the process with one sentence, as one of ``attach`` does.
    """
    install_excepthook()
    settings = config.settings()
    if settings.disable:
        run()
        return
    # Seed all processes of a job alike, in which a script without a seed would split its data, or choose its
    # values, in other ways. Jobs of other names have other numbers. A token may change while the job runs.
    seed = xxhash.xxh3_64_intdigest(settings.job.encode())
    torch.manual_seed(seed)  # on the CPU a process begins with a random seed
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    loop, training = AdoptedLoop(settings, fabric.client.attach), _FrameworkTraining()
    with contextlib.ExitStack() as stack:

        def hand_over(own: str, ours: str) -> None:
            if not training.adapter:
                training.adapter = ours
                stack.close()
                sys.stderr.write(
                    f"fabric: {settings.replica}: adopted the script's {own} as {ours}; gradients and "
                    "updates outside of it stay this replica's own\n"
                )

        with training.watched(), adopted_frameworks(hand_over):
            stack.enter_context(patched(loop, settings.job))
            try:
                run()
            except SystemExit as end:
                if end.code not in (None, 0) or loop.has_left:
                    raise
            if training.adapter:
                training.check()
            else:
                loop.finish()


class _FrameworkTraining:
    """Counts the trainings of a script that an adapter has taken over."""

    def __init__(self) -> None:
        self.adapter = ""  # empty while no adapter has taken over
        self._attached = False

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Within this context refuse ``fabric.client.attach``, except for one call of an adapter."""
        attach = fabric.client.attach

        def attach_once(*arguments: Any, **named: Any) -> Any:
            if not self.adapter:
                raise ConfigError("the script calls fabric.client.attach already: run it without --adopt")
            if self._attached:
                raise ConfigError(
                    "the script trains a second time in one process, and a job is one training: make a "
                    "script of each"
                )
            self._attached = True
            return attach(*arguments, **named)

        fabric.client.attach = attach_once
        try:
            yield
        finally:
            fabric.client.attach = attach

    def check(self) -> None:
        """Raise ConfigError where the script has ended without a training."""
        if not self._attached:
            raise ConfigError(
                f"the script has ended without a training by its {self.adapter}, so this replica has not "
                f"joined the job: {OWN_WAY}"
            )
