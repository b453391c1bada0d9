"""The operator's name in the record when the command has no option for it."""

import getpass
import os
import re
import subprocess
import sys

import pytest
from click.testing import CliRunner

from fabric.cli import operate
from fabric.cli.lighthouse_options import Lighthouses

# In a container image the user has a number, but no name in the environment or in /etc/passwd.
_AS_A_NUMBER = """
import os
from fabric.cli.lighthouse_options import operator_name
os.environ.clear()
os.setgroups([])
os.setgid(65532)
os.setuid(65532)
print(operator_name())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to become another user")
def test_a_user_without_a_name_is_its_number():
    done = subprocess.run(
        [sys.executable, "-c", _AS_A_NUMBER], capture_output=True, text=True, timeout=60, check=False
    )
    assert re.match(r"65532@\S+$", done.stdout), done.stderr


@pytest.mark.parametrize("error", [KeyError("getpwuid(): uid not found"), OSError("No username set")])
@pytest.mark.parametrize(
    "arguments",
    [["drain", "r2"], ["evict", "r2"], ["pause"], ["resume"], ["scale", "--min", "2"], ["admit", "r2"]],
    ids=lambda arguments: arguments[0],
)
def test_every_decision_can_be_made_without_a_name(monkeypatch, error, arguments):
    def nameless() -> str:
        raise error

    asked = []
    monkeypatch.setattr(getpass, "getuser", nameless)
    monkeypatch.setattr(
        Lighthouses, "ask", lambda self, path, body=None: asked.append(body) or {"min": 2, "max": 0}
    )
    name, *more = arguments
    options = ["--lighthouse", "http://127.0.0.1:1", "--job", "gpt", "--why", "maintenance"]
    done = CliRunner().invoke(getattr(operate, name), [*more, *options])
    assert done.exit_code == 0, done.output
    (body,) = asked
    assert body["who"].startswith(f"{os.getuid()}@")
