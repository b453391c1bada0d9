"""One attempt of a replica: its rank processes and their output, from their start until all have ended."""

import contextlib
import os
import re
import select
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from fabric.cli.launch.standbys import Standbys
from fabric.model import Value, printable, shortened
from fabric.runtime.rank_layout import RankLayout
from fabric.runtime.system_calls import die_with, open_pidfd

_READ_BYTES = 1 << 16
# A longer line is cut, so that a rank that never ends a line does not fill the launcher's memory.
_MAX_LINE_BYTES = 1 << 16
_LAST_CHARACTERS = 200
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


class Place(Value):
    """Which part of the replica's ranks this host runs, and where the replica's rank 0 listens."""

    node: int = 0
    nodes: int = 1
    head: str = "127.0.0.1"
    port: int = 0  # TCP port of the rendezvous

    def own_ranks(self, layout: RankLayout) -> range:
        """The ranks that run on this host, of all ranks of the replica."""
        count = layout.ranks // self.nodes
        return range(self.node * count, (self.node + 1) * count)


class AttemptSpec(Value):
    """The command, environment and layout of one attempt's ranks."""

    command: Sequence[str]
    environment: Mapping[str, str]  # environment of every rank; each rank also gets variables of its own
    layout: RankLayout
    place: Place
    number: int  # number of attempts before this attempt
    run: str  # name of this attempt's torch.distributed world
    replica: str = ""
    log_dir: Path | None = None
    inherited: tuple[int, ...] = ()  # descriptors that the ranks inherit

    def rank_environment(self, rank: int) -> dict[str, str]:
        """The environment of one rank: the variables that torchrun sets, and the layout."""
        size, ranks = str(self.layout.ranks), self.place.own_ranks(self.layout)
        own = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - ranks.start),
            "WORLD_SIZE": size,
            "LOCAL_WORLD_SIZE": str(len(ranks)),
            "GROUP_RANK": str(self.place.node),
            "GROUP_WORLD_SIZE": str(self.place.nodes),
            "ROLE_NAME": "default",
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": size,
            "MASTER_ADDR": self.place.head,
            "MASTER_PORT": str(self.place.port),
            "TORCHELASTIC_RUN_ID": self.run,
            "TORCHELASTIC_RESTART_COUNT": str(self.number),
            "FABRIC_LAYOUT": str(self.layout),
        }
        if self.is_piped:
            # Python buffers output to a pipe in blocks, so lines would come late.
            own["PYTHONUNBUFFERED"] = "1"
        environment = {**self.environment, **own}
        environment.setdefault("PYTHONHASHSEED", "0")  # a vocabulary of a set is the same in all replicas
        environment.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # rank 0 holds the store
        if self.layout.ranks > 1:
            # Set as torchrun sets it, equal on all hosts, so that all hosts add numbers in the same order.
            environment.setdefault("OMP_NUM_THREADS", "1")
        return environment

    @property
    def is_piped(self) -> bool:
        """Whether the ranks' output goes through the launcher."""
        return self.layout.ranks > 1 or self.log_dir is not None

    @property
    def reads_errors(self) -> bool:
        """Whether the launcher reads standard error, for its reports. On a terminal a person reads it."""
        return self.is_piped or not os.isatty(2)

    def start_process(
        self, environment: Mapping[str, str], inherited: tuple[int, ...] = ()
    ) -> "subprocess.Popen[bytes]":
        """Start the command with a rank's ``environment``; it inherits these descriptors too."""
        sys.stdout.flush()
        return subprocess.Popen(
            self.command,
            env=environment,
            stdin=subprocess.DEVNULL if self.layout.ranks > 1 else None,
            stdout=subprocess.PIPE if self.is_piped else None,
            stderr=subprocess.PIPE if self.reads_errors else None,
            # Ctrl-C in the terminal must reach only the launcher, which ends the ranks in order.
            start_new_session=True,
            pass_fds=(*self.inherited, *inherited),
            preexec_fn=die_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509  (it makes two system calls)
        )

    def start_standbys(self, standbys: Standbys) -> None:
        """Start a standby of each rank on this host, and end those of an earlier attempt.

        A standby that cannot be started costs only time, at the next attempt.
        """
        standbys.close()
        with contextlib.suppress(OSError):
            for local_rank, rank in enumerate(self.place.own_ranks(self.layout)):
                standbys.start(local_rank, self.rank_environment(rank), self.start_process)


class RankOutput:
    """Copies one stream of a rank: to ``terminal`` with a prefix before each line, to ``log`` as it is."""

    def __init__(self, source: int, prefix: str, terminal: int, log: IO[bytes] | None) -> None:
        self.source = source
        self._prefix, self.terminal, self._log = prefix.encode(), terminal, log
        self._pending = b""
        self._last = b""  # the last line that is not empty
        os.set_blocking(source, False)

    def pump(self) -> bool:
        """Copy the output that has arrived; return whether more may come."""
        try:
            data = os.read(self.source, _READ_BYTES)
        except BlockingIOError:
            return True
        if self._log is not None:
            with contextlib.suppress(OSError):  # a full disk must not end the training
                self._log.write(data)
        # Split after each newline and each carriage return; progress bars end lines with the
        # latter.
        parts = (self._pending + data).replace(b"\r\n", b"\n").splitlines(keepends=True)
        complete = bool(parts) and parts[-1].endswith((b"\n", b"\r"))
        *lines, self._pending = [*parts, b""] if complete or not parts else parts
        if len(self._pending) > _MAX_LINE_BYTES or not data:
            lines, self._pending = [*lines, self._pending], b""
        self._last = next((line for line in reversed(lines) if line.strip()), self._last)
        self._show(b"".join(self._prefix + line for line in lines if line), ends=not data)
        return bool(data)

    @property
    def last_line(self) -> str:
        """Return the last line, in printable characters without colours."""
        text = _COLOUR.sub("", self._last.decode(errors="replace")).strip()
        return shortened(printable(text), _LAST_CHARACTERS)

    def close(self) -> None:
        """Copy the remaining output, and close the stream."""
        while select.select([self.source], [], [], 0)[0] and self.pump():
            pass
        self._show(self._prefix + self._pending if self._pending else b"", ends=True)
        os.close(self.source)

    def _show(self, text: bytes, ends: bool) -> None:
        if ends and text and not text.endswith((b"\n", b"\r")):
            text += b"\n"
        with contextlib.suppress(OSError):  # no program reads the output any more
            while text:
                text = text[os.write(self.terminal, text) :]


@dataclass(slots=True)
class RankProcess:
    """The process of one rank."""

    rank: int
    process: "subprocess.Popen[bytes]"
    pidfd: int
    outputs: list[RankOutput] = field(default_factory=list)
    log: IO[bytes] | None = None
    code: int | None = None  # the rank's exit code; None while the rank runs


class LaunchAttempt:
    """The ranks of one attempt. ``selector`` gets a descriptor of each rank, and of each of its streams."""

    def __init__(self, spec: AttemptSpec, selector: selectors.BaseSelector, standbys: Standbys) -> None:
        self.spec, self._selector, self._standbys = spec, selector, standbys
        self.ranks: list[RankProcess] = []

    def start(self) -> None:
        """Start every rank. Raises OSError if the program cannot be started; then no rank is left."""
        try:
            for rank in self.spec.place.own_ranks(self.spec.layout):
                self._start(rank)
        except OSError:
            self.signal(signal.SIGKILL)
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """The process id of each rank, which is also its session id."""
        return [rank.process.pid for rank in self.ranks]

    @property
    def is_running(self) -> bool:
        return any(rank.code is None for rank in self.ranks)

    @property
    def codes(self) -> dict[int, int]:
        """The exit code of every rank that has ended."""
        return {rank.rank: rank.code for rank in self.ranks if rank.code is not None}

    def last_line(self, ranks: Sequence[int]) -> str:
        """Return the last line of standard error of the first of ``ranks``, where the launcher reads it."""
        errors = [x for rank in self.ranks if rank.rank in ranks for x in rank.outputs if x.terminal == 2]
        return errors[0].last_line if errors else ""

    def note_end(self, rank: RankProcess) -> None:
        """Note the exit code of a rank that has ended, but keep its process id reserved until ``close``."""
        status = os.waitid(os.P_PIDFD, rank.pidfd, os.WEXITED | os.WNOWAIT)
        assert status is not None
        exited = status.si_code == os.CLD_EXITED
        rank.code = status.si_status if exited else -status.si_status
        self._selector.unregister(rank.pidfd)

    def signal(self, number: int) -> None:
        """Send a signal to every rank that runs."""
        for rank in self.ranks:
            if rank.code is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.pidfd, number)

    def close(self) -> None:
        """Reap the ended ranks, and copy the rest of their output."""
        for rank in self.ranks:
            rank.process.wait()
            for output in rank.outputs:
                with contextlib.suppress(KeyError):
                    self._selector.unregister(output.source)
                output.close()
            with contextlib.suppress(KeyError):
                self._selector.unregister(rank.pidfd)
            os.close(rank.pidfd)
            if rank.log is not None:
                rank.log.close()

    def _start(self, rank: int) -> None:
        spec = self.spec
        log: IO[bytes] | None = None
        if spec.log_dir is not None:
            log = (spec.log_dir / f"{spec.replica}.{rank}.log").open("ab", buffering=0)
            log.write(f"--- attempt {spec.number + 1}: {spec.layout}\n".encode())
        environment = spec.rank_environment(rank)
        local_rank = rank - spec.place.own_ranks(spec.layout).start
        process = self._standbys.take(local_rank, environment) or spec.start_process(environment)
        started = RankProcess(rank, process, open_pidfd(process.pid), log=log)
        self.ranks.append(started)
        self._selector.register(started.pidfd, selectors.EVENT_READ, started)
        prefix = f"[{rank}] " if spec.layout.ranks > 1 else ""
        for pipe, terminal in ((process.stdout, 1), (process.stderr, 2)):
            if pipe is not None:
                output = RankOutput(os.dup(pipe.fileno()), prefix, terminal, log)
                pipe.close()
                started.outputs.append(output)
                self._selector.register(output.source, selectors.EVENT_READ, output)
