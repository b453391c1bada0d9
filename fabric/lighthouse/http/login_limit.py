"""How often a wrong token may be tried at the login: a short one must not be guessed."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable

from fabric.errors import FabricError

MOST_FAILURES = 20
WITHIN_S = 60.0
# Beyond so many addresses the one that failed longest ago is forgotten.
_MOST_ADDRESSES = 4096


class TooManyTries(FabricError):
    """The address has to wait."""


class LoginTries:
    """Failures by address: ``check`` before a try, ``failed`` after a wrong one."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, address: str) -> None:
        """Raises TooManyTries where the address has to wait."""
        failures = self._failures.get(address)
        if failures is None or len(failures) < MOST_FAILURES:
            return
        wait_s = failures[0] + WITHIN_S - self._clock()
        if wait_s > 0:
            raise TooManyTries(
                f"{MOST_FAILURES} wrong tokens came from {address} within {WITHIN_S:g} s: wait {wait_s:.0f} s"
            )

    def failed(self, address: str) -> None:
        """Count a wrong token from ``address``."""
        self._failures.setdefault(address, deque(maxlen=MOST_FAILURES)).append(self._clock())
        self._failures.move_to_end(address)
        if len(self._failures) > _MOST_ADDRESSES:
            self._failures.popitem(last=False)
