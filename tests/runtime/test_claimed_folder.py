"""The output folder of a command holds a token, so nobody else may own the folder or write to it."""

import os

import pytest

from fabric.errors import ConfigError
from fabric.runtime.claimed_folder import FolderUse, claimed

USE = FolderUse("drill", ".drill", ("token",))
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


def test_a_folder_that_is_missing_is_made_and_claimed(tmp_path):
    with claimed(tmp_path / "a" / "out", USE) as folder:
        assert (folder / ".drill").stat().st_mode & 0o777 == 0o600


@as_root
def test_the_folder_of_another_user_is_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".drill").touch()
    os.chown(out, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"), claimed(out, USE):
        pass


def test_a_folder_in_which_all_users_may_write_is_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o777)
    with pytest.raises(ConfigError, match="every user can write"), claimed(out, USE):
        pass


def test_a_marker_that_is_a_link_is_refused_and_its_target_stays(tmp_path):
    out, precious = tmp_path / "out", tmp_path / "precious"
    out.mkdir()
    precious.write_text("precious")
    (out / ".drill").symlink_to(precious)
    with pytest.raises(ConfigError, match="not a plain file"), claimed(out, USE):
        pass
    assert precious.read_text() == "precious"
