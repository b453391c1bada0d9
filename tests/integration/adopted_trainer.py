"""Runs the script of ``ADOPTED_SCRIPT`` as ``fabric run --adopt`` does, at the pace of the tests.

``ADOPTED_STEPS`` is the number of optimizer steps of the script.
"""

import os

from pace import leave_time

from fabric.cli.run import run_program
from fabric.integrations.adopt.adopted_loop import AdoptedLoop


def main() -> None:
    exchange, steps = AdoptedLoop._exchange, int(os.environ["ADOPTED_STEPS"])

    def paced(self: AdoptedLoop) -> None:
        if self.computes:
            leave_time(self.session, steps - self.number, 0.02)
        exchange(self)

    AdoptedLoop._exchange = paced
    run_program(["--adopt", *os.environ["ADOPTED_SCRIPT"].split()])
