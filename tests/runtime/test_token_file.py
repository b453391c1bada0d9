"""A token file that is replaced while everything runs: two tokens for a while, and none is lost."""

import os
import re
from pathlib import Path

import pytest

import fabric
from fabric.errors import ConfigError
from fabric.runtime.http.token_file import LOOK_S, MAX_TOKEN_BYTES, TokenFile, read_tokens


class TokenClock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "token"
    path.touch(mode=0o600)
    path.write_text("old\n")
    return path


def test_a_token_is_replaced_in_three_steps(file):
    clock = TokenClock()
    tokens = TokenFile(file, clock)
    for text, shown, accepted in (
        ("old\nnew\n", "old", ("old", "new")),
        ("new\nold\n", "new", ("new", "old")),
        ("new\n", "new", ("new",)),
    ):
        before = tokens.accepted()
        file.write_text(text)
        os.utime(file, ns=(len(text), clock.now.is_integer() + int(clock.now * 10) + 1))
        assert tokens.accepted() == before, "looked at too often"
        clock.now += LOOK_S
        assert tokens.accepted() == accepted and tokens.shown() == shown
        assert all(tokens.accepts(token) for token in accepted)
    assert not tokens.accepts("old") and not tokens.accepts("") and not tokens.accepts("\udcff")


def test_the_shown_token_is_looked_up_every_time(file):
    tokens = TokenFile(file, TokenClock())
    file.write_text("another\n")
    assert tokens.shown() == "another"


@pytest.mark.parametrize("spoil", ["gone", "empty", "binary", "folder"])
def test_a_file_that_can_be_read_no_more_leaves_the_tokens_as_they_were(file, spoil, caplog):
    clock = TokenClock()
    tokens = TokenFile(file, clock)
    file.unlink()
    if spoil == "empty":
        file.touch()
    elif spoil == "binary":
        file.write_bytes(b"\xff\x00")
    elif spoil == "folder":
        file.mkdir()
    for _ in range(3):
        clock.now += LOOK_S
        assert tokens.accepted() == ("old",) and tokens.shown() == "old"
    said = [record for record in caplog.records if "stays in use" in record.message]
    assert len(said) == 1
    if spoil == "folder":
        file.rmdir()
    file.unlink(missing_ok=True)
    file.write_text("new\n")
    clock.now += LOOK_S
    assert tokens.accepted() == ("new",)


def test_at_the_start_a_file_must_hold_a_token(tmp_path, file):
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenFile(tmp_path / "none")
    for text in ("a\nb\nc\n", "a b\n", "a\n\nb\n", "x" * (MAX_TOKEN_BYTES + 1)):
        file.write_text(text)
        with pytest.raises(ConfigError, match="must hold one line"):
            TokenFile(file)
    long = "x" * MAX_TOKEN_BYTES
    file.write_text(f"{long}\r\n{long}\r\n")
    assert read_tokens(file) == (long, long)


def test_without_a_token_file_no_token_is_needed():
    tokens = TokenFile(None)
    assert tokens.is_open and tokens.shown() == "" and not tokens.accepts("") and not tokens.accepts("x")
    assert TokenFile.of("x").accepts("x") and TokenFile.of(None).is_open and not TokenFile.of("x").is_open


# Each place that reads a token once, and why a replaced token reaches its process all the same.
READ_ONCE = {
    "runtime/config.py": "it gives the token to the others",
    "runtime/http/token_file.py": "it gives the token to the others",
    "client/loop/start.py": "a rank dials rank 0 once",
    "client/state/durable_policy.py": "one question, at the start",
    "integrations/loggers.py": "it reads the file before each question",
    "integrations/ray.py": "a Ray job takes a new token when it starts again, as docs/adopt/ray.md says",
    "cli/run.py": "one question, at the start",
    "cli/doctor.py": "a command that ends",
    "cli/launch/command.py": "it only looks whether there is a token",
    "cli/diagnose.py": "a command that ends",
    "cli/states.py": "a command that ends",
    "cli/drill.py": "it prints the key of the token, and ends",
}


def test_every_other_process_reads_its_token_file_again():
    root = Path(fabric.__file__).parent
    once = re.compile(r"\b(chosen|settings|self\.settings)\.token\b|\bread_token\(")
    found = {str(x.relative_to(root)) for x in root.rglob("*.py") if once.search(x.read_text())}
    assert found == set(READ_ONCE)
