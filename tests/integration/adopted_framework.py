"""Runs the script TEST_SCRIPT as ``fabric run --adopt`` does, at the pace of the tests."""

import os

from pace import waiting

from fabric.cli.run import run_program
from fabric.integrations.step_feed import StepFeed


def main() -> None:
    StepFeed.advance = waiting(StepFeed.advance)
    run_program(["--adopt", os.environ["TEST_SCRIPT"]])
