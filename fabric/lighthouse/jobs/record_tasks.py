"""Writes and reads of a job's record: each is a task whose outcome returns to the core as an event.

After a failed write the core reads the record again. The pause before a read grows with every failure, so
that a faulty store gets fewer requests.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from fabric.errors import ProtocolError, StoreError, StoreIndefinite
from fabric.lighthouse.jobs.job_store import Deposed, StoredRecord
from fabric.lighthouse.jobs.term_context import TermContext
from fabric.model import Record
from fabric.protocol.messages import leader_events as io

if TYPE_CHECKING:
    from fabric.lighthouse.jobs.job import Job

log = logging.getLogger(__name__)

_RETRY_S = (0.05, 1.0)
_MOST_FAILURES = 10


class RecordTasks:
    """Writes and reads the record of one job, and counts the writes that failed in a row.

    ``asker`` names the driver of the core that ordered the write or read.
    """

    def __init__(self, shell: "Job", context: TermContext, stored: StoredRecord) -> None:
        self._shell = shell
        self._context = context
        self._stored = stored
        self._failures = 0

    def write(self, record: Record, asker: object) -> None:
        """Replace the record; ends in RecordWritten or WriteFailed."""
        self._context.tasks.start(f"write {self._shell.name}", self._write(record, asker))

    def read(self, asker: object) -> None:
        """Read the record; ends in RecordRead."""
        self._context.tasks.start(f"read {self._shell.name}", self._read(asker))

    async def read_afresh(self) -> Record | None:
        """Return the record for a new core, and forget past failures."""
        self._failures = 0
        return await self._read_stubbornly(None)

    async def _write(self, record: Record, asker: object) -> None:
        why = ""
        failed = io.WriteFailed(record.nonce, definite=True)
        if not self._context.term.holds():
            return
        try:
            if not await self._stored.write(record):
                why = "the store's guards refused it"
        except StoreIndefinite as error:
            why, failed = str(error), io.WriteFailed(record.nonce, definite=False)
        except StoreError as error:
            why = str(error)
        if why:
            self._failures += 1
            self._shell.note("write failed", "", f"epoch {record.epoch}: {why}")
        else:
            self._failures = 0
        self._shell.answer(asker, failed if why else io.RecordWritten(record.nonce))

    async def _read(self, asker: object) -> None:
        record = await self._read_stubbornly(asker)
        self._shell.answer(asker, io.RecordRead(record))

    async def _read_stubbornly(self, asker: object) -> Record | None:
        """Return the record. Ask the store until it answers or the asker no longer waits."""
        while self._shell.is_asked_by(asker) and not self._context.term.is_over:
            if self._failures:
                await asyncio.sleep(min(_RETRY_S[0] * 2 ** (self._failures - 1), _RETRY_S[1]))
            try:
                return await self._stored.read()
            except (Deposed, ProtocolError) as error:
                self._context.term.resign(f"job {self._shell.name}: {error}")
            except StoreError as error:
                self._failures = min(self._failures + 1, _MOST_FAILURES)
                log.warning("job %s: its record cannot be read: %s", self._shell.name, error)
        return None
