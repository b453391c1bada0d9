"""How a trainer's process leaves the job: finished, told to stop, or because the user's loop has raised."""

import atexit
import contextlib
import os
import queue
import sys
from typing import NoReturn

from fabric.client.control.engine import Engine, EngineParts
from fabric.client.control.rank_engines import RankEngine
from fabric.client.loop import job_end_note
from fabric.client.loop.loop_progress import LoopProgress
from fabric.client.process import excepthook
from fabric.client.process.debug_endpoint import DebugEndpoint, flight, stacks
from fabric.client.process.error_text import TELL_S, describe, is_device_fault
from fabric.client.process.incarnation_lock import ProcessIdentity
from fabric.errors import FabricError
from fabric.model import JobEnd
from fabric.protocol.messages import member_events as io
from fabric.runtime.config import Settings
from fabric.runtime.exit_codes import DEVICE_FAILED


class Shutdown:
    """Ends this process's part in the job; answers the checkpoint server's questions until then."""

    def __init__(
        self,
        settings: Settings,
        process: ProcessIdentity,
        parts: EngineParts,
        engine: Engine,
        progress: LoopProgress,
    ) -> None:
        self._settings = settings
        self._process = process
        self._parts = parts
        self._engine = engine
        self._progress = progress
        self._unheard: JobEnd | None = None  # the job's end, where no lighthouse has heard of it
        self._pid = os.getpid()
        atexit.register(self._on_exit)

        def state() -> dict[str, object]:
            return {"at": list(progress.at or ()), **engine.describe()}

        def exchange() -> dict[str, object]:
            roster = engine.current.names if engine.current is not None else ()
            recorder = parts.exchange.recorder
            return recorder.to_json(settings.replica, process.rank, engine.epoch, roster)

        answers = {"stacks": stacks, "flight": flight, "state": state, "exchange": exchange}
        self._debug_endpoint = DebugEndpoint(settings.home, answers)

    def watch_uncaught(self) -> None:
        """Let an uncaught exception fail the job from now on."""
        excepthook.on_uncaught.append(self._on_uncaught)

    def leave(self, reason: str, code: int = 0) -> NoReturn:
        """End this process with one sentence."""
        self._say(reason)
        self._parts.journal.write("stop", code=code, reason=reason)
        self._engine.close()
        self.end(finished=code == 0)
        raise SystemExit(code)

    def note_end(self, order: io.Finish) -> None:
        """Note that the job is over. Where no lighthouse has heard of it, leave a note for the next one."""
        if order.alone:
            self._say(order.alone)
            self._parts.journal.write("alone", step=order.step, reason=order.alone)
        if order.ended is not None:
            self._unheard = order.ended
            job_end_note.leave(self._settings.home, order.ended)

    def end(self, finished: bool) -> None:
        """Detach from the checkpoint server; one that is gone already needs no goodbye."""
        self._debug_endpoint.close()
        if finished:
            unheard = self._unheard
            linger_s = 5.0 if unheard is None else max(5.0, self._settings.orphan_s)
            with contextlib.suppress(FabricError):
                self._parts.handle.finish(linger_s, unheard)
        else:
            self._release_server()
        atexit.unregister(self._on_exit)
        if self._on_uncaught in excepthook.on_uncaught:
            excepthook.on_uncaught.remove(self._on_uncaught)
        self._parts.handle.close()
        self._parts.journal.close()

    def _on_uncaught(self, error: BaseException) -> None:
        """Fail the job for an error of the user's loop, then end this process.

        The process waits until the lighthouse has heard, which rank 0 tells for all ranks. A device fault is
        a death of this replica alone.
        """
        if not isinstance(error, Exception):
            return
        if is_device_fault(error):
            os._exit(DEVICE_FAILED)
        at = self._progress.at
        samples = self._progress.samples.get(at[1], []) if at is not None else []
        reason = describe(error, at, samples)
        self._parts.crash_marker.clear()
        self._engine.post(io.LoopRaised(reason))
        with contextlib.suppress(queue.Empty):
            while not isinstance(self._engine.orders.get(timeout=TELL_S), io.Stop):
                pass
        self._parts.journal.write("stop", code=1, reason=reason)
        self._engine.close()
        self.end(finished=False)

    def _on_exit(self) -> None:
        """Handle an end of the interpreter without ``close``: Ctrl-C, ``sys.exit``, a loop that was left.

        The interpreter's teardown can take seconds. The job does not wait for it: for the job this is a
        death, and the lighthouse hears of it at once.
        """
        if os.getpid() != self._pid:
            return  # a child that was forked in the middle of the job
        if self._engine.is_running and not isinstance(self._engine, RankEngine):
            self._engine.close()
            with contextlib.suppress(FabricError):
                self._parts.handle.gone()
        self._release_server()

    def _release_server(self) -> None:
        """End the checkpoint server of a process that was never in the job.

        In every other case the server stays: a successor, or other members, may want its content.
        """
        self._parts.crash_marker.clear()  # an orderly end is not a death at a micro-batch
        newest, handle = self._engine.newest, self._parts.handle
        listed = newest is not None and newest.lists(self._settings.replica, self._process.incarnation)
        if not listed and not self._engine.epoch and not handle.snapshots:
            with contextlib.suppress(FabricError):
                handle.finish(linger_s=0.0)

    def _say(self, sentence: str) -> None:
        sys.stderr.write(f"fabric: {self._settings.replica}: {sentence}\n")
        sys.stderr.flush()
