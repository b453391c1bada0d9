"""A mistake in how fabric is used ends the process with one sentence, never with a traceback of our insides.

``attach`` refuses what it can; the rest (sizes that do not divide, an inner loop left early, a state that
stops being serialisable) is raised where it is met, so that a program may still catch it. What nobody
catches reaches the interpreter's exception hook: there a FabricError is one line on standard error, and
the interpreter's exit code is 1, "do not restart me". Everything else is shown as it always was.
"""

import sys
from types import TracebackType

from fabric.errors import FabricError, IllegalTransition

_shown_before = sys.excepthook


def tell_uncaught_mistakes() -> None:
    """From now on an uncaught FabricError is one sentence; may be called again."""
    global _shown_before
    if sys.excepthook is not _show:
        _shown_before, sys.excepthook = sys.excepthook, _show


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    # A move that a state machine forbids is a defect of ours: its traceback is wanted.
    if isinstance(error, FabricError) and not isinstance(error, IllegalTransition):
        sys.stderr.write(f"fabric: {error}\n")
    else:
        _shown_before(kind, error, trace)
