"""Messages to systemd from a service that it supervises: it is ready, and its event loop runs.

systemd names a socket and a time. It kills and restarts a service that sends no message for that time. So a
lighthouse whose loop hangs makes room for another one, although its process lives.
"""

import asyncio
import logging
import socket
from dataclasses import dataclass

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Supervisor:
    """The systemd that supervises this service, if any."""

    address: str = ""  # address of systemd's datagram socket, empty for none
    watchdog_s: float = 0.0  # the longest silence that systemd allows, 0 for any

    def tell(self, state: str) -> None:
        """Send ``state``, such as READY=1; a failure to send does not end the service."""
        if not self.address:
            return
        address = "\0" + self.address[1:] if self.address.startswith("@") else self.address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
                sock.sendto(state.encode(), address)
        except OSError as error:
            log.warning("the supervisor at %s did not receive %s: %s", self.address, state, error)

    async def show_life(self) -> None:
        """Send signs of life from the event loop, three within the time that the supervisor allows."""
        while self.address and self.watchdog_s > 0:
            self.tell("WATCHDOG=1")
            await asyncio.sleep(self.watchdog_s / 3)
