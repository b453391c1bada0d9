"""The interface of a message link."""

from collections.abc import Callable
from typing import Protocol

OnMessage = Callable[[bytes], None]
OnClosed = Callable[[str], None]


class MessageLink(Protocol):
    """Ordered messages to and from one peer, until it closes; used from one event loop's thread.

    ``reason`` is empty while the link is open, then says in one sentence why it closed. ``clean`` is
    whether the peer said goodbye: an end without it means that its process or its host went away.
    """

    @property
    def peer(self) -> str: ...

    @property
    def reason(self) -> str: ...

    @property
    def clean(self) -> bool: ...

    def send(self, data: bytes) -> bool:
        """Queue one message; False (and nothing queued) on a link that has closed.

        Never blocks. A peer that does not read closes the link when the queue is over its limit.
        Raises ProtocolError for an empty or oversized message, which is the caller's mistake.
        """

    async def run(self, on_message: OnMessage, on_closed: OnClosed) -> None:
        """Deliver messages in order until the link closes, then call ``on_closed(reason)`` once.

        A ProtocolError out of ``on_message`` closes the link with that reason; any other exception
        closes it, calls ``on_closed``, and is raised here.
        """

    async def close(self, linger_s: float = 1.0) -> None:
        """Say goodbye, deliver queued messages, wait for the peer's end at most ``linger_s``."""

    def abort(self, reason: str) -> None:
        """Close at once; queued messages may be lost."""
