"""Runs a script as one replica of the job that the environment names."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import fabric.client
from fabric.client.process.excepthook import install_excepthook
from fabric.errors import ConfigError
from fabric.integrations.adopt.adopted_loop import AdoptedLoop
from fabric.integrations.adopt.frameworks import adopted_frameworks
from fabric.integrations.adopt.living_objects import OWN_WAY
from fabric.integrations.adopt.patches import patched
from fabric.runtime import config


def run_adopted(run: Callable[[], None]) -> None:
    """Call ``run``, which runs the script, and leave the job after it. With FABRIC_DISABLE=1 only call it.

    A mistake ends the process with one sentence, as one of ``attach`` does.
    """
    install_excepthook()
    settings = config.settings()
    if settings.disable:
        run()
        return
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
