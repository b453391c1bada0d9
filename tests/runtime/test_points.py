"""Test points: a typo must not make a failure test pass."""

import signal
import subprocess
import sys

import pytest

from fabric.errors import ConfigError
from fabric.runtime.failpoints import Failpoints


@pytest.mark.parametrize("text", ["nowhere=kill", "ring", "rinq@3=kill"])
def test_unknown_failpoints_are_refused(text):
    with pytest.raises(ConfigError, match="known points"):
        Failpoints(text)


def test_a_failpoint_acts_once_at_its_step(tmp_path):
    code = """
from fabric.runtime.failpoints import Failpoints
points = Failpoints("ring@2=kill")
points.hit("ring", 1)
print("on", flush=True)
points.hit("ring", 2)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True)
    assert done.returncode == -signal.SIGKILL and done.stdout == b"on\n"


def test_a_waiting_failpoint_continues_when_its_file_exists(tmp_path):
    (tmp_path / "go").touch()
    points = Failpoints(f"fetch=wait:{tmp_path}/go")
    points.hit("fetch", 9)
    points.hit("fetch", 9)
