"""Reports a mistake in the use of fabric as one sentence instead of a traceback.

Mistakes that ``attach`` cannot see (an inner loop left early, a state that stops being serialisable) raise
FabricError where they occur, so that a program may catch it. For an uncaught FabricError the exception hook
prints one line on standard error and ends with exit code 1, "do not restart me". Every other exception is
shown as usual. A notebook shows a cell's error without the hook, and its process goes on.
"""

import os
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from fabric.errors import FabricError, IllegalTransition

_shown_before = sys.excepthook
_is_showing = False
_STDERR = 2  # the highest number of a standard stream
# Functions called with an uncaught exception after the hook has shown it.
on_uncaught: list[Callable[[BaseException], None]] = []
# Functions called with the error that ended a notebook's cell or a line at a prompt: the process goes on.
on_cell_error: list[Callable[[BaseException], None]] = []
# Functions called when a notebook's cell has ended without an error.
on_cell_end: list[Callable[[], None]] = []
# Functions that may end this process with a better explanation than the uncaught error.
_waits: list[Callable[[], None]] = []


def before_report(wait: Callable[[], None]) -> None:
    """Call ``wait`` before an uncaught error that is not a FabricError is shown."""
    _waits.append(wait)


def install_excepthook() -> None:
    """Install the hook that shows an uncaught FabricError as one sentence.

    Another library may have put a hook around this one since the last call. This one is the outer hook again
    then, and calls that hook for every other error.
    """
    global _shown_before
    _open_standard_streams()
    if sys.excepthook is not _show:
        _shown_before, sys.excepthook = sys.excepthook, _show
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        shell.events.register("post_run_cell", _after_cell)  # the second time changes nothing


def _open_standard_streams() -> None:
    """Open the null device for each closed standard stream: a file with its number would get foreign text."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= _STDERR:
        os.set_inheritable(number, True)
    os.close(number)
    # Python has None for a stream that was closed when the process began.
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(_STDERR, "w", closefd=False)


def _after_cell(result: Any) -> None:
    """Pass on the end of a notebook's cell. Its error never reaches ``sys.excepthook``."""
    error = result.error_before_exec or result.error_in_exec
    for watch in list(on_cell_error) if error is not None else ():
        watch(error)
    for look in list(on_cell_end) if error is None else ():
        look()


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    global _is_showing
    if _is_showing:  # the hook that was installed before this one has called this one in turn
        sys.__excepthook__(kind, error, trace)
        return
    _is_showing = True
    try:
        # A move that a state machine forbids is a defect of fabric: show its traceback.
        if isinstance(error, KeyboardInterrupt) and on_uncaught:
            sys.stderr.write("fabric: interrupted: this process leaves its job, and other replicas go on\n")
        elif isinstance(error, FabricError) and not isinstance(error, IllegalTransition):
            sys.stderr.write(f"fabric: {error}\n")
        else:
            for wait in _waits:
                wait()
            _shown_before(kind, error, trace)
        sys.stderr.flush()
        # At a prompt of Python the process goes on, as after a notebook's cell.
        for watch in list(on_cell_error if hasattr(sys, "ps1") else on_uncaught):
            watch(error)
    finally:
        _is_showing = False
