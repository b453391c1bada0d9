"""Runs a script as one replica of the job that the environment names."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

import fabric.client
from fabric.client.process.excepthook import install_excepthook
from fabric.errors import ConfigError
from fabric.integrations.adopt.adopted_loop import AdoptedLoop
from fabric.integrations.adopt.frameworks import adopted_frameworks
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
    loop, adapters = AdoptedLoop(settings, fabric.client.attach), list[str]()
    with contextlib.ExitStack() as stack:

        def hand_over(adapter: str) -> None:
            if adapter not in adapters:
                adapters.append(adapter)
                stack.close()
                sys.stderr.write(f"fabric: {settings.replica}: adopted the script's Trainer by {adapter}\n")

        with adopted_frameworks(hand_over):
            stack.enter_context(patched(loop, settings.job))
            stack.enter_context(_without_attach())
            try:
                run()
            except SystemExit as end:
                if end.code not in (None, 0) or loop.has_left:
                    raise
            if not adapters:
                loop.finish()


@contextlib.contextmanager
def _without_attach() -> Iterator[None]:
    """Refuse a script that attaches on its own."""
    attach = fabric.client.attach

    def refuse(*_: object, **__: object) -> NoReturn:
        raise ConfigError("the script calls fabric.client.attach already: run it without --adopt")

    fabric.client.attach = refuse
    try:
        yield
    finally:
        fabric.client.attach = attach
