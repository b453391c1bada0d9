"""Real writer processes: killed at every point, with a full disk, with a server that ends; and `fabric`
commands read their checkpoints.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path

import pytest
from ckpt_server.test_durable_format import bring_back, manifest_for, objects, train, write_one
from ckpt_server.test_training_state import to_bytes
from click.testing import CliRunner
from msgspec.structs import replace
from safetensors.torch import load_file
from server_support import ROOT

from fabric.ckpt_server.durable.reader import MARKER, Attempt, list_checkpoints
from fabric.ckpt_server.durable.storage import Storage
from fabric.ckpt_server.durable.writer import write
from fabric.ckpt_server.state.training_state import capture
from fabric.ckpt_server.wire.channel_protocol import DurableJob
from fabric.cli.states import diff, inspect_state, pull
from fabric.errors import StateError
from fabric.model import SnapshotRef
from fabric.runtime.failpoints import Failpoints

# The failpoints lie between the first byte of data and the deletion of old checkpoints.
POINTS = ("begin", "data", "shards", "marker", "complete", "tidy")


def start(url: str, file: bytes, manifest: dict, points: str = "", wrap: tuple[str, ...] = (), **more):
    """Start a writer as the checkpoint server does; its standard input stays open."""
    memory = os.memfd_create("snapshot")
    os.write(memory, file)
    order = {"url": url, "job": "job", "replica": "r0", "incarnation": 9, **more}
    process = subprocess.Popen(
        [*wrap, sys.executable, "-m", "fabric.ckpt_server.durable", f"--fd={memory}"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        pass_fds=(memory,),
        cwd=ROOT,
        env={**os.environ, "FABRIC_TEST_POINTS": points},
    )
    os.close(memory)
    process.stdin.write(json.dumps({"order": order, "manifest": manifest}).encode() + b"\n")
    process.stdin.flush()
    return process


def outcome_of(process) -> tuple[int, dict]:
    with process:
        text = process.stdout.read()
        return process.wait(), json.loads(text) if text else {}


@pytest.fixture(scope="module")
def state() -> tuple[bytes, dict]:
    one = objects(1)
    train(one)
    file = bytes(to_bytes(capture(one, 7)))
    return file, manifest_for(file, 7)


def test_a_try_without_storage_imports_no_torch(state, tmp_path, monkeypatch):
    """Each of many tries took three seconds of a processor, and 290 MB."""
    (tmp_path / "torch.py").write_text("raise SystemExit('torch was imported')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    code, outcome = outcome_of(start(f"{tmp_path}/gone", *state, made=True))
    assert (code, outcome["gone"]) == (1, True)


def steps(url: str) -> list[int]:
    return [c.state.step for c in list_checkpoints(Storage(url).at("job"), "job").complete]


def test_a_writer_killed_at_any_point_leaves_the_earlier_checkpoint_whole_and_the_next_writer_cleans_up(
    state, tmp_path
):
    file, manifest = state
    one = objects(2)
    for point in POINTS:
        url = str(tmp_path / point)
        write_one(url, one, 4, keep=9)
        write_one(url, one, 5, keep=9)
        # Fork the writer, because starting a process takes seconds; other tests start it as the server does.
        order = DurableJob(url, "job", "r0", 9, keep=2)
        arguments = (order, manifest, memoryview(bytearray(file)), Failpoints(f"durable-{point}=kill"))
        process = get_context("fork").Process(target=write, args=arguments)
        process.start()
        process.join()
        assert process.exitcode == -signal.SIGKILL, point
        complete = point in ("complete", "tidy")
        assert steps(url) == ([4, 5, 7] if complete else [4, 5]), point
        before = list_checkpoints(Storage(url).at("job"), "job")
        for found in before.complete:
            assert len(bring_back(url, found.state)) > 1000
        assert len(before.unfinished) == (0 if complete else 1), point
        # No writer continues a half-written checkpoint: the next writer uses a new folder.
        order = DurableJob(url, "job", "r0", 10, keep=2)
        assert write(order, manifest, memoryview(bytearray(file)), Failpoints("")).warnings == ()
        listing = list_checkpoints(Storage(url).at("job"), "job")
        assert len(listing.complete) == 2 and listing.complete[-1].state.step == 7
        assert listing.unfinished == ()
        assert bring_back(url, SnapshotRef(1, 7, manifest["digest"])) == file


def test_retention_deletes_nothing_through_a_link(state, tmp_path):
    """A folder of the job may be a link to an archive, whose files belong to another person."""
    file, manifest = state
    job = tmp_path / "durable" / "job"
    for step in (3, 4):
        order = DurableJob(f"{tmp_path}/durable", "job", "r0", 9, keep=1)
        told = {**manifest, "step": step}
        result = write(order, told, memoryview(bytearray(file)), Failpoints(""))
        assert result.complete
        if step == 3:
            (first,) = job.iterdir()
            archived = first.rename(tmp_path / "archived")
            first.symlink_to(archived)
    assert any("is a symbolic link to a folder elsewhere" in warning for warning in result.warnings)
    assert first.is_symlink() and (archived / MARKER).is_file()


def test_a_full_disk_is_reported_and_leaves_only_the_earlier_checkpoint(state, tmp_path):
    """A limit on the file size fails in the middle of a write, as a full disk does."""
    file, manifest = state
    url = str(tmp_path)
    write_one(url, objects(2), 5)
    code, outcome = outcome_of(start(url, file, manifest, wrap=("prlimit", f"--fsize={len(file) // 2}")))
    assert code == 1 and "__0_0.distcp could not be written: File too large" in outcome["error"]
    assert steps(url) == [5]
    assert [p.name for p in (tmp_path / "job").iterdir()] == [Attempt(1, 5, "r0", 7).folder]


@contextmanager
def mounted(folder: Path, nbytes: int) -> Iterator[Path]:
    """Mount a file system of this size, and unmount it at the end."""
    folder.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", folder], capture_output=True, text=True
    )
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], check=os.path.ismount(folder), capture_output=True)


def test_after_a_full_disk_earlier_checkpoints_are_whole_and_the_next_is_written(state, tmp_path):
    """Each try has more room, from none to enough; a failed try leaves no file behind."""
    file, manifest = state
    page, order = os.sysconf("SC_PAGESIZE"), DurableJob("", "job", "r0", 9, keep=9)
    with mounted(tmp_path / "disk", 4 << 20) as disk:
        _, older = write_one(str(disk), objects(2), 5)
        used = os.statvfs(disk)
        used = (used.f_blocks - used.f_bfree) * used.f_frsize
        failed = 0
        for pages in range(200):
            size = f"remount,size={used + pages * page}"
            subprocess.run(["mount", "-o", size, disk], check=True, capture_output=True)
            try:
                write(replace(order, url=str(disk)), manifest, memoryview(bytearray(file)), Failpoints(""))
            except StateError as error:
                failed += 1
                assert "No space left on device" in str(error) and str(disk) in str(error), error
                assert steps(str(disk)) == [5]
                assert [p.name for p in (disk / "job").iterdir()] == [Attempt(1, 5, "r0", 7).folder]
                continue
            break
        assert failed > 5 and steps(str(disk)) == [5, 7]
        assert bring_back(str(disk), SnapshotRef(1, 7, manifest["digest"])) == file
        assert len(bring_back(str(disk), older)) > 1000


@pytest.mark.parametrize("point", ["data", "shards", "marker"])
def test_storage_that_vanishes_in_mid_write_gets_no_marker_anywhere(state, tmp_path, point):
    """The file system is unmounted while the writer stands at ``point``; the disk below stays empty."""
    file, manifest = state
    with mounted(tmp_path / "disk", 4 << 20) as disk:
        there = tmp_path / "there"
        order = DurableJob(str(disk), "job", "r0", 9, keep=9)
        points = Failpoints(f"durable-{point}=wait:{tmp_path}/go")
        arguments = (order, manifest, memoryview(bytearray(file)), points, there)
        process = get_context("fork").Process(target=_write_and_tell, args=arguments)
        process.start()
        while not Path(f"{tmp_path}/go.awaited").exists():
            assert process.is_alive()
            time.sleep(0.01)
        subprocess.run(["umount", "-l", disk], check=True)
        (tmp_path / "go").touch()
        process.join()
        assert "No such file or directory" in there.read_text() and str(disk) in there.read_text()
        assert list(disk.iterdir()) == [], "nothing was written below the mount point"


def test_required_storage_that_vanishes_between_two_checkpoints_gets_nothing(state, tmp_path):
    """An unmounted disk leaves an empty folder: the next checkpoint must not go to the disk below."""
    file, manifest = state
    order = DurableJob(str(tmp_path / "disk"), "job", "r0", 9, required=True)
    with mounted(tmp_path / "disk", 4 << 20) as disk:
        write_one(str(disk), objects(2), 5)
        assert write(order, manifest, memoryview(bytearray(file)), Failpoints("")).complete
        assert steps(str(disk)) == [5, 7]
        subprocess.run(["umount", "-l", disk], check=True)
        with pytest.raises(
            StateError, match=f"{disk}/job holds no checkpoint any more, and FABRIC_DURABLE_EV"
        ):
            write(order, manifest, memoryview(bytearray(file)), Failpoints(""))
        assert list(disk.iterdir()) == []


def _write_and_tell(
    order: DurableJob, manifest: dict, file: memoryview, points: Failpoints, there: Path
) -> None:
    try:
        write(order, manifest, file, points)
        there.write_text("written")
    except StateError as error:
        there.write_text(str(error))


def test_the_writer_ends_with_its_server(state, tmp_path):
    file, manifest = state
    process = start(str(tmp_path), file, manifest, f"durable-marker=wait:{tmp_path}/never")
    process.stdin.close()
    assert process.wait() == 1
    process.stdout.close()
    assert steps(str(tmp_path)) == []


def test_a_file_smaller_than_its_manifest_is_not_written(state, tmp_path):
    file, manifest = state
    code, outcome = outcome_of(start(str(tmp_path), file[:5000], manifest))
    assert code == 1 and "smaller than its manifest says" in outcome["error"]


class TestCommands:
    @pytest.fixture
    def written(self, tmp_path):
        one, other = objects(1), objects(2)
        train(one)
        train(other)
        write_one(str(tmp_path), one, 3)
        write_one(str(tmp_path), other, 5)
        folders = [tmp_path / "job" / Attempt(1, step, "r0", 7).folder for step in (3, 5)]
        return tmp_path, folders, one

    def call(self, command, *arguments):
        return CliRunner().invoke(command, [str(a) for a in arguments])

    def test_inspect_takes_a_checkpoint_or_the_newest_of_a_job(self, written):
        root, folders, one = written
        found = json.loads(self.call(inspect_state, "--json", folders[0]).output)
        assert found["step"] == 3 and found["digest"] == capture(one, 3).digest()
        assert found["tensors"]["model/0.weight"]["shape"] == [30, 40]
        assert json.loads(self.call(inspect_state, "--json", root / "job").output)["step"] == 5
        assert json.loads(self.call(inspect_state, "--json", f"file://{root}/job#0").output)["step"] == 5

    def test_diff_compares_durable_checkpoints(self, written):
        _, folders, _ = written
        assert self.call(diff, folders[0], folders[0]).exit_code == 0
        result = self.call(diff, "--json", *folders)
        assert result.exit_code == 1 and "model/0.weight" in result.output

    def test_pull_exports_a_safetensors_file(self, written):
        root, folders, one = written
        result = self.call(pull, folders[0], "-o", root / "x.safetensors")
        assert result.exit_code == 0, result.output
        assert (load_file(root / "x.safetensors")["model/0.weight"] == one["model"][0].weight).all()

    def test_a_damaged_checkpoint_is_refused_with_the_name_of_its_file_and_not_exported(self, written):
        root, folders, _ = written
        data = bytearray((folders[0] / "__0_0.distcp").read_bytes())
        at = json.loads((folders[0] / "fabric-0.json").read_text())["segments"][1][1]
        data[at] ^= 1
        (folders[0] / "__0_0.distcp").write_bytes(data)
        for result in (
            self.call(inspect_state, folders[0]),
            self.call(pull, folders[0], "-o", root / "x.safetensors"),
        ):
            assert isinstance(result.exception, StateError)
            assert "__0_0.distcp" in str(result.exception) and "damaged" in str(result.exception)
        assert not (root / "x.safetensors").exists()

    @pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
    def test_inspect_names_a_file_that_torch_could_not_load_though_the_state_in_it_is_whole(
        self, written, name
    ):
        _, folders, _ = written
        data = bytearray((folders[0] / name).read_bytes())
        data[0] ^= 1  # the head of a pickle, or of a zip archive
        (folders[0] / name).write_bytes(data)
        result = self.call(inspect_state, folders[0])
        assert isinstance(result.exception, StateError)
        assert f"{folders[0] / name} does not match the digest in manifest.json" in str(result.exception)

    def test_a_folder_that_is_not_a_checkpoint_is_refused(self, written):
        root, folders, _ = written
        (folders[1] / MARKER).unlink()
        for name in (root, folders[1], Path("/nonexistent/dir/")):
            result = self.call(inspect_state, f"file://{name}")
            assert isinstance(result.exception, StateError) and "no complete checkpoint" in str(
                result.exception
            )
        assert "has no rank 5" in str(self.call(inspect_state, f"{folders[0]}#5").exception)
