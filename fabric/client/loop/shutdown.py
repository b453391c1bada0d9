"""How a trainer's process leaves the job (finished, told to stop, or because the user's loop has raised), and
how it can be looked into until then."""

import atexit
import contextlib
import os
import queue
import sys
from typing import NoReturn

from fabric.client.control.engine import Engine, EngineParts
from fabric.client.control.rank_engines import RankEngine
from fabric.client.loop import job_end_note
from fabric.client.process import excepthook
from fabric.client.process.debug_endpoint import DebugEndpoint, flight, stacks
from fabric.client.process.error_text import TELL_S, describe, is_device_fault
from fabric.client.process.process_identity import ProcessIdentity
from fabric.errors import FabricError
from fabric.model import JobEnd
from fabric.protocol.messages import member_events as io
from fabric.runtime.config import Settings


class Shutdown:
    """What a session does last. ``_at`` is the (step, micro-batch) that the user's code is at."""

    settings: Settings
    _place: ProcessIdentity
    _parts: EngineParts
    _engine: Engine
    _samples: dict[int, list[int]]
    _at: tuple[int, int] | None = None
    _debug_endpoint: DebugEndpoint | None = None
    _unheard: JobEnd | None = None  # the job's end, where no lighthouse has heard of it
    _pid = 0

    def start_debug_endpoint(self) -> None:
        """Answer the checkpoint server's questions from now until the end."""

        def state() -> dict[str, object]:
            return {"at": list(self._at or ()), **self._engine.describe()}

        self._debug_endpoint = DebugEndpoint(
            self.settings.home, {"stacks": stacks, "flight": flight, "state": state}
        )

    @property
    def epoch(self) -> int:
        """The membership epoch in force here, 0 before the first."""
        current = self._engine.current
        return current.epoch if current is not None else 0

    def _failed(self, error: BaseException) -> None:
        """The user's loop has raised, and nobody caught it: the job fails, and this process with it, once the
        lighthouse has heard, which rank 0 tells for all ranks. A device that fails is a death of this replica
        alone."""
        if not isinstance(error, Exception):
            return
        if is_device_fault(error):
            os._exit(75)
        samples = self._samples.get(self._at[1], []) if self._at is not None else []
        why = describe(error, self._at, samples)
        self._parts.crash_marker.clear()
        self._engine.post(io.LoopRaised(why))
        with contextlib.suppress(queue.Empty):
            while not isinstance(self._engine.orders.get(timeout=TELL_S), io.Stop):
                pass
        self._parts.journal.write("stop", code=1, reason=why)
        self._engine.close()
        self._end(finished=False)

    def _leave(self, reason: str, code: int = 0) -> NoReturn:
        """End this process with one sentence."""
        sys.stderr.write(f"fabric: {self.settings.replica}: {reason}\n")
        sys.stderr.flush()
        self._parts.journal.write("stop", code=code, reason=reason)
        self._engine.close()
        self._end(finished=code == 0)
        raise SystemExit(code)

    def _note_end(self, order: io.Finish) -> None:
        """The job is over. Where no lighthouse has heard of that, word of it stays here for the next one."""
        if order.alone:
            sys.stderr.write(f"fabric: {self.settings.replica}: {order.alone}\n")
            sys.stderr.flush()
            self._parts.journal.write("alone", step=order.step, reason=order.alone)
        if order.ended is not None:
            self._unheard = order.ended
            job_end_note.leave(self.settings.home, order.ended)

    def _end(self, finished: bool) -> None:
        """Detach; a server that is gone already needs no goodbye."""
        if self._debug_endpoint is not None:
            self._debug_endpoint.close()
        if finished:
            unheard = self._unheard
            linger_s = 5.0 if unheard is None else max(5.0, self.settings.orphan_s)
            with contextlib.suppress(FabricError):
                self._parts.handle.finish(linger_s, unheard)
        else:
            self._release_server()
        atexit.unregister(self._ends)
        if self._failed in excepthook.on_uncaught:
            excepthook.on_uncaught.remove(self._failed)
        self._parts.handle.close()
        self._parts.journal.close()

    def _ends(self) -> None:
        """The interpreter ends and nobody has called ``close``: Ctrl-C, ``sys.exit``, a loop that was left.

        What it still does, its teardown and other people's handlers, can take seconds. Nobody waits for that:
        for the job it is a death, and it is told at once.
        """
        if os.getpid() != self._pid:
            return  # a child that was forked in the middle of the job
        if self._engine.is_running and not isinstance(self._engine, RankEngine):
            self._engine.close()
            with contextlib.suppress(FabricError):
                self._parts.handle.gone()
        self._release_server()

    def _release_server(self) -> None:
        """A process that ends before it was ever in the job leaves nothing that anybody could want; what its
        server holds is kept for a successor, or for the others, in every other case."""
        self._parts.crash_marker.clear()  # who ends in order did not die at a micro-batch
        newest, handle = self._engine.newest, self._parts.handle
        listed = newest is not None and newest.lists(self.settings.replica, self._place.incarnation)
        if not listed and not self.epoch and not handle.snapshots:
            with contextlib.suppress(FabricError):
                handle.finish(linger_s=0.0)
