"""Tokens of jobs: two during a rotation, kept while the folder is unreadable, and the lighthouse's own token
kept secret.
"""

import errno
import os
import threading
from pathlib import Path

import pytest

from fabric.errors import StoreUnavailable, Unauthorized
from fabric.lighthouse.http import tokens as module
from fabric.lighthouse.http.tokens import Tokens


class Blocked:
    """Path.iterdir and Path.open that fail or hang as the test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.error: OSError | None = None
        self.gate: threading.Event | None = None
        for name in ("iterdir", "open"):
            real = getattr(Path, name)
            monkeypatch.setattr(Path, name, lambda path, *a, real=real, **k: self._call(real, path, *a, **k))

    def _call(self, real, path, *arguments, **named):
        if self.gate is not None:
            self.gate.wait(30)
        if self.error is not None:
            raise self.error
        return real(path, *arguments, **named)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LOOK_S", 0.0)
    (tmp_path / "gpt").touch(mode=0o600)
    (tmp_path / "gpt").write_text("of-gpt\n")
    return tmp_path


TOO_MANY = OSError(errno.EMFILE, os.strerror(errno.EMFILE))


async def test_a_job_may_have_two_tokens_for_a_while(folder):
    tokens = Tokens("own", folder)
    for text, opens in (
        ("old\nnew\n", ("old", "new")),
        ("new\nold\n", ("new", "old")),
        ("new\n", ("new",)),
    ):
        (folder / "gpt").write_text(text)
        os.utime(folder / "gpt", ns=(1, len(opens) + (text[0] == "n")))
        await tokens.refresh()
        assert tokens.keys("gpt") == opens
        assert all(tokens.scope(token) == {"gpt"} for token in opens)
    with pytest.raises(Unauthorized):
        tokens.scope("old")
    assert tokens.scope("own") is None


async def test_tokens_stay_valid_while_their_folder_cannot_be_read(folder, monkeypatch, caplog):
    blocked = Blocked(monkeypatch)
    tokens = Tokens("own", folder)
    await tokens.refresh()
    blocked.error = TOO_MANY
    for _ in range(3):
        await tokens.refresh()
        assert tokens.scope("of-gpt") == {"gpt"} and tokens.scope("own") is None
        with pytest.raises(StoreUnavailable, match="Too many open files"):
            tokens.scope("of-a-job-that-has-just-come")
    assert len([r for r in caplog.records if "folder of job tokens" in r.message]) == 1
    blocked.error = None
    await tokens.refresh()
    with pytest.raises(Unauthorized):
        tokens.scope("of-a-job-that-has-just-come")


async def test_a_file_that_cannot_be_read_shuts_its_job_out_only_where_it_is_gone(folder, monkeypatch):
    tokens = Tokens(None, folder)
    await tokens.refresh()
    blocked = Blocked(monkeypatch)
    real = Path.iterdir
    (folder / "gpt").write_text("changed\n")
    os.utime(folder / "gpt", ns=(5, 5))
    # The lighthouse can list the token folder but cannot open its files.
    names = list(real(folder))
    monkeypatch.setattr(Path, "iterdir", lambda _path: iter(names))
    blocked.error = TOO_MANY
    await tokens.refresh()
    assert tokens.scope("of-gpt") == {"gpt"}
    blocked.error = None
    (folder / "gpt").unlink()
    await tokens.refresh()
    with pytest.raises(Unauthorized):
        tokens.scope("of-gpt")


async def test_before_the_tokens_could_be_read_a_request_is_answered_with_503(folder, monkeypatch):
    Blocked(monkeypatch).error = TOO_MANY
    tokens = Tokens("own", folder)
    await tokens.refresh()
    with pytest.raises(StoreUnavailable, match="cannot be checked"):
        tokens.scope("of-gpt")
    assert tokens.scope("own") is None


async def test_a_hanging_token_folder_does_not_stop_the_lighthouse(folder, monkeypatch):
    monkeypatch.setattr(module, "HANG_S", 0.05)
    tokens = Tokens("own", folder)
    await tokens.refresh()
    blocked = Blocked(monkeypatch)
    blocked.gate = threading.Event()
    try:
        for _ in range(3):
            await tokens.refresh()
            assert tokens.scope("of-gpt") == {"gpt"}
            with pytest.raises(StoreUnavailable, match="does not answer"):
                tokens.scope("another")
        assert sum(thread.name == "fabric-tokens" for thread in threading.enumerate()) == 1
    finally:
        blocked.gate.set()


async def test_the_lighthouses_own_token_is_shown_to_no_checkpoint_server_of_a_tenant(folder):
    """The lighthouse's own token opens every job. A tenant with a deleted token file once got this token at
    an address that it had named.
    """
    tokens = Tokens("own", folder)
    await tokens.refresh()
    assert tokens.shown_to_servers("gpt", is_trusted=False) == "of-gpt"
    (folder / "gpt").unlink()
    await tokens.refresh()
    assert tokens.shown_to_servers("gpt", is_trusted=False) is None
    assert tokens.shown_to_servers("gpt", is_trusted=True) == "own", "its member has it already"
    assert Tokens("own").shown_to_servers("gpt", is_trusted=False) == "own", "everybody has it already"
    assert Tokens(None).shown_to_servers("gpt", is_trusted=False) is None


async def test_a_person_is_told_which_token_is_for_checkpoint_servers(folder):
    """Where jobs have their own tokens, the token that opens every job is not for checkpoint servers."""
    tokens = Tokens("own", folder)
    await tokens.refresh()
    assert not tokens.may_reach_servers(tokens.scope("own"))
    assert tokens.may_reach_servers(frozenset({"gpt"}))
    assert Tokens("own").may_reach_servers(Tokens("own").scope("own"))
