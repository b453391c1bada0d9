"""Whether the store takes writes: a full store answers every read and refuses every write.

The probe is a write whose guard can never hold. A store that takes writes says that the guard failed, and
changes nothing. A full store refuses the write before it looks at the guard.
"""

import asyncio
import logging
from dataclasses import dataclass

from fabric.errors import StoreError, StoreIndefinite, StoreUnavailable
from fabric.store import Compare, Put, Store

log = logging.getLogger(__name__)

# A missing key has revision 0, and no store reaches this revision.
_NEVER = (1 << 62) - 1


@dataclass(slots=True)
class WriteProbe:
    """``refusal``: the store's message if it refused the last probe, else empty."""

    store: Store
    key: str
    every_s: float = 10.0
    answer_s: float = 5.0
    refusal: str = ""

    async def watch(self) -> None:
        """Probe again and again, until cancelled."""
        while True:
            await self.ask()
            await asyncio.sleep(self.every_s)

    async def ask(self) -> str:
        """Probe once; return the refusal."""
        logged = self.refusal
        try:
            async with asyncio.timeout(self.answer_s):
                await self.store.commit([Compare(self.key, create_revision=_NEVER)], [Put(self.key, b"")])
            self.refusal = ""
        except (StoreUnavailable, StoreIndefinite, TimeoutError):
            pass  # another check asks more often whether the store can be reached
        except StoreError as error:
            self.refusal = str(error)
        if bool(self.refusal) != bool(logged):
            log.warning(
                "the store takes writes again" if logged else f"the store refuses writes: {self.refusal}"
            )
        return self.refusal
