"""Run folders: made for this user alone. Files that other users made, or could change, are refused and stay
as they are."""

import os
import stat

import pytest

from fabric.errors import ConfigError
from fabric.runtime.config import Settings, settings
from fabric.runtime.private_folder import make_private, open_private

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def test_every_folder_that_is_missing_is_made_for_this_user_alone_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        make_private(tmp_path / "a" / "b" / "c")
    finally:
        os.umask(before)
    assert [mode(tmp_path / x) for x in ("a", "a/b", "a/b/c")] == [0o700] * 3
    make_private(tmp_path / "a" / "b" / "c")


def test_a_folder_that_was_there_keeps_its_mode(tmp_path):
    """Fabric once closed /tmp, or / by a name of dots, to all other users."""
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(0o755)
    make_private(there)
    assert mode(there) == 0o755


@pytest.mark.parametrize("bits", [0o1777, 0o777, 0o770])
def test_a_folder_that_others_can_write_to_is_refused_and_keeps_its_mode(tmp_path, bits):
    there = tmp_path / "there"
    there.mkdir()
    there.chmod(bits)
    with pytest.raises(ConfigError, match="other users can write to the folder"):
        make_private(there)
    assert mode(there) == bits


def test_a_symbolic_link_is_no_run_folder(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    with pytest.raises(ConfigError, match="symbolic link"):
        make_private(tmp_path / "link")
    (tmp_path / "dangling").symlink_to("nowhere")
    with pytest.raises(ConfigError, match="symbolic link"):
        make_private(tmp_path / "dangling")


@as_root
def test_a_folder_of_another_user_is_refused_wherever_it_stands_in_the_path(tmp_path):
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    theirs.chmod(0o777)
    os.chown(theirs, NOBODY, NOBODY)
    for folder in (theirs, theirs / "gpt", theirs / "gpt" / "r0"):
        with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
            make_private(folder)
    assert not list(theirs.iterdir())
    (theirs / "gpt").mkdir()  # an earlier version of fabric made this folder
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"):
        make_private(theirs / "gpt")


@as_root
def test_a_folder_with_a_file_of_another_user_is_refused(tmp_path):
    (tmp_path / "ckpt.lock").touch()
    os.chown(tmp_path / "ckpt.lock", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=r"holds ckpt\.lock, which belongs to another user"):
        make_private(tmp_path)


def test_a_file_is_opened_only_where_it_is_a_plain_file_of_this_user(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "symbolic").symlink_to(victim)
    os.link(victim, tmp_path / "hard")
    os.mkfifo(tmp_path / "pipe")
    for name in ("symbolic", "hard", "pipe"):
        for flags in (os.O_RDONLY, os.O_WRONLY | os.O_APPEND | os.O_CREAT):
            with pytest.raises(ConfigError, match="is not a plain file of this user alone"):
                open_private(tmp_path / name, flags)
    before = os.umask(0)
    try:
        descriptor = open_private(tmp_path / "new", os.O_RDWR | os.O_CREAT)
    finally:
        os.umask(before)
    assert os.get_blocking(descriptor) and mode(tmp_path / "new") == 0o600
    os.close(descriptor)


@as_root
def test_a_file_of_another_user_is_not_opened(tmp_path):
    (tmp_path / "log").touch()
    os.chown(tmp_path / "log", NOBODY, NOBODY)
    with pytest.raises(ConfigError, match="is not a plain file of this user alone"):
        open_private(tmp_path / "log", os.O_WRONLY)


# --- where it lies ------------------------------------------------------------------------------------


def test_the_folder_of_the_login_is_preferred_where_it_is_this_users_alone(tmp_path, monkeypatch):
    login = tmp_path / "login"
    login.mkdir(mode=0o700)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    found = Settings(job="gpt", replica="r0")
    shared = tmp_path / f"fabric-{os.getuid()}" / "gpt" / "r0"
    for value in ("", "login", str(tmp_path / "gone")):
        monkeypatch.setenv("XDG_RUNTIME_DIR", value)
        assert found.home == shared
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(login))
    assert found.home == login / "fabric" / "gpt" / "r0"
    login.chmod(0o755)
    assert found.home == shared


@pytest.mark.parametrize("name", [".", "..", "....."])
@pytest.mark.parametrize("what", ["FABRIC_JOB", "FABRIC_REPLICA"])
def test_a_name_of_dots_alone_is_no_name(what, name):
    good = {"FABRIC_REPLICA": "r0", "FABRIC_LIGHTHOUSE": "http://127.0.0.1:1"}
    with pytest.raises(ConfigError, match="not of dots alone"):
        settings({**good, what: name})
