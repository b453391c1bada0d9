"""How a trainer's process leaves the job: it has finished, was ordered to stop, or the user's loop raised."""

import asyncio
import atexit
import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterable
from typing import NoReturn

import torch

from fabric.client.control.engine import Engine, EngineParts
from fabric.client.control.rank_engines import RankEngine
from fabric.client.loop.local_state import LoopProgress
from fabric.client.process import excepthook
from fabric.client.process.debug_endpoint import DebugEndpoint, flight, stacks
from fabric.client.process.last_notes import leave_job_end, raised_again
from fabric.errors import CollectiveFailed, ConfigError, FabricError, NotAMember, SessionOver
from fabric.exit_codes import DEVICE_FAILED, END_BY_SIGNAL, FAILED, FINISHED, RESTART
from fabric.model import JobEnd, Poison, first_of, shortened
from fabric.protocol.messages import member_events as io
from fabric.runtime import logs
from fabric.runtime.config import Settings, layout_orders
from fabric.runtime.process_environment import stop_s
from fabric.runtime.rank_layout import write_order

# This part of the time, and at most so many seconds, is left when the process ends itself.
_MARGIN, _MARGIN_S = 0.1, 2.0


class NoticeWatch:
    """Takes the first SIGTERM as a notice: the platform will kill this process soon, which leaves in order.

    A later one changes nothing, because one notice may come twice.

    A batch system signals every process, and a launcher passes its own signal on. ``call_soon`` lets the
    control thread call a function. ``on_notice`` and ``on_over`` get the seconds from the notice to the end.
    A handler that the user's script has set stays, and so does a process's wish to ignore SIGTERM. A handler
    around this one may call it, or bring it back, after ``end``.
    """

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], None],
        on_notice: Callable[[float], None],
        on_over: Callable[[float], None],
    ) -> None:
        self._call_soon, self._on_notice, self._on_over = call_soon, on_notice, on_over
        self._pid = os.getpid()
        self.has_come = self._is_over = False

    def begin(self) -> None:
        """Take the signal from now on; only in the main thread, which Python gives all signals."""
        if threading.current_thread() is not threading.main_thread():
            return
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._handle)

    def end(self) -> None:
        """Let SIGTERM end the process again."""
        self._is_over = True
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _handle(self, number: int, _: object) -> None:
        if self._is_over or os.getpid() != self._pid:  # or a child that the trainer forked
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        elif not self.has_come:
            self.has_come = True
            self._call_soon(self._begin_leaving)

    def _begin_leaving(self) -> None:
        left_s = stop_s()
        end_s = left_s - min(_MARGIN * left_s, _MARGIN_S)
        asyncio.get_running_loop().call_later(end_s, self._on_over, left_s)
        self._on_notice(left_s)


# Seconds for which a process whose loop has raised waits until the lighthouse acknowledges the error.
TELL_S = 5.0
_MOST_SAMPLES = 32
_MOST_CHARACTERS = 200


def describe(error: BaseException, at: tuple[int, int] | None, samples: Iterable[int]) -> str:
    """Return the exception in one line. ``at``: the step and micro-batch at which it was raised."""
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    text = shortened(text, _MOST_CHARACTERS)
    return text if at is None else f"{text} (at micro-batch {at[1]}, {_listed(list(samples))})"


def name_samples(poison: Iterable[Poison], samples: Callable[[int, int], list[int]]) -> str:
    """Return a sentence with the samples of every poisonous micro-batch, or an empty string."""
    parts = [
        f"micro-batch {micro_batch} of step {p.step} is {_listed(samples(p.step, micro_batch))}"
        for p in poison
        for micro_batch in p.micro_batches
    ]
    return f"; {'; '.join(parts)}" if parts else ""


def _listed(samples: list[int]) -> str:
    return f"samples {first_of(samples, _MOST_SAMPLES)}"


# The last words of a process whose user code raised without a micro-batch.
BARE = (
    "{reason}, at step {step}, for which this replica computed no micro-batch: every replica that catches up "
    "has such steps, so use step.metrics, or `if step.contributed:`, for what the loop over micro-batches "
    "has set; this replica ends alone, and the others go on"
)

# The last words of a session in a notebook.
CELL_FAILED = "an error in a cell ended this session, and other replicas go on; restart the kernel to train"
# Say at a cell's end that the job waits, as after a loop that was left by ``break``.
CELL_ENDED = (
    "this cell has ended, and the other replicas wait for this one's next step, for FABRIC_USER_CODE_S "
    "({user_code_s:g} s) at most: train on in another cell, or restart the kernel, and they go on without it"
)


def start_line(job: str, durable: bool, step: int, generation: int, progress: LoopProgress) -> str:
    """Return one sentence: where a process begins, and with which state."""
    where = f"job {job} at step {step}, generation {generation}"
    if progress.source:
        return f"goes on with {where}, with the state from {progress.source}"
    if generation > 1:
        return f"begins again with {where}, with its own initial state: no later state was left anywhere"
    lost = "" if durable else "; FABRIC_DURABLE is not set, so a loss of all replicas' memory loses the run"
    return f"begins {where}, with its own initial state{lost}"


# Lighthouses and name of the jobs that this process has trained to the end.
_ended: set[tuple[tuple[str, ...], str]] = set()


def refuse_second_training(settings: Settings) -> None:
    """Raise ConfigError where this process has trained the job to its end before."""
    if (settings.lighthouse, settings.job) in _ended:
        raise ConfigError(
            f"the script trains a second time in job {settings.job}, which has ended, and a job is one "
            "training: run each training as a job of its own, in a process of its own"
        )


class Shutdown:
    """Ends this process's part in the job; answers the checkpoint server's questions until then."""

    def __init__(self, parts: EngineParts, engine: Engine, progress: LoopProgress) -> None:
        settings, process = parts.settings, parts.process
        self._settings = settings
        self._process = process
        self._parts = parts
        self._engine = engine
        self._progress = progress
        self._unheard: JobEnd | None = None  # the job's end, where no lighthouse knows of this end yet
        self._pid = os.getpid()
        self._cell_step = -1  # the step at which a notebook's cell ended last
        self.notice = NoticeWatch(engine.call_soon, self._on_notice, self._on_time_over)
        self.words: dict[str, str] = {}  # words of sentences -> those of the API that an adapter's user calls
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
        """Make uncaught exceptions fail the job, and those of a notebook's cells end this replica alone."""
        excepthook.on_uncaught.append(self._on_uncaught)
        excepthook.on_cell_error.append(self._on_cell_error)
        excepthook.on_cell_end.append(self._on_cell_end)

    def leave(self, reason: str, code: int = FINISHED, layout: str = "") -> NoReturn:
        """End this process; print ``reason``, one sentence. ``layout``: order it from the launcher."""
        for ours, theirs in self.words.items():
            reason = reason.replace(ours, theirs)
        if layout and self._process.rank == 0:
            write_order(layout_orders(), layout)
        self._say(reason)
        self._parts.journal.write("stop", code=code, reason=reason)
        self._engine.close()
        self.end(finished=code == FINISHED)
        raise SystemExit(code)

    def note_end(self, order: io.Finish) -> None:
        """Note that the job is over; if no lighthouse knows, also on disk for this replica's next process."""
        if order.alone:
            self._say(order.alone)
            self._parts.journal.write("alone", step=order.step, reason=order.alone)
        if order.ended is not None:
            self._unheard = order.ended
            leave_job_end(self._settings.home, order.ended)

    def end(self, finished: bool) -> None:
        """Detach from the checkpoint server, if it still runs."""
        self._debug_endpoint.close()
        if finished:
            _ended.add((self._settings.lighthouse, self._settings.job))
            unheard = self._unheard
            self._parts.durable.await_last(self._parts.handle)
            linger_s = 5.0 if unheard is None else max(5.0, self._settings.orphan_s)
            with contextlib.suppress(FabricError):
                self._parts.handle.finish(linger_s, unheard)
        else:
            self._release_server()
        self._watch_no_more()
        self._parts.handle.close()
        self._parts.journal.close()

    def say_start(self, step: int) -> None:
        """Print where this process begins, and with which state; rank 0 speaks for all ranks."""
        if not self._process.rank:
            settings, engine = self._settings, self._engine
            self._say(
                start_line(settings.job, bool(settings.durable), step, engine.generation, self._progress)
            )

    def depart(self, reason: str, code: int = RESTART) -> None:
        """Leave the job as a death does, while other members go on.

        The lighthouse learns of it at once; of a replica of several ranks, when their processes have ended.
        The note of the micro-batch at hand stays, so that a second death at the micro-batch proves poison.
        """
        self._parts.journal.write("stop", code=code, reason=reason)
        self._engine.close()
        if not isinstance(self._engine, RankEngine):
            with contextlib.suppress(FabricError):
                self._parts.handle.gone()
        self._debug_endpoint.close()
        self._watch_no_more()

    def _on_uncaught(self, error: BaseException) -> None:
        """Fail the job for an error of the user's loop, then end this process.

        The process waits until the lighthouse has acknowledged the error, which rank 0 reports for all ranks.
        A device fault does not fail the job: only this replica dies. The same holds for any error with
        FABRIC_ON_EXCEPTION=restart, except a FabricError that shows a mistake.
        """
        if not isinstance(error, Exception):
            return
        if isinstance(error, torch.AcceleratorError):  # the device has failed, not the program
            os._exit(DEVICE_FAILED)
        at = self._progress.at
        samples = self._progress.samples.get(at[1], []) if at is not None else []
        reason = describe(error, at, samples)
        is_mistake = isinstance(error, FabricError) and not isinstance(error, CollectiveFailed | NotAMember)
        if self._progress.bare and not is_mistake:
            self._say(BARE.format(reason=reason, step=self._progress.state_step))
            self.depart(reason, FAILED)
            raise SystemExit(FAILED)
        if self._settings.on_exception == "restart" and not is_mistake:
            if at is not None or not raised_again(self._settings.home, self._progress.state_step, reason):
                self._say(f"this replica alone starts again after {reason}")
                self.depart(reason)
                raise SystemExit(RESTART)
            reason += f" (twice at step {self._progress.state_step} of {self._settings.replica})"
        if self.notice.has_come:
            # SIGTERM may have ended processes of the loop first, such as those that read its data.
            self._say(f"{reason}, after SIGTERM")
            self.depart(reason)
            raise SystemExit(RESTART)
        self._parts.crash_marker.clear()
        self._engine.post(io.LoopRaised(reason))
        with contextlib.suppress(queue.Empty):
            while not isinstance(self._engine.orders.get(timeout=TELL_S), io.Stop):
                pass
        self._parts.journal.write("stop", code=1, reason=reason)
        self._engine.close()
        self.end(finished=False)

    def _on_cell_error(self, error: BaseException) -> None:
        """Leave the job for an error of a notebook's cell, because the process goes on without its loop.

        A person tries things in a notebook: an error proves no poison and does not fail the job.
        """
        reason = describe(error, None, ())
        self._say(f"{reason}: {CELL_FAILED}")
        self._parts.crash_marker.clear()
        self._progress.left = SessionOver(CELL_FAILED)
        self.depart(reason, FAILED)

    def _on_cell_end(self) -> None:
        """Say, once for each step, that the others wait: nothing but this kernel can know what comes next."""
        current, step = self._engine.current, self._progress.state_step
        if current is not None and len(current.roster) > 1 and step != self._cell_step:
            self._cell_step = step
            self._say(CELL_ENDED.format(user_code_s=self._settings.user_code_s))

    def _on_notice(self, left_s: float) -> None:
        """On the control thread: leave the job in the time that is left, see rule 13 of docs/protocol.md."""
        self._parts.durable.noticed = True
        self._say(f"SIGTERM: this replica leaves the job at the end of a step, within {left_s:g} s")
        self._engine.post(io.Noticed())

    def _on_time_over(self, left_s: float) -> None:
        """On the control thread: end this process, because the main thread has not left in time."""
        why = f"the {left_s:g} s after SIGTERM are over at step {self._progress.state_step}"
        if self._settings.durable:
            why += "; if no replica has saved this step, the durable checkpoint before it stays whole"
        self._say(why)
        self._parts.journal.write("stop", code=END_BY_SIGNAL + signal.SIGTERM, reason=why)
        os._exit(END_BY_SIGNAL + signal.SIGTERM)

    def _watch_no_more(self) -> None:
        self.notice.end()
        atexit.unregister(self._on_exit)
        if self._on_uncaught in excepthook.on_uncaught:
            excepthook.on_uncaught.remove(self._on_uncaught)
            excepthook.on_cell_error.remove(self._on_cell_error)
            excepthook.on_cell_end.remove(self._on_cell_end)

    def _on_exit(self) -> None:
        """Handle an end of the interpreter without ``close``: Ctrl-C, ``sys.exit``, a loop that was left.

        The job treats this end as a death, and the lighthouse learns of it at once. The job need not wait for
        the interpreter's teardown, which can take seconds.
        """
        if os.getpid() != self._pid:
            return  # this process is a child that the trainer forked in the middle of the job
        if self._engine.is_running and not isinstance(self._engine, RankEngine):
            self._engine.close()
            with contextlib.suppress(FabricError):
                self._parts.handle.gone()
        self._release_server()

    def _release_server(self) -> None:
        """End the checkpoint server if this process was never in the job.

        Otherwise the server stays: this replica's next process, or other members, may need its content.
        """
        self._parts.crash_marker.clear()  # an orderly end of the process is not a death at a micro-batch
        newest, handle = self._engine.newest, self._parts.handle
        listed = newest is not None and newest.lists(self._settings.replica, self._process.incarnation)
        if not listed and not self._engine.epoch and not handle.snapshots:
            with contextlib.suppress(FabricError):
                handle.finish(linger_s=0.0)

    def _say(self, sentence: str) -> None:
        logs.tell(f"{self._settings.replica}: {sentence}")
