"""The journal of this replica, one JSON line per event, from which ``fabric demo verify`` checks a run.

State transitions also go to the log, with or without a journal.

Each line is one ``write`` on a file opened for appending, so a SIGKILL loses at most the line being written.
All incarnations of the replica append to the same file. FABRIC_JOURNAL names the file; without FABRIC_JOURNAL
there is no journal. A full disk does not end the trainer: the journal counts the lost lines. When there is
room again, its first line (event ``lost``) gives the count.
"""

import errno
import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from fabric.errors import ConfigError
from fabric.protocol.messages.member_events import Apply, PreparedRound
from fabric.runtime.logs import fields

log = logging.getLogger(__name__)

# A drill may make ``time.time`` leap. The judge compares journals, so their lines keep the host's time.
_host_time = time.time

# Events that the journal also writes to the log: starts, failures and epochs, not the events of every step.
_LOGGED = frozenset(
    ("start", "epoch", "abort", "resume", "outside", "installed", "join", "joined", "catch-up-failed")
) | {"blocking-join", "poison", "skipped", "finish"}


class Journal:
    """Appends events; without a path it does nothing."""

    def __init__(self, path: Path | None, replica: str, incarnation: int) -> None:
        self._who = {"replica": replica, "incarnation": incarnation}
        self._descriptor = -1
        self._lock = threading.Lock()
        self._path = path
        self._torn, self._lost_lines = False, 0
        if path is None:
            return
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_CLOEXEC, 0o644)
            # A killed process may have left half a line: begin a new line.
            if path.stat().st_size:
                with path.open("rb") as file:
                    file.seek(-1, os.SEEK_END)
                    self._torn = file.read(1) != b"\n"
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                log.warning("fabric: %s: there is no room for the journal %s: none is written", replica, path)
                return
            raise ConfigError(f"the journal {path} cannot be written: {error.strerror}") from error

    @property
    def on(self) -> bool:
        """Whether this journal writes to a file."""
        return self._descriptor >= 0

    def write(self, event: str, **values: Any) -> None:
        """Append one line; safe from any thread."""
        if event in _LOGGED:
            log_fields = {name: values[name] for name in ("epoch", "step", "incident_id") if name in values}
            reason = values.get("why") or values.get("reason") or ""
            text = ": ".join(str(part) for part in (event, values.get("about"), reason) if part)
            log.info("%s", text, extra=fields(**log_fields))
        if not self.on:
            return
        with self._lock:  # read the clock within the lock, or the times of lines could decrease
            body = {"event": event, "t": _host_time(), "mono": time.monotonic(), **self._who, **values}
            try:
                if self._lost_lines:
                    self._put({**body, "event": "lost", "lines": self._lost_lines})
                    self._lost_lines = 0
                self._put(body)
            except OSError as error:
                if not self._lost_lines:
                    log.warning(
                        "fabric: %s: the journal %s cannot be written (%s): training goes on without it;"
                        " make room, or mend that disk",
                        self._who["replica"],
                        self._path,
                        error.strerror,
                    )
                self._lost_lines += 1

    def _put(self, body: Mapping[str, Any]) -> None:
        """Write one complete line. Raises OSError, after which the next write first ends the torn line."""
        line = json.dumps(body, separators=(",", ":")).encode() + b"\n"
        if self._torn:
            os.write(self._descriptor, b"\n")
            self._torn = False
        while line:
            written = os.write(self._descriptor, line)
            line = line[written:]
            self._torn = bool(line)

    def start(self, job: str, layout: str, data: Mapping[str, Any], data_slot: int) -> None:
        """Write the ``start`` line of this process. ``layout``: of the gradients; ``data``: their plan."""
        self.write(
            "start",
            pid=os.getpid(),
            job=job,
            layout=layout,
            torch=torch.__version__,
            data=dict(data),
            data_slot=data_slot,
        )

    def commit(
        self, order: Apply, held: PreparedRound, micro_batches: int, times: Mapping[str, float]
    ) -> None:
        """Write the ``commit`` line of a step that this replica applied.

        ``micro_batches``: the number in a step. Those without a contributor are journaled as skipped.
        ``times``: seconds by phase.
        """
        counted = {i for _, ids in held.contributions for i in ids}
        self.write(
            "commit",
            generation=order.generation,
            epoch=held.epoch,
            step=held.step,
            contributed=order.contributed,  # this replica's gradient is in the average
            replay=order.prepared is None,
            skipped=[i for i in range(micro_batches) if i not in counted],
            contributions={name: list(ids) for name, ids in held.contributions},
            weight=held.weight,
            gradient_digest=held.gradient_digest,
            metrics=dict(held.metrics),
            members=[name for name, _ in held.contributions],
            times=dict(times),
        )

    def close(self) -> None:
        if self.on:
            os.close(self._descriptor)
            self._descriptor = -1
