"""Runs one recipe in a process of its own: as ``python`` does, or as ``fabric run`` does under fabric.

Members leave a replica that is away the time to come back, see ``tests/integration/pace.py``.
"""

import os
import runpy
import sys

from pace import leave_time

from fabric.cli.run import run_program
from fabric.client.loop.session import Session


def main() -> None:
    script, adopts = os.environ["RECIPE_SCRIPT"], os.environ.get("RECIPE_LAUNCH") == "--adopt"
    sys.argv = [script]
    if os.environ["RECIPE_WAY"] == "plain":
        runpy.run_path(script, run_name="__main__")
        return
    steps, ready = int(os.environ["RECIPE_STEPS"]), Session._ready

    def paced(session: Session) -> object:
        leave_time(session, steps - session.committed_step, 0.02)
        return ready(session)

    Session._ready = paced
    run_program([*(["--adopt"] if adopts else []), script])
