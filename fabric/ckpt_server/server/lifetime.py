"""Decides when the server process ends: on request, a while after the job's end, or without a trainer.

The server must outlive its trainer, but not for ever: a host whose trainer never comes back would keep the
memory. So a timer runs while no trainer is attached. Another timer runs after the trainer has announced the
job's end. A trainer that attaches stops both timers.
"""

import asyncio
import logging

log = logging.getLogger(__name__)

# How long a new server waits for its first trainer at least: it has begun before the trainer can attach.
FIRST_TRAINER_S = 10.0


class Lifetime:
    """Ends the server ``orphan_s`` after the last trainer left: sets ``ended``, with the ``reason``.
    ``at_once``: a signal has ended the server, which waits for no work under way."""

    def __init__(self, orphan_s: float) -> None:
        self.ended = asyncio.Event()
        self.reason = ""
        self.at_once = asyncio.Event()
        self._orphan_s = orphan_s
        self._orphan_timer: asyncio.TimerHandle | None = None
        self._finish_timer: asyncio.TimerHandle | None = None

    def trainer_came(self) -> None:
        """Stop the timers: a trainer is attached."""
        for timer in (self._orphan_timer, self._finish_timer):
            if timer is not None:
                timer.cancel()
        self._orphan_timer = self._finish_timer = None

    def trainer_left(self, at_least_s: float = 0.0) -> None:
        """Start the timer of a server without a trainer: ``orphan_s``, or ``at_least_s`` if that is more."""
        if self._orphan_timer is None:
            orphan_s = max(self._orphan_s, at_least_s)
            reason = f"no trainer has been attached for {orphan_s:g} s"
            loop = asyncio.get_running_loop()
            self._orphan_timer = loop.call_later(orphan_s, self.end, reason)

    def finish(self, linger_s: float) -> None:
        """End the server ``linger_s`` from now, because the job is done; a later call replaces the time."""
        if self._finish_timer is not None:
            self._finish_timer.cancel()
        loop = asyncio.get_running_loop()
        # Do not end before the answer to this request is sent.
        self._finish_timer = loop.call_later(max(linger_s, 0.02), self.end, "the job is done")

    def end_at_once(self, reason: str) -> None:
        """End the server now, without waiting for work under way."""
        self.at_once.set()
        self.end(reason)

    def end(self, reason: str) -> None:
        """End now."""
        if not self.ended.is_set():
            self.reason = reason
            log.info("the checkpoint server ends: %s", reason)
            self.ended.set()
