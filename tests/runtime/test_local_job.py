"""A job on this host: its folder, which holds a token, and the sentence about a process that failed."""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fabric.errors import ConfigError, FabricError
from fabric.runtime.local_job import LocalJob, claimed

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@contextmanager
def job_in(folder: Path) -> Iterator[LocalJob]:
    with claimed(folder, "test") as path, LocalJob(path, "test", ["r0"], {}) as job:
        yield job


def test_an_earlier_run_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    with job_in(tmp_path / "out") as job:
        first = job.token_file.read_text()
        job.journal("r0").write_text("old")
        (job.folder / "notes.txt").write_text("mine")
    with job_in(tmp_path / "out") as job:
        token = job.token_file
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
        assert token.read_text() != first and len(token.read_text().strip()) == 64
        assert {path.name for path in job.folder.iterdir()} == {
            *(".fabric-test", "journal", "run", "log", "lighthouse", "token", "auth", "notes.txt")
        }
        assert not any((job.folder / "journal").iterdir())


def test_a_folder_in_use_is_refused(tmp_path: Path) -> None:
    with job_in(tmp_path / "out") as job:
        token = job.token_file.read_text()
        with pytest.raises(ConfigError, match="Another fabric test is running"), job_in(tmp_path / "out"):
            pass
        assert job.token_file.read_text() == token


def test_a_failed_process_is_quoted(tmp_path: Path) -> None:
    with job_in(tmp_path / "out") as job:
        log = job.log("r0")
        log.write_text("noise\n" * 50 + "fabric: r0: the token does not match\n" + "banner\n" * 20)
        assert job.last_words("r0") == f" (fabric: r0: the token does not match): see its log {log}"
        log.write_text("x" * 200_000 + "\nlast line\n2026 INFO fabric.cli.launch.launcher: gone\n")
        assert job.last_words("r0") == f" (last line): see its log {log}"
        assert job.last_words("r9") == f": see its log {job.log('r9')}"


def test_a_lighthouse_that_cannot_start_is_named(tmp_path: Path) -> None:
    with job_in(tmp_path / "out") as job:
        job.store = "sqlite:///no/such/folder/store.db"
        with pytest.raises(FabricError, match=r"lighthouse ended .*/no/such/folder.*: see its log "):
            job.start_lighthouse()


def test_a_folder_that_is_missing_is_made_and_claimed(tmp_path):
    with claimed(tmp_path / "a" / "out", "test") as folder:
        assert (folder / ".fabric-test").stat().st_mode & 0o777 == 0o600


@as_root
def test_the_folder_of_another_user_is_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".fabric-test").touch()
    os.chown(out, NOBODY, NOBODY)
    with pytest.raises(ConfigError, match=f"belongs to user {NOBODY}"), claimed(out, "test"):
        pass


def test_a_folder_in_which_all_users_may_write_is_refused(tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    out.chmod(0o777)
    with pytest.raises(ConfigError, match="every user can write"), claimed(out, "test"):
        pass


def test_a_marker_that_is_a_link_is_refused_and_its_target_stays(tmp_path):
    out, precious = tmp_path / "out", tmp_path / "precious"
    out.mkdir()
    precious.write_text("precious")
    (out / ".fabric-test").symlink_to(precious)
    with pytest.raises(ConfigError, match="not a plain file"), claimed(out, "test"):
        pass
    assert precious.read_text() == "precious"
