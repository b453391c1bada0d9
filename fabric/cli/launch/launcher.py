"""The loop of ``fabric launch``: starts attempts of a replica until one has finished or no restart helps."""

import contextlib
import errno
import logging
import math
import os
import selectors
import signal
import socket
import time
import uuid
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType

from msgspec.structs import replace

from fabric.cli.launch.attempt import AttemptSpec, LaunchAttempt, Place, RankOutput, RankProcess
from fabric.cli.launch.devices import visible_devices
from fabric.cli.launch.lighthouse_words import (
    LAST_REPORT_S,
    LAST_WORDS_S,
    AttemptReport,
    OtherHosts,
    Reporter,
    WordsThread,
)
from fabric.cli.launch.restart_policy import DeviceHistory, NextMove, RestartPolicy, choose_layout
from fabric.cli.launch.standbys import Standbys
from fabric.errors import ConfigError, FabricError
from fabric.exit_codes import DEVICE_FAILED, END_BY_SIGNAL, FINISHED, RESTART
from fabric.model import Value
from fabric.protocol.nodes import SPARE, NodeEnd, NodeOrder
from fabric.runtime.guarded_processes import MarkedProcesses
from fabric.runtime.process_environment import LAUNCH_MARK, LAUNCH_RESTARTS, LAUNCH_STOP_S, LAYOUT_ORDERS
from fabric.runtime.rank_layout import LayoutMemory, LayoutOffer, LayoutOrder, RankLayout

log = logging.getLogger(__name__)

# After the first failure the other ranks have this time to end on their own and to log why.
GRACE_S = 10.0
# Time from SIGTERM to SIGKILL after a rank has failed.
_TERM_S = 5.0
STOPPED_S = 3.0  # for this host's ranks to end on their own after a failure on another host
# Ranks import, build their model and load a state in this time. Later the host has time for standbys.
STANDBYS_AFTER_S = 20.0
UNTOLD_S = 60.0  # that a host whose ranks have finished waits to hear of the others
# These signals end the launcher and its ranks; the launcher passes all other signals to the ranks.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)
START_STANDBYS = 0  # no signal has this number
_TRIES = 64  # ports that the kernel may offer before there is a fresh one


class SignalInbox:
    """Collects ENDING and PASSED_ON while it is open; ``descriptor`` is readable when a signal has come.

    A signal that this process was started to ignore, as nohup does, stays ignored.
    """

    def __init__(self) -> None:
        self.descriptor, self._writer = os.pipe()
        for end in (self.descriptor, self._writer):
            os.set_blocking(end, False)
        self._before: dict[int, object] = {}

    def __enter__(self) -> "SignalInbox":
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (*ENDING, *PASSED_ON):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, lambda *_: None)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        os.close(self.descriptor)
        os.close(self._writer)

    def read(self) -> list[int]:
        """Return the signals that have come since the last call; never waits."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self.descriptor, 4096) if number in self._before]
        return []


class RendezvousPort:
    """The port of each attempt's rendezvous, which no other attempt uses.

    During the attempt the launcher keeps the port bound without listening on it. So the kernel does not give
    the port to a process that asks for any free port. Rank 0 may listen there: both sockets allow reuse.
    """

    def __init__(self, address: str) -> None:
        self._address = address  # to bind; empty: all addresses of this host
        self._held: socket.socket | None = None
        self._used: deque[int] = deque(maxlen=4096)

    def renew(self) -> int:
        """Reserve a port that no attempt of this launcher has had, and release the last attempt's port."""
        rejected: list[socket.socket] = []
        try:
            for _ in range(_TRIES):
                reserved = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
                reserved.bind((self._address, 0))
                port = int(reserved.getsockname()[1])
                if port in self._used:
                    rejected.append(reserved)  # stays bound, so that the kernel offers another port next
                    continue
                # Set after the bind: with reuse, the kernel might offer a port that another launcher holds.
                reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                self.close()
                self._held = reserved if _can_be_listened_on(port) else None
                if self._held is None:
                    reserved.close()  # without such reuse the kernel rarely gives this port away
                self._used.append(port)
                return port
        except OSError as error:
            raise FabricError(f"no port of this host can be reserved for the ranks ({error})") from error
        finally:
            for reserved in rejected:
                reserved.close()
        raise FabricError(
            "no fresh port of this host was found for the ranks: wait, and start the replica again"
        )

    def close(self) -> None:
        """Release the port."""
        if self._held is not None:
            self._held.close()
            self._held = None


def _can_be_listened_on(port: int) -> bool:
    """Whether another socket may listen on a port that is bound here, as rank 0 will."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            probe.listen(1)
            return True
    return False


class LaunchPlan(Value):
    """The command, layouts and limits of one launcher."""

    command: tuple[str, ...]
    candidates: tuple[RankLayout, ...]  # layouts that the ranks may get, the preferred layout first
    environment: dict[str, str]
    replica: str
    restarts: int | None = None  # the most restarts; None: any number
    log_dir: Path | None = None
    nodes: int = 1  # hosts of the replica
    node: int = 0  # this host's number; SPARE: a spare host
    leave_file: Path | None = None  # if it exists when the replica finishes, the replica has left this host
    stop_s: float = 30.0  # time from the signal that ends the launcher to SIGKILL
    has_standbys: bool = False  # whether ranks are Python programs, which standbys can become
    has_lighthouse: bool = False  # whether the lighthouse is told how attempts end


class OrderedLayout(Value):
    """The layout that the lighthouse has ordered for this replica."""

    layout: RankLayout
    without: frozenset[str]  # devices that stay unused


@dataclass
class Deadlines:
    """The signals that the launcher will send to the ranks of an attempt, each at its time.

    START_STANDBYS in a signal's place: while no rank has failed, the standbys start.
    """

    steps: list[tuple[float, int]] = field(default_factory=list)  # (monotonic time, signal) to send, in order

    def wait_s(self) -> float | None:
        """Return the time to the next signal; None without one."""
        return max(0.0, self.steps[0][0] - time.monotonic()) if self.steps else None

    def due(self) -> list[int]:
        """Take the signals whose time has come."""
        now = time.monotonic()
        ready = [number for at, number in self.steps if at <= now]
        self.steps = self.steps[len(ready) :]
        return ready


class Launcher:
    """Keeps one replica running."""

    def __init__(self, plan: LaunchPlan, marked: MarkedProcesses, inbox: SignalInbox) -> None:
        self._plan, self._marked, self._inbox = plan, marked, inbox
        self._policy = RestartPolicy(plan.restarts)
        self._rendezvous = RendezvousPort("127.0.0.1" if plan.nodes == 1 else "")
        self._history = DeviceHistory()
        self._refused: list[RankLayout] = []
        self._layouts = LayoutMemory()
        self._ordered: OrderedLayout | None = None  # the layout that the lighthouse has ordered
        self._devices: tuple[str, ...] = ()
        self._selector = selectors.DefaultSelector()
        self._selector.register(inbox.descriptor, selectors.EVENT_READ, inbox)
        self._ended_by = 0  # the signal that ends this launcher
        self._attempts = 0
        self._standbys = Standbys()
        self._last_line = ""  # what the first rank of the newest attempt that failed wrote last
        self._words = WordsThread()
        self._selector.register(self._words.descriptor, selectors.EVENT_READ, self._words)
        self._reporter = Reporter(plan.environment, self._words) if plan.has_lighthouse else None
        self._hosts: OtherHosts | None = None
        if plan.nodes > 1:
            self._hosts = OtherHosts(plan.environment, plan.nodes, plan.node, self._words)

    def run(self) -> int:
        """Run attempts until the end; return the exit code. Raises FabricError where no attempt can begin."""
        try:
            return self._run()
        except ConfigError as error:
            self._report(str(error), gave_up=True)
            raise
        finally:
            self._standbys.close()
            if self._hosts is not None:
                ended_by = (
                    f"{signal.Signals(self._ended_by).name} ended" if self._ended_by else "nothing needs"
                )
                self._wait_for(self._hosts.leave(f"{ended_by} its launcher"), LAST_WORDS_S)
            self._words.close()

    def _run(self) -> int:
        while True:
            layout, devices = self._next_layout()
            place = self._meet(layout, devices)
            if place is None:
                return self._stop() if self._ended_by else FINISHED
            end = self._attempt(layout, devices, place)
            if self._ended_by and not end.is_clean:
                return self._stop()
            for rank in (rank for rank, code in sorted(end.codes.items()) if code == DEVICE_FAILED):
                device = devices[rank - place.own_ranks(layout).start]
                if self._history.note(device, time.monotonic()):
                    log.error("device %s has failed repeatedly (rank %d): it is used no more", device, rank)
            end = self._end_everywhere(end)
            order = self._layouts.take() if end.codes.get(0) == RESTART else None
            move = self._policy.judge(end) if order is None else self._follow(order, devices)
            if move.code is not None:
                return self._finish(move)
            if move.refused:
                self._refused.append(layout)
                self._ordered = None
            when = f"in {move.pause_s:g} s" if move.pause_s else "at once"
            log.warning("%s (%s): attempt %d begins %s", move.why, layout, self._attempts + 1, when)
            # One of the replica's hosts tells the lighthouse.
            own = range(layout.ranks) if self._hosts is None else self._hosts.own_ranks
            if order is None and min(end.first or end.codes, default=0) in own:
                self._report(move.why, gave_up=False)
            until = time.monotonic() + move.pause_s
            while not self._ended_by and (left_s := until - time.monotonic()) > 0:
                self._look(left_s)
            if self._ended_by:
                return self._stop()

    # --- before an attempt --------------------------------------------------------------------------------

    def _next_layout(self) -> tuple[RankLayout, tuple[str, ...]]:
        """Return the layout of the next attempt, and the devices of its ranks in order."""
        ordered = self._ordered
        candidates = (*([ordered.layout] if ordered is not None else []), *self._plan.candidates)
        visible = visible_devices(self._plan.environment)
        if self._devices and not visible:
            raise ConfigError(
                f"replica {self._plan.replica}: this host had {len(self._devices)} GPUs and has none now: "
                "see its kernel's log, and start the replica elsewhere"
            )
        self._devices = visible
        nodes = self._plan.nodes
        most = max(layout.ranks for layout in candidates) // nodes
        usable = self._history.usable(visible or tuple(map(str, range(most))))
        if ordered is not None:
            usable = tuple(device for device in usable if device not in ordered.without)
        layout = choose_layout(candidates, len(usable) * nodes, self._refused)
        if layout is not None:
            return layout, usable
        raise ConfigError(self._why_none(len(visible), len(usable)))

    def _why_none(self, visible: int, usable: int) -> str:
        replica = self._plan.replica
        least = min(layout.ranks for layout in self._plan.candidates) // self._plan.nodes
        if self._refused:
            refused = " and ".join(f'"{layout}"' for layout in self._refused)
            return (
                f"replica {replica}: its script cannot build the layout {refused}, and there is no other: "
                "give --layout or --ranks that it can build"
            )
        if self._history.excluded:
            return (
                f"replica {replica}: {usable} of its devices work, and {least} ranks are needed: mend the "
                "host, or give a range such as --ranks 1:4"
            )
        return (
            f"replica {replica}: {least} ranks are asked for and this host has {visible} usable GPUs: give "
            "fewer --ranks, a range such as 1:4, or set CUDA_VISIBLE_DEVICES= for the CPU"
        )

    def _meet(self, layout: RankLayout, devices: Sequence[str]) -> Place | None:
        """Return this host's place in the next attempt, None where this launcher ends before.

        In a replica of several hosts it waits until each number has a host.
        """
        port = self._rendezvous.renew()
        if self._hosts is None:
            return Place(port=port)
        self._hosts.wait_for_attempt(layout, port)
        if self._plan.node == SPARE and self._plan.has_standbys and not self._attempts:
            self._spec(layout, devices, Place(nodes=self._plan.nodes)).start_standbys(self._standbys)
        reason = ""
        while not self._ended_by:
            order = self._hosts.order
            if order.do == "start":
                self._attempts = order.attempt - 1
                if not self._plan.environment.get("FABRIC_REPLICA"):  # a spare host has its replica only now
                    self._plan.environment["FABRIC_REPLICA"] = order.replica
                    self._reporter = Reporter(self._plan.environment, self._words)
                return self._hosts.take_place(order)
            if order.do == "leave":
                log.info("this host leaves: %s", order.why)
                return None
            if order.why != reason:
                reason = order.why
                log.log(logging.WARNING if order.is_refusal else logging.INFO, "this host waits: %s", reason)
            self._look(None)
        return None

    def _spec(self, layout: RankLayout, devices: Sequence[str], place: Place) -> AttemptSpec:
        environment = dict(self._plan.environment)
        if self._devices:
            if environment.get("CUDA_VISIBLE_DEVICES") is None:
                # The driver lists GPUs in this order, so number k is the same GPU for CUDA.
                environment.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
            if tuple(devices) != self._devices or "CUDA_VISIBLE_DEVICES" in environment:
                environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
        if self._hosts is None:
            environment[LAYOUT_ORDERS] = str(self._layouts.descriptor)
        allowed = [str(x) for x in self._plan.candidates if x not in self._refused]
        self._layouts.offer(LayoutOffer(tuple(allowed), tuple(map(str, self._refused))))
        return AttemptSpec(
            command=self._plan.command,
            environment=environment,
            layout=layout,
            place=place,
            number=self._attempts,
            run=uuid.uuid4().hex if self._hosts is None else self._hosts.says.run,
            replica=self._plan.replica,
            log_dir=self._plan.log_dir,
            inherited=(self._layouts.descriptor,),
        )

    # --- an attempt ---------------------------------------------------------------------------------------

    def _attempt(self, layout: RankLayout, devices: Sequence[str], place: Place) -> NodeEnd:
        """Run this host's ranks to their end, and end the processes that they leave behind."""
        spec = self._spec(layout, devices, place)
        attempt = LaunchAttempt(spec, self._selector, self._standbys)
        self._attempts += 1
        began = time.monotonic()
        try:
            attempt.start()
        except OSError as error:
            code = 127 if error.errno == errno.ENOENT else 126
            log.error("%s cannot be started (%s): correct the command", self._plan.command[0], error.strerror)
            return NodeEnd({place.own_ranks(layout).start: code})
        pids = ", ".join(f"rank {rank} is process {pid}" for rank, pid in enumerate(attempt.pids))
        log.info("attempt %d runs (%s): %s", self._attempts, layout, pids)
        first: tuple[int, ...] = ()
        failed_at = 0.0
        stopped = False
        deadlines = Deadlines()
        if self._plan.has_standbys and self._policy.may_restart():
            deadlines.steps = [(began + STANDBYS_AFTER_S, START_STANDBYS)]
        while attempt.is_running:
            ended = self._wait(attempt, deadlines)
            failed = tuple(rank.rank for rank in ended if rank.code != FINISHED)
            if failed and not (first or stopped or self._ended_by):
                first, failed_at = failed, time.monotonic()
                deadlines.steps = [
                    (failed_at + GRACE_S, signal.SIGTERM),
                    (failed_at + GRACE_S + _TERM_S, signal.SIGKILL),
                ]
            order = NodeOrder("run") if self._hosts is None else self._hosts.order
            if order.do == "stop" and not (stopped or self._ended_by):
                stopped = True
                log.warning("%s: this host's ranks end too", order.why)
                at = time.monotonic() + STOPPED_S
                deadlines.steps = [(at, signal.SIGTERM), (at + _TERM_S, signal.SIGKILL)]
        self._marked.sessions, self._marked.spared = frozenset(attempt.pids), self._standbys.pids
        self._marked.kill()
        attempt.close()
        self._last_line = attempt.last_line(first)
        return NodeEnd(attempt.codes, first, (failed_at or time.monotonic()) - began)

    def _wait(self, attempt: LaunchAttempt, deadlines: Deadlines) -> list[RankProcess]:
        """Wait for the next events; return the ranks that have ended."""
        ended = []
        for key, _ in self._selector.select(deadlines.wait_s()):
            if isinstance(key.data, RankProcess):
                attempt.note_end(key.data)
                ended.append(key.data)
            elif isinstance(key.data, RankOutput) and not key.data.pump():
                self._selector.unregister(key.data.source)
            elif key.data is self._words:
                self._hear()
        for number in self._inbox.read():
            self._forward(number, attempt, deadlines)
        for number in deadlines.due():
            if number == START_STANDBYS:
                attempt.spec.start_standbys(self._standbys)
            else:
                attempt.signal(number)
        return ended

    def _forward(self, number: int, attempt: LaunchAttempt, deadlines: Deadlines) -> None:
        if number not in ENDING:
            attempt.signal(number)
        elif self._ended_by:
            attempt.signal(signal.SIGKILL)  # the second signal kills all ranks at once
        else:
            self._ended_by = number
            log.info("%s: the ranks have %g s to end", signal.Signals(number).name, self._plan.stop_s)
            attempt.signal(number)
            deadlines.steps = [(time.monotonic() + self._plan.stop_s, signal.SIGKILL)]

    # --- after an attempt ---------------------------------------------------------------------------------

    def _end_everywhere(self, end: NodeEnd) -> NodeEnd:
        """Tell the replica's other hosts how this one's ranks ended; return the end of all.

        Without an answer, as where the lighthouse is away, ranks that have finished are waited for no longer.
        """
        if self._hosts is None:
            return end
        self._hosts.tell_end(end)
        until = time.monotonic() + UNTOLD_S if end.is_clean else math.inf
        while not self._ended_by and time.monotonic() < until:
            of_all = self._hosts.order.ended
            if of_all is not None:
                return of_all
            self._look(min(until - time.monotonic(), 3600.0))
        return end

    def _look(self, timeout_s: float | None) -> bool:
        """Wait for an order or a signal, while no rank runs; return whether a signal ends the launcher."""
        if any(key.data is self._words for key, _ in self._selector.select(timeout_s)):
            self._hear()
        ending = [number for number in self._inbox.read() if number in ENDING]
        self._ended_by = self._ended_by or next(iter(ending), 0)
        return bool(ending)

    def _hear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._words.descriptor)

    def _wait_for(self, words: "Future[None]", at_most_s: float) -> None:
        """Wait until these words have arrived, unless another signal comes."""
        until = time.monotonic() + at_most_s
        while not words.done() and (left_s := until - time.monotonic()) > 0 and not self._look(left_s):
            pass

    def _follow(self, order: LayoutOrder, devices: Sequence[str]) -> NextMove:
        """Take the ordered layout for the next attempts, which begin at once."""
        without = frozenset(devices[rank] for rank in order.without if rank < len(devices))
        self._ordered = OrderedLayout(order.layout, without)
        return NextMove(why=f"the lighthouse orders the layout {order}")

    def _finish(self, move: NextMove) -> int:
        assert move.code is not None
        if move.code != FINISHED:
            log.error("the replica is not started again: %s", move.why)
            self._report(move.why, gave_up=True)
        elif self._plan.leave_file is not None and self._plan.leave_file.exists():
            return RESTART
        return move.code

    def _stop(self) -> int:
        """Report the signal that ends this launcher; return its exit code."""
        self._report(f"{signal.Signals(self._ended_by).name} ended its launcher", gave_up=True)
        return END_BY_SIGNAL + self._ended_by

    def _report(self, why: str, *, gave_up: bool) -> None:
        """Tell the lighthouse how the newest attempt ended."""
        if self._reporter is not None:
            report = AttemptReport(self._attempts, why, self._last_line, gave_up, self._ended_by)
            arrived = self._reporter.tell(report)
            if gave_up:
                self._wait_for(arrived, LAST_REPORT_S)


def launch(plan: LaunchPlan) -> int:
    """Keep the replica of ``plan`` running; return the launcher's exit code. Raises FabricError."""
    mark = f"{os.getpid()}-{uuid.uuid4().hex}"
    limit = {} if plan.restarts is None else {LAUNCH_RESTARTS: str(plan.restarts)}
    own = {**limit, LAUNCH_STOP_S: f"{plan.stop_s:g}", LAUNCH_MARK: mark}
    plan = replace(plan, environment={**plan.environment, **own})
    with SignalInbox() as inbox:
        return Launcher(plan, MarkedProcesses(LAUNCH_MARK, mark), inbox).run()
