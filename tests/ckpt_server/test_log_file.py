"""The log of a checkpoint server has a bounded size, and keeps the newest lines."""

import pytest
from server_support import publish, snapshot_file, wait_for

from fabric.ckpt_server.server import process
from fabric.ckpt_server.wire.channel_protocol import LOG_NAME


def test_a_log_over_its_limit_is_renamed_once_and_restarted_while_its_writer_has_it_open(tmp_path):
    path = tmp_path / LOG_NAME
    with path.open("ab", buffering=0) as writer:
        writer.write(b"first\n" * 10)
        process.bound(path, most=60)
        assert path.stat().st_size == 60 and not (tmp_path / f"{LOG_NAME}.1").exists()
        for text in (b"second\n", b"third\n"):
            writer.write(text * 20)
            before = path.read_bytes()
            process.bound(path, most=60)
            assert path.read_bytes() == b"" and (tmp_path / f"{LOG_NAME}.1").read_bytes() == before
        writer.write(b"fourth\n")
    assert path.read_bytes() == b"fourth\n"
    assert (tmp_path / f"{LOG_NAME}.1").stat().st_mode & 0o777 == 0o600


def test_a_symbolic_link_in_place_of_the_file_is_left_alone(tmp_path):
    elsewhere, path = tmp_path / "elsewhere", tmp_path / LOG_NAME
    elsewhere.write_bytes(b"x" * 100)
    path.symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic links"):
        process.bound(path, most=10)
    assert elsewhere.stat().st_size == 100
    process.bound(tmp_path / "missing")


def test_a_server_bounds_its_own_log(attach, run_dir):
    run_dir.mkdir(mode=0o700)
    log = run_dir / LOG_NAME
    with log.open("wb") as file:
        file.truncate(process.MOST_BYTES + 1)
    handle = attach()
    publish(handle, 0, snapshot_file(1000), 1)
    wait_for(lambda: log.stat().st_size < process.MOST_BYTES, "the log to be begun anew")
