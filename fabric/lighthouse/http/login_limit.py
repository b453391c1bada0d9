"""Limits how often an address may try a wrong token at the login, so that nobody can guess a short token."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable

from fabric.errors import FabricError

MOST_FAILURES = 20
WITHIN_S = 60.0
# The most addresses kept; the limit first forgets the address that failed longest ago.
_MOST_ADDRESSES = 4096


class TooManyTries(FabricError):
    """Too many wrong tokens came from the address; it must wait."""


class LoginTries:
    """Failed logins by address: call ``check`` before a try, ``failed`` after a wrong token."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures: OrderedDict[str, deque[float]] = OrderedDict()

    def check(self, address: str) -> None:
        """Raise TooManyTries where the address must wait."""
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
