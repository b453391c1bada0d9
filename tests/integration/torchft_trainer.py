"""Runs a script for torchft (TORCHFT_SCRIPT) with changed import lines, at the pace of the tests."""

import os
import re
from pathlib import Path

from pace import leave_time

from fabric.cli.run import run_program
from fabric.client import Session
from fabric.integrations.torchft.managed_steps import Manager


def with_changed_imports(text: str) -> str:
    """Return a script with ``torchft`` replaced in its import lines, and nowhere else."""
    return re.sub(r"(?m)^from torchft\b", "from fabric.integrations.torchft", text)


def main() -> None:
    os.environ["REPLICA_GROUP_ID"] = os.environ["FABRIC_REPLICA"].removeprefix("r")
    os.environ["NUM_REPLICA_GROUPS"] = os.environ["FABRIC_REPLICAS"]
    script, steps = Path(os.environ["TORCHFT_SCRIPT"]), int(os.environ["EXAMPLE_STEPS"])
    changed = Path(os.environ["FABRIC_RUN_DIR"]).parent / f"{os.getpid()}-{script.name}"
    changed.parent.mkdir(parents=True, exist_ok=True)
    changed.write_text(with_changed_imports(script.read_text()))
    start = Manager.start_quorum

    def paced(self: Manager, *arguments: object, **named: object) -> None:
        if isinstance(self._session, Session) and self.current_step() < steps:
            leave_time(self._session, steps - self.current_step(), 0.02)
        start(self, *arguments, **named)

    current = Manager.current_step

    def paced_outer(self: Manager) -> int:
        if self._loop is not None and current(self) < steps:
            leave_time(self._session, steps - current(self), 0.02)
        return current(self)

    Manager.start_quorum, Manager.current_step = paced, paced_outer
    run_program([str(changed)])
