"""The loop of ``fabric launch``: starts attempts of a replica until one has finished or no restart helps."""

import contextlib
import errno
import json
import logging
import math
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import fabric
from fabric.cli.launch.attempt import AttemptSpec, LaunchAttempt, Place, RankOutput, RankProcess
from fabric.cli.launch.devices import device_kind, visible_devices
from fabric.cli.launch.node_link import NodeLink
from fabric.cli.launch.restart_policy import AttemptEnd, DeviceHistory, NextMove, RestartPolicy, choose_layout
from fabric.errors import ConfigError, FabricError, Unreachable
from fabric.exit_codes import END_BY_SIGNAL, FINISHED, RESTART
from fabric.model import counted, shortened
from fabric.protocol.nodes import NodeEnd, NodeOrder, NodeSays
from fabric.runtime.config import advertised_host, settings
from fabric.runtime.guarded_processes import MarkedProcesses
from fabric.runtime.http.lighthouse_client import Lighthouses
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.process_environment import (
    LAUNCH_MARK,
    LAUNCH_RESTARTS,
    LAUNCH_STOP_S,
    LAYOUT_ORDERS,
    own_program,
)
from fabric.runtime.rank_layout import LayoutMemory, LayoutOffer, LayoutOrder, RankLayout
from fabric.runtime.system_calls import die_with

# Ends the processes that a killed launcher leaves behind.
#
# The kernel kills the ranks of a dead launcher, but not the processes that the ranks have started. So the
# launcher forks a guard before the first rank. The guard waits for the end of a pipe that the launcher
# alone holds open. Then it kills every process of the ranks' sessions, and every process with the
# launcher's mark.


# Collects the signals that a launcher gets, for its loop to read.


# These signals end the launcher and its ranks; the launcher passes all other signals to the ranks.
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
PASSED_ON = (signal.SIGUSR1, signal.SIGUSR2)


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


_CALM = b"calm\n"


class Guard:
    """The guard of one launcher. Make it while this process has one thread."""

    def __init__(self, marked: MarkedProcesses) -> None:
        reader, self._writer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            _watch(reader, self._writer, marked)
        os.close(reader)

    def tell(self, sessions: Iterable[int]) -> None:
        """Send it the sessions of the new attempt, which replace the earlier ones."""
        self._write(" ".join(map(str, sessions)).encode() + b"\n")

    def close(self) -> None:
        """Tell the guard that no process is left, and wait for the guard's end."""
        self._write(_CALM)
        os.close(self._writer)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(self._pid, 0)

    def _write(self, line: bytes) -> None:
        with contextlib.suppress(BrokenPipeError):  # the guard was killed; the kernel still ends the ranks
            os.write(self._writer, line)


def _watch(reader: int, writer: int, marked: MarkedProcesses) -> NoReturn:
    """Run as the guard."""
    try:
        # A signal from the terminal that ends the launcher must not end its guard first.
        os.setsid()
        for number in (*ENDING, *PASSED_ON):
            signal.signal(number, signal.SIG_IGN)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            *_, last = [b"", *pipe]
        if last != _CALM:
            marked.sessions = frozenset(int(word) for word in last.split())
            marked.kill(_KILL_S)
    finally:
        os._exit(0)


# Tells the lighthouse how a launcher's attempts end, so that people see replicas that never attach.
#
# The launcher must keep one thread and must not wait, so a process of its own carries each report.


# A report that no lighthouse has taken by then is old, and is dropped.
_TRIES_S = 30.0
_PAUSE_S = 2.0
# A launcher that gives up waits at most this long for its last report. On a busy host, where Ctrl-C ends many
# launchers at once, each starts a process that sends it.
_LAST_S = 15.0
_LONGEST = 300  # characters of a reason that the lighthouse takes


@dataclass(frozen=True, slots=True)
class AttemptReport:
    """How an attempt ended, for the lighthouse."""

    attempt: int
    why: str
    last_line: str  # of standard error; empty: the launcher does not read it
    gave_up: bool  # the launcher starts the replica no more
    stopped: int  # the signal that ended the launcher; 0: none


class Reporter:
    """Sends reports one at a time; a newer report ends the sending of the older one."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        # The mark would let the next attempt kill the sender. The layout may be a list of several.
        hidden = (LAUNCH_MARK, "FABRIC_LAYOUT")
        self._environment = {name: value for name, value in environment.items() if name not in hidden}
        self._sender: subprocess.Popen[bytes] | None = None

    def tell(self, report: AttemptReport) -> None:
        """Begin to report the end of an attempt; never waits."""
        self.close()
        body = asdict(replace(report, why=shortened(report.why, _LONGEST)))
        with contextlib.suppress(OSError):
            self._sender = subprocess.Popen(
                own_program("fabric.cli.launch.launcher", json.dumps(body)),
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509  (this process has one thread)
            )

    def finish(self) -> None:
        """Wait a moment until the last report has arrived."""
        if self._sender is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._sender.wait(_LAST_S)

    def close(self) -> None:
        """End the sending of a report."""
        if self._sender is not None:
            self._sender.kill()
            self._sender.wait()
            self._sender = None


def send(body: dict[str, Any]) -> None:
    """Send one report to the leader, and wait for a leader if there is none. Raises FabricError."""
    chosen = settings()
    token = TokenFile(chosen.token_file)  # it may be replaced while no lighthouse leads
    lighthouses = Lighthouses(chosen.lighthouse, chosen.job, token, chosen.tls)
    own = {"replica": chosen.replica, "host": advertised_host(chosen), "spare": chosen.spare}
    until = time.monotonic() + _TRIES_S
    while True:
        try:
            lighthouses.ask(lighthouses.path("launcher"), {**own, **body})
        except Unreachable:
            if time.monotonic() > until:
                raise
            time.sleep(_PAUSE_S)
        else:
            return


if __name__ == "__main__":
    with contextlib.suppress(FabricError):  # the lighthouse knows no such job, or is of an older release
        send(json.loads(sys.argv[1]))


# A fresh rendezvous for each attempt: a TCP port of this host that no other attempt uses.
#
# During the attempt the launcher keeps the port bound without listening on it. So the kernel does not
# give the port to a process that asks for any free port. Rank 0 may still listen there: both sockets
# allow reuse.


_TRIES = 64


class RendezvousPort:
    """The ports of a launcher's attempts, one at a time."""

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


log = logging.getLogger(__name__)

# After the first failure the other ranks have this time to end on their own and to log why.
GRACE_S = 10.0
# Time from SIGTERM to SIGKILL after a rank has failed.
_TERM_S = 5.0
STOPPED_S = 3.0  # for this host's ranks to end on their own after a failure on another host
UNTOLD_S = 60.0  # that a host whose ranks have finished waits to hear of the others
_KILL_S = 10.0


@dataclass(frozen=True, slots=True)
class LaunchPlan:
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
    has_lighthouse: bool = False  # whether the lighthouse is told how attempts end


@dataclass(frozen=True, slots=True)
class OrderedLayout:
    """The layout that the lighthouse has ordered for this replica."""

    layout: RankLayout
    without: frozenset[str]  # devices that stay unused


@dataclass
class Deadlines:
    """The signals that the launcher will send to the ranks of an attempt, each at its time."""

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


class OtherHosts:
    """This host's words to the other hosts of its replica, and their answers over ``link``."""

    def __init__(self, plan: LaunchPlan, selector: selectors.BaseSelector) -> None:
        chosen = settings({"FABRIC_REPLICA": "spare-node", **plan.environment, "FABRIC_LAYOUT": ""})
        self._host = advertised_host(chosen)
        self.link = NodeLink(plan.environment, selector)
        kind, count, device_gb = device_kind(plan.environment)
        self.says = NodeSays(
            uuid.uuid4().hex,
            self._host,
            plan.node,
            plan.nodes,
            "",
            "none",
            rack=chosen.rack,
            device=kind,
            devices=count,
            device_gb=device_gb,
            memory_gb=os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 1e9,
        )
        self.own_ranks = range(0)

    def wait_for_attempt(self, layout: RankLayout, port: int) -> None:
        """Say that this host waits for the next attempt; rank 0 would listen on ``port``."""
        count = layout.ranks // self.says.nodes
        shape = f"{self.says.nodes} nodes of {counted(count, 'rank')} ({layout}), fabric {fabric.__version__}"
        address = f"{self._host}:{port}"
        self.says = replace(self.says, shape=shape, address=address, run="", end=None)
        self.own_ranks = range(count)
        self.link.say(self.says)

    def take_place(self, order: NodeOrder) -> Place:
        """Obey an order to start, and return this host's place."""
        says = replace(
            self.says, run=order.run, attempt=order.attempt, node=order.node, instead=order.instead
        )
        first = order.node * len(self.own_ranks)
        self.says, self.own_ranks = says, range(first, first + len(self.own_ranks))
        self.link.say(says, order.replica)
        host, _, port = order.head.rpartition(":")
        return Place(order.node, says.nodes, host, int(port))

    def tell_end(self, end: AttemptEnd) -> None:
        """Say how this host's ranks ended."""
        self.says = replace(self.says, end=NodeEnd(dict(end.codes), end.first, end.ran_s))
        self.link.say(self.says)

    def leave(self, why: str) -> None:
        """Say that this launcher ends, and wait a moment until the others know."""
        self.link.say(replace(self.says, gone=why))
        self.link.close()


class Launcher:
    """Keeps one replica running."""

    def __init__(self, plan: LaunchPlan, guard: Guard, marked: MarkedProcesses, inbox: SignalInbox) -> None:
        self._plan, self._guard, self._marked, self._inbox = plan, guard, marked, inbox
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
        self._last_line = ""  # what the first rank of the newest attempt that failed wrote last
        self._reporter = Reporter(plan.environment) if plan.has_lighthouse else None
        self._hosts = OtherHosts(plan, self._selector) if plan.nodes > 1 else None

    def run(self) -> int:
        """Run attempts until the end; return the exit code. Raises FabricError where no attempt can begin."""
        try:
            return self._run()
        except ConfigError as error:
            self._report(str(error), gave_up=True)
            raise
        finally:
            if self._hosts is not None:
                ended_by = (
                    f"{signal.Signals(self._ended_by).name} ended" if self._ended_by else "nothing needs"
                )
                self._hosts.leave(f"{ended_by} its launcher")
            if self._reporter is not None:
                self._reporter.close()

    def _run(self) -> int:
        while True:
            layout, devices = self._next_layout()
            place = self._meet(layout)
            if place is None:
                return self._stop() if self._ended_by else FINISHED
            end = self._attempt(layout, devices, place)
            if self._ended_by and set(end.codes.values()) != {FINISHED}:
                return self._stop()
            self._note_devices(end, devices, place.own_ranks(layout).start)
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
            self._pause(move.pause_s)
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

    def _meet(self, layout: RankLayout) -> Place | None:
        """Return this host's place in the next attempt, None where this launcher ends before.

        In a replica of several hosts it waits until each number has a host.
        """
        port = self._rendezvous.renew()
        if self._hosts is None:
            return Place(port=port)
        self._hosts.wait_for_attempt(layout, port)
        reason = ""
        while not self._ended_by:
            order = self._hosts.link.order
            if order.do == "start":
                self._attempts = order.attempt - 1
                if not self._plan.environment.get("FABRIC_REPLICA"):  # a spare host has its replica only now
                    self._plan.environment["FABRIC_REPLICA"] = order.replica
                    self._reporter = Reporter(self._plan.environment)
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

    def _attempt(self, layout: RankLayout, devices: Sequence[str], place: Place) -> AttemptEnd:
        """Run this host's ranks to their end, and end the processes that they leave behind."""
        attempt = LaunchAttempt(self._spec(layout, devices, place), self._selector)
        self._attempts += 1
        began = time.monotonic()
        try:
            attempt.start()
        except OSError as error:
            code = 127 if error.errno == errno.ENOENT else 126
            log.error("%s cannot be started (%s): correct the command", self._plan.command[0], error.strerror)
            return AttemptEnd({place.own_ranks(layout).start: code})
        self._guard.tell(attempt.pids)
        log.info("attempt %d runs (%s): %s", self._attempts, layout, _named(attempt.pids))
        first: tuple[int, ...] = ()
        failed_at = 0.0
        stopped = False
        deadlines = Deadlines()
        while attempt.is_running:
            ended = self._wait(attempt, deadlines)
            failed = tuple(rank.rank for rank in ended if rank.code != FINISHED)
            if failed and not (first or stopped or self._ended_by):
                first, failed_at = failed, time.monotonic()
                deadlines.steps = [
                    (failed_at + GRACE_S, signal.SIGTERM),
                    (failed_at + GRACE_S + _TERM_S, signal.SIGKILL),
                ]
            order = NodeOrder("run") if self._hosts is None else self._hosts.link.order
            if order.do == "stop" and not (stopped or self._ended_by):
                stopped = True
                log.warning("%s: this host's ranks end too", order.why)
                at = time.monotonic() + STOPPED_S
                deadlines.steps = [(at, signal.SIGTERM), (at + _TERM_S, signal.SIGKILL)]
        self._marked.sessions = frozenset(attempt.pids)
        self._marked.kill(_KILL_S)
        attempt.close()
        self._last_line = attempt.last_line(first)
        return AttemptEnd(attempt.codes, first, (failed_at or time.monotonic()) - began)

    def _wait(self, attempt: LaunchAttempt, deadlines: Deadlines) -> list[RankProcess]:
        """Wait for the next events; return the ranks that have ended."""
        ended = []
        for key, _ in self._selector.select(deadlines.wait_s()):
            if isinstance(key.data, RankProcess):
                attempt.note_end(key.data)
                ended.append(key.data)
            elif isinstance(key.data, RankOutput):
                attempt.pump(key.data)
            elif isinstance(key.data, NodeLink):
                key.data.read()
        for number in self._inbox.read():
            self._forward(number, attempt, deadlines)
        for number in deadlines.due():
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

    def _note_devices(self, end: AttemptEnd, devices: Sequence[str], lowest: int) -> None:
        """Note failed devices of this host, whose ranks begin with ``lowest``."""
        for rank in end.lost_device:
            device = devices[rank - lowest]
            if self._history.note(device, time.monotonic()):
                log.error("device %s has failed repeatedly (rank %d): it is used no more", device, rank)

    def _end_everywhere(self, end: AttemptEnd) -> AttemptEnd:
        """Tell the replica's other hosts how this one's ranks ended; return the end of all.

        Without an answer, as where the lighthouse is away, ranks that have finished are waited for no longer.
        """
        if self._hosts is None:
            return end
        self._hosts.tell_end(end)
        until = time.monotonic() + UNTOLD_S if set(end.codes.values()) == {FINISHED} else math.inf
        while not self._ended_by and time.monotonic() < until:
            of_all = self._hosts.link.order.ended
            if of_all is not None:
                return AttemptEnd(of_all.codes, of_all.first, of_all.ran_s, of_all.lost)
            self._look(min(until - time.monotonic(), 3600.0))
        return end

    def _look(self, timeout_s: float | None) -> None:
        """Wait for the next order or signal, while no rank runs."""
        for key, _ in self._selector.select(timeout_s):
            if isinstance(key.data, NodeLink):
                key.data.read()
        ending = [number for number in self._inbox.read() if number in ENDING]
        if ending:
            self._ended_by = ending[0]

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
            self._reporter.tell(report)
            if gave_up:
                self._reporter.finish()

    def _pause(self, pause_s: float) -> None:
        """Wait, unless a signal ends the launcher."""
        until = time.monotonic() + pause_s
        while not self._ended_by and (left_s := until - time.monotonic()) > 0:
            self._look(left_s)


def _named(pids: Sequence[int]) -> str:
    """Name the process of each rank, for a person who must find one of them on this host."""
    return ", ".join(f"rank {rank} is process {pid}" for rank, pid in enumerate(pids))


def launch(plan: LaunchPlan) -> int:
    """Keep the replica of ``plan`` running; return the launcher's exit code. Raises FabricError."""
    mark = uuid.uuid4().hex
    limit = {} if plan.restarts is None else {LAUNCH_RESTARTS: str(plan.restarts)}
    own = {**limit, LAUNCH_STOP_S: f"{plan.stop_s:g}", LAUNCH_MARK: mark}
    plan = replace(plan, environment={**plan.environment, **own})
    marked = MarkedProcesses(LAUNCH_MARK, mark)
    guard = Guard(marked)  # started before this process catches signals: the guard must not
    with contextlib.closing(guard), SignalInbox() as inbox:
        return Launcher(plan, guard, marked, inbox).run()
