"""Runs the script TEST_SCRIPT as ``fabric run --adopt`` does, at the pace of the tests.

``TEST_DEVICE=1`` pretends a device.
"""

import os

import pretended_device
from pace import waiting

from fabric.cli.run import run_program
from fabric.integrations.training_data import StepFeed


def main() -> None:
    if "TEST_DEVICE" in os.environ:
        pretended_device.pretend()
    StepFeed.advance = waiting(StepFeed.advance)
    run_program(["--adopt", os.environ["TEST_SCRIPT"]])
