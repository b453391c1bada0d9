"""Runs the example TEST_EXAMPLE as it is, at the pace of the tests."""

import importlib
import os

from pace import leave_time

import fabric.client

STEP_S = 0.03


def main() -> None:
    steps, exchange = fabric.client.Session.steps, fabric.client.Session.exchange

    def paced_steps(self, data, until, first_step=None):
        for step in steps(self, data, until, first_step):
            leave_time(self, until - step.number, STEP_S)
            yield step

    def paced_exchange(self, weight=1.0):
        leave_time(self, int(os.environ["EXAMPLE_STEPS"]) - self.committed_step, STEP_S)
        return exchange(self, weight)

    fabric.client.Session.steps, fabric.client.Session.exchange = paced_steps, paced_exchange
    importlib.import_module(os.environ["TEST_EXAMPLE"]).main()
