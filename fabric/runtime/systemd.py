"""What systemd is told of a service that it supervises: that it is ready, and that its event loop turns.

systemd names a socket and a time. A service that says nothing for that time is killed and started again: so a
lighthouse whose loop stands still for good makes room for another one, although its process lives.
"""

import asyncio
import logging
import socket
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Supervisor:
    """``place``: its datagram socket, empty for none; ``watchdog_s``: the longest silence, 0 for any."""

    place: str = ""
    watchdog_s: float = 0.0

    def tell(self, state: str) -> None:
        """Send ``state``, such as READY=1. A supervisor that cannot be told does not end the service."""
        if not self.place:
            return
        place = "\0" + self.place[1:] if self.place.startswith("@") else self.place
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as line:
                line.sendto(state.encode(), place)
        except OSError as error:
            log.warning("the supervisor at %s cannot be told %s: %s", self.place, state, error)

    async def show_life(self) -> None:
        """Tell it from the event loop, three times within the time that it allows."""
        while self.place and self.watchdog_s > 0:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 3)
