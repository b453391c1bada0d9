"""A mistake in how fabric is used ends the process with one sentence, never with a traceback of our insides.

``attach`` refuses what it can; the rest (sizes that do not divide, an inner loop left early, a state that
stops being serialisable) is raised where it is met, so that a program may still catch it. What nobody
catches reaches the interpreter's exception hook: there a FabricError is one line on standard error, and
the interpreter's exit code is 1, "do not restart me". Everything else is shown as it always was.
"""

import sys
from collections.abc import Callable
from types import TracebackType

from fabric.errors import FabricError, IllegalTransition

_shown_before = sys.excepthook
# What is done about an exception that nobody caught, once it has been shown.
on_uncaught: list[Callable[[BaseException], None]] = []


# What may end this process with a better sentence than the error that reached the top.
_waits: list[Callable[[], None]] = []


def before_report(wait: Callable[[], None]) -> None:
    """Call ``wait`` before an error that is not ours is shown."""
    _waits.append(wait)


def install_excepthook() -> None:
    """From now on an uncaught FabricError is one sentence; may be called again."""
    global _shown_before
    if sys.excepthook is not _show:
        _shown_before, sys.excepthook = sys.excepthook, _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # A move that a state machine forbids is a defect of ours: its traceback is wanted.
    if isinstance(error, FabricError) and not isinstance(error, IllegalTransition):
        sys.stderr.write(f"fabric: {error}\n")
    else:
        for wait in _waits:
            wait()
        _shown_before(kind, error, trace)
    sys.stderr.flush()
    for watch in on_uncaught:
        watch(error)
