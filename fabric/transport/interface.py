"""The interface of a message link."""

from collections.abc import Callable
from typing import Protocol

OnMessage = Callable[[bytes], None]
OnClosed = Callable[[str], None]


class MessageLink(Protocol):
    """Ordered messages to and from one peer, until it closes; used from one event loop's thread.

    ``reason`` is empty while the link is open; later it says in one sentence why the link closed. ``clean``:
    the peer sent a goodbye. A link that ends without a goodbye means that the peer's process or host has
    died.
    """

    @property
    def peer(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def clean(self) -> bool: ...

    def send(self, data: bytes) -> bool:
        """Queue one message; on a closed link queue nothing and return False.

        Never blocks. A peer that does not read closes the link when the queue is over its limit.
        Raises ProtocolError for an empty or oversized message, which is the caller's mistake.
        """

    async def run(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Deliver messages in order until the link closes, then call ``on_closed(reason)`` once.

        A ProtocolError of ``on_message`` closes the link with that reason. Any other exception closes it,
        calls ``on_closed``, and is raised here.
        """

    async def close(self, linger_s: float = 1.0) -> None:
        """Send queued messages and a goodbye; wait at most ``linger_s`` for the peer to close too."""

    def abort(self, reason: str) -> None:
        """Close at once; queued messages may be lost."""
