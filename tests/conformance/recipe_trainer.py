"""Runs one recipe in a process of its own: as ``python`` does, or as ``fabric run`` does under fabric.

Members leave a replica that is away the time to come back, see ``tests/integration/pace.py``.
"""

import os
import runpy
import sys

import torch
from pace import leave_time

from fabric.cli.run import run_program
from fabric.client.loop.session import Session


class _Kind(type(torch.Generator)):
    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _Generator)


_Generator = torch.Generator


class _DeviceGenerator(_Generator, metaclass=_Kind):
    """A generator on the default device, as torch's factories ask for one there."""

    def __new__(cls, device: object = None) -> torch.Generator:
        return _Generator(device or torch.get_default_device())


def main() -> None:
    if (device := os.environ["RECIPE_DEVICE"]) != "cpu":
        torch.set_default_device(device)
        torch.Generator = _DeviceGenerator
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
