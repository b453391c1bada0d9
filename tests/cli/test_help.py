"""What ``fabric --help`` and ``fabric commands`` show, and the example of each command."""

import shlex
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from fabric.cli.main import _COMMANDS, _GONE, cli


def run(*words: str) -> str:
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 0, result.output
    return result.output


def test_the_first_help_shows_eight_commands_and_names_the_page_of_all():
    shown = [line.split()[0] for line in run("--help").splitlines() if line[:2] == "  " and line[2] != " "]
    assert len([word for word in shown if word in _COMMANDS]) == 8
    assert "All commands: fabric commands" in run("--help")


def test_all_commands_are_shown_in_groups():
    lines = run("commands").splitlines()
    assert {line.split()[0] for line in lines if line.startswith("  ")} >= set(_COMMANDS)
    assert lines[0] == "Run:"


@pytest.mark.parametrize(("name", "flag"), [(name, flag) for name, flags in _GONE.items() for flag in flags])
def test_a_removed_flag_is_refused_with_what_took_its_place(name: str, flag: str):
    result = CliRunner().invoke(cli, [*([] if name == "fabric" else [name]), flag, "1"], prog_name="fabric")
    assert result.exit_code == 2 and f"Error: {flag} is gone: {_GONE[name][flag]}" in result.output


@pytest.mark.parametrize("name", _COMMANDS)
def test_the_example_of_a_command_is_one_that_it_takes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for script in ("train.py", "state.safetensors"):
        (tmp_path / script).touch()
    words = shlex.split(_COMMANDS[name].example)
    command = cli.get_command(click.Context(cli), words[0])
    assert command is not None and words[0] == name
    command.make_context(name, words[1:])
    assert f"Example: fabric {_COMMANDS[name].example}" in " ".join(command.epilog.split())
