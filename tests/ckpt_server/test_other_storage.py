"""Storage with rules of its own: nothing may be deleted, or a file cannot be read for a moment."""

import errno
from typing import ClassVar

import fsspec
import pytest
from ckpt_server.test_durable_format import bring_back, objects, train, write_one
from fsspec.implementations.memory import MemoryFileSystem

from fabric.ckpt_server.durable.reader import list_checkpoints
from fabric.ckpt_server.durable.storage import Storage, StorageAway, StorageError


class Locked(MemoryFileSystem):
    """A bucket whose policy forbids deletion, as object lock does."""

    protocol = "locked"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]

    def _rm(self, path):
        raise PermissionError(errno.EACCES, "Permission denied")

    rm = rm_file = lambda self, path, **_: self._rm(path)

    def mv(self, path1, path2, **_):
        self.cp_file(path1, path2)
        self._rm(path1)

    rename = mv


class Stale(MemoryFileSystem):
    """A file system that lists its files and cannot open one of them for a moment."""

    protocol = "stale"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    fails = False

    def _open(self, path, mode="rb", **more):
        if Stale.fails and mode == "rb" and path.endswith("manifest.json"):
            raise OSError(errno.ESTALE, "Stale file handle")
        return super()._open(path, mode, **more)


@pytest.fixture(autouse=True)
def registered():
    for kind in (Locked, Stale):
        fsspec.register_implementation(kind.protocol, kind, clobber=True)


def test_checkpoints_complete_where_nothing_may_be_deleted():
    url, one = "locked://bucket/a", objects(1)
    train(one)
    Storage(url).try_writing()
    for step in (3, 4, 5):
        file, state = write_one(url, one, step, keep=1)
        assert bring_back(url, state) == file
    assert [c.state.step for c in list_checkpoints(Storage(url).at("job"), "job").complete] == [3, 4, 5]


def test_a_checkpoint_that_cannot_be_read_now_is_not_passed_over():
    url, one = "stale://bucket/b", objects(1)
    train(one)
    write_one(url, one, 3)
    job = Storage(url).at("job")
    Stale.fails = True
    try:
        with pytest.raises(StorageAway, match="Stale file handle"):
            list_checkpoints(job, "job")
    finally:
        Stale.fails = False
    assert [c.state.step for c in list_checkpoints(job, "job").complete] == [3]


def test_a_file_that_is_not_there_is_no_storage_that_is_away(tmp_path):
    with pytest.raises(StorageError) as failed:
        Storage(str(tmp_path)).get("none", 10)
    assert not isinstance(failed.value, StorageAway)
