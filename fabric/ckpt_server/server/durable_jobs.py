"""The checkpoint server's side of durable checkpoints: it starts one writer at a time and keeps the outcome.

The writer gets the snapshot's memory as a descriptor. Until the writer ends, its slot counts as read, so the
trainer uses the other slot. If the trainer needs the writer's slot, the server kills the writer.
"""

import asyncio
import contextlib
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

import fabric
from fabric.ckpt_server.server.slots import SNAPSHOT, SlotTable
from fabric.ckpt_server.wire.channel_protocol import DurableJob
from fabric.errors import Refused
from fabric.model import SnapshotRef
from fabric.runtime.logs import fields

log = logging.getLogger(__name__)

_MAX_REPORT_BYTES = 1 << 20
_MAX_ERROR_CHARACTERS = 500
# While storage is away a checkpoint is tried again for this long, after pauses that double.
AWAY_S = 120.0
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 8.0
_OVERTAKEN = {
    "ok": False,
    "overtaken": True,
    "error": "its memory was needed for another snapshot before the earlier checkpoint was written: write"
    " checkpoints less often, or to faster storage",
}
# The folder from which this package is imported, installed or not.
_HERE = Path(fabric.__file__).resolve().parent.parent


class DurableJobs:
    """Runs the writers. ``newest``: the last checkpoint completed here. ``error``: why the last attempt
    failed, or empty. ``seconds``: the last attempt's duration.

    A checkpoint whose memory was needed is skipped, not failed, if the one before it was written. It never
    replaces the error of storage, such as a full disk."""

    def __init__(self, memory: SlotTable, rank: int = 0) -> None:
        self._memory = memory
        self._log = logging.LoggerAdapter(log, fields(rank=rank or None))
        self._task: asyncio.Task[None] | None = None
        self._next: DurableJob | None = None  # the request to write next
        self._incarnation = 0  # the incarnation of the trainer whose snapshot the task writes
        self.newest: SnapshotRef | None = None
        self.error = ""
        self._has_storage_error = False  # whether ``error`` is more than a lack of time
        self._made = False  # whether a try of this checkpoint had made the job's folder, which then vanished
        self._has_written = False  # whether the last attempt wrote its checkpoint
        self.seconds = 0.0
        self.failures = 0

    @property
    def is_idle(self) -> bool:
        return self._task is None or self._task.done()

    def outcome(self) -> dict[str, object]:
        """Return whether a writer runs, the newest checkpoint, and why the last one was not written."""
        newest = self.newest or SnapshotRef(0, -1, "")
        where = {"generation": newest.generation, "step": newest.step}
        return {"idle": self.is_idle, **where, "error": self.error}

    def start(self, request: DurableJob) -> None:
        """Begin to write, or queue the request; a later request replaces a queued one.

        Raises Refused where the step is not held. Gives up the request of an earlier trainer process, because
        the other ranks of that incarnation have ended too.
        """
        if self._memory.find(SNAPSHOT, request.step, request.generation) is None:
            raise Refused(f"step {request.step} is not held, so it cannot be written to durable storage")
        if not self.is_idle and request.incarnation == self._incarnation and not request.urgent:
            if self._next is not None:
                self._log.warning(
                    "step %d is not written: storage is slower than checkpoints are requested",
                    self._next.step,
                )
            self._next = request
            return
        self._incarnation, self._next = request.incarnation, None
        self._task = asyncio.create_task(self._run(request, self._task))

    async def finish(self) -> None:
        """Return when the writer that runs, if any, has ended."""
        while self._task is not None and not self._task.done():
            await asyncio.wait({self._task})

    async def close(self) -> None:
        """End the running writer, if any: its checkpoint stays incomplete."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    async def _run(self, request: DurableJob, before: asyncio.Task[None] | None) -> None:
        if before is not None and not before.done():
            before.cancel()
            await asyncio.wait({before})
        wanted: DurableJob | None = request
        while wanted is not None:
            began, pause_s, failures, self._made = time.monotonic(), _PAUSE_S, self.failures, False
            # Try again while storage is away, up to AWAY_S; a newer request ends the tries.
            while self._next is None and await self._persist(wanted):
                self.failures = failures + 1  # the tries of one checkpoint are one failure
                if time.monotonic() - began >= AWAY_S:
                    break
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
            wanted, self._next = self._next, None

    async def _persist(self, request: DurableJob) -> bool:
        """Write it once; return whether it failed because storage is away."""
        begun = time.monotonic()
        try:
            outcome = await self._write(request)
        except OSError as error:
            outcome = {"ok": False, "error": f"its writer could not be started: {error}"}
        self.seconds = time.monotonic() - begun
        is_written, is_overtaken = outcome.get("ok") is True, outcome.get("overtaken") is True
        had_written, self._has_written = self._has_written, is_written
        if not is_written:
            why = f"step {request.step}: {outcome.get('error')}"[:_MAX_ERROR_CHARACTERS]
            self._log.warning("the durable checkpoint of %s", why)
            self.failures += not (is_overtaken and had_written)
            if not is_overtaken or not (had_written or self._has_storage_error):
                self.error, self._has_storage_error = why, not is_overtaken
            self._made |= outcome.get("gone") is True
            return outcome.get("away") is True
        self._has_storage_error = False
        conflict = str(outcome.get("conflict") or "")
        self.error = f"step {request.step}: {conflict}"[:_MAX_ERROR_CHARACTERS] if conflict else ""
        for warning in outcome.get("warnings") or ():
            self._log.warning("durable storage could not be tidied up: %s", warning)
        if outcome.get("complete") is True:
            self.newest = SnapshotRef(request.generation, request.step, str(outcome["digest"]))
        self._log.info(
            "durable checkpoint of step %d: %s, %.1f s", request.step, outcome["folder"], self.seconds
        )
        return False

    async def _write(self, request: DurableJob) -> dict[str, Any]:
        slot = self._memory.find(SNAPSHOT, request.step, request.generation)
        if slot is None:
            return dict(_OVERTAKEN)
        content = slot.content
        assert content is not None and slot.memfd is not None
        manifest = json.loads(content.manifest_without_tensors)
        del manifest["url"]  # the server has added it for readers
        descriptor = slot.memfd.fd
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "fabric.ckpt_server.durable",
            f"--fd={descriptor}",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=(descriptor,),
            limit=_MAX_REPORT_BYTES,
            cwd=_HERE,
        )
        assert process.stdin is not None and process.stdout is not None

        is_killed = False

        def kill() -> None:
            nonlocal is_killed
            is_killed = True
            with contextlib.suppress(ProcessLookupError):
                process.kill()

        try:
            # While the process started, the trainer may have used the slot for another snapshot.
            with slot.reading(kill, content):
                body = {"order": asdict(replace(request, made=self._made)), "manifest": manifest}
                with contextlib.suppress(ConnectionError):
                    process.stdin.write(json.dumps(body).encode() + b"\n")
                    await process.stdin.drain()
                report = await process.stdout.read(_MAX_REPORT_BYTES)
                code = await process.wait()
        except ConnectionResetError:
            await process.wait()
            return dict(_OVERTAKEN)
        except BaseException:
            kill()
            await process.wait()
            raise
        if is_killed and not report:
            return dict(_OVERTAKEN)
        return {**_parsed(report, code), "digest": content.state}


def _parsed(report: bytes, code: int) -> dict[str, Any]:
    with contextlib.suppress(ValueError):
        if isinstance(body := json.loads(report), dict):
            return body
    if code == -9:
        return {"ok": False, "error": "its writer was killed, as when its host has no memory left"}
    return {"ok": False, "error": f"its writer ended with code {code}; see the checkpoint server's log"}
