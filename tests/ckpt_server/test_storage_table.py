"""Every place that waits on storage, with storage in every kind of trouble: the table of docs/runbook.md."""

import asyncio
import errno
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import fsspec
import pytest
from ckpt_server.test_durable_format import bring_back, manifest_for, objects, write_one
from ckpt_server.test_durable_jobs import published
from ckpt_server.test_training_state import to_bytes
from click.testing import CliRunner
from fsspec.implementations.memory import MemoryFileSystem
from msgspec.structs import asdict, replace

from fabric.ckpt_server.durable import writer
from fabric.ckpt_server.durable.reader import MARKER, list_checkpoints
from fabric.ckpt_server.durable.storage import (
    Storage,
    StorageAway,
    StorageError,
    StorageGone,
    storage_errors,
)
from fabric.ckpt_server.format.manifest import of_rank
from fabric.ckpt_server.server import durable_jobs
from fabric.ckpt_server.server.durable_jobs import DurableJobs
from fabric.ckpt_server.server.slots import SlotTable
from fabric.ckpt_server.state.training_state import capture
from fabric.ckpt_server.wire.channel_protocol import DurableJob
from fabric.cli import doctor
from fabric.cli.states import inspect_state, pull
from fabric.client.process.incarnation_lock import ProcessIdentity
from fabric.client.process.journal import Journal
from fabric.client.state import durable_policy
from fabric.client.state.durable_policy import DurableCheckpoints
from fabric.errors import StateError
from fabric.runtime.config import Settings
from fabric.runtime.failpoints import Failpoints

RUNBOOK = Path(__file__).parents[2] / "docs" / "runbook.md"
URL, TROUBLES = "weather://bucket/durable", ("away", "slow", "read-only", "forbids deletion", "old listing")
REFUSALS = 3  # storage is back after so many refusals, or lists the truth after so many listings
FILE = bytes(to_bytes(capture(objects(1), 7)))


class Weather(MemoryFileSystem):
    """Storage with one of TROUBLES."""

    protocol = "weather"
    store: ClassVar[dict] = {}
    pseudo_dirs: ClassVar[list] = [""]
    trouble = ""
    left = met = 0
    old: ClassVar[list[str]] = []  # the folders of old listings
    listed: ClassVar[frozenset[str]] = frozenset()  # what an old listing shows
    asked, answers = threading.Event(), threading.Event()
    lies_about = ""  # a file that is stored, although storage says that it failed

    @classmethod
    def turn(cls, trouble: str) -> None:
        cls.trouble, cls.left, cls.met = trouble, REFUSALS, 0
        cls.old.clear()

    def _meet(self, kind: str) -> None:
        if self.trouble == "away" and self.left:
            self._count()
            raise OSError(errno.EIO, "Input/output error")
        if self.trouble == "slow":
            Weather.asked.set()
            assert self.answers.wait(60)
        if self.trouble == "read-only" and kind in ("write", "delete"):
            self._count()
            raise OSError(errno.EROFS, "Read-only file system")
        if self.trouble == "forbids deletion" and kind == "delete":
            self._count()
            raise PermissionError(errno.EACCES, "Permission denied")

    def _count(self) -> None:
        Weather.met += 1
        Weather.left = max(Weather.left - 1, 0)

    def ls(self, path, detail=True, **more):
        self._meet("list")
        found = super().ls(path, detail=True, **more)
        shown = [x for x in found if any(y.startswith(x["name"]) for y in self.listed)]
        if self.trouble == "old listing" and self.left and shown != found:
            self._count()
            self.old.append(path)
            found = shown
        return found if detail else [x["name"] for x in found]

    def _open(self, path, mode="rb", **more):
        self._meet("read" if mode == "rb" else "write")
        file = super()._open(path, mode, **more)
        if mode == "wb" and self.lies_about and path.endswith(self.lies_about):
            file.close = lambda: self._store_and_fail(file)
        return file

    def _store_and_fail(self, file) -> None:
        del file.close  # the file's own method again
        file.close()
        raise OSError(errno.ETIMEDOUT, "Connection timed out")

    def makedirs(self, path, exist_ok=False):
        self._meet("write")
        super().makedirs(path, exist_ok=exist_ok)

    def rm_file(self, path):
        self._meet("delete")
        super().rm_file(path)

    def rm(self, path, recursive=False, maxdepth=None):
        self._meet("delete")
        super().rm(path, recursive=recursive, maxdepth=maxdepth)


@dataclass
class Outcome:
    is_right: bool
    said: str = ""


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    fsspec.register_implementation("weather", Weather, clobber=True)
    for module, name, value in (
        (durable_policy, "_LOOK_AGAIN_S", 0.0),
        (durable_policy, "_WRITTEN_S", 0.01),
        (durable_policy, "_ANSWER_S", 0.2),
        (durable_policy, "peers_hold_state", lambda _: False),
        (doctor, "ANSWER_S", 0.2),
        (durable_jobs, "_PAUSE_S", 0.0),
        (writer, "_LOOK_S", 0.0),
    ):
        monkeypatch.setattr(module, name, value)
    Weather.store.clear()
    Weather.pseudo_dirs[:] = [""]
    Weather.lies_about = ""
    Weather.turn("")
    Weather.asked.clear()
    Weather.answers.clear()
    for step in (3, 4, 5):
        write_one(URL, objects(1), step)
    Weather.listed = frozenset(Weather.store)
    yield
    Weather.answers.set()
    Weather.turn("")


def checkpoints() -> DurableCheckpoints:
    settings = Settings(job="job", replica="a", durable=URL)
    return DurableCheckpoints(settings, Journal(None, "a", 1), ProcessIdentity(1, True, None))


def complete() -> list[int]:
    trouble, Weather.trouble = Weather.trouble, ""
    steps = [c.state.step for c in list_checkpoints(Storage(URL).at("job"), "job").complete]
    Weather.trouble = trouble
    return steps


# --- the places ------------------------------------------------------------------------------------------


def look(trouble: str) -> Outcome:
    """A replica with an old listing is told of newer checkpoints by other replicas."""
    write_one(URL, objects(2), 6, keep=9)
    Weather.turn(trouble)
    found = checkpoints()._listing(Storage(URL).at("job"))
    steps = [c.state.step for c in found.complete] if found is not None else []
    return Outcome(steps == [3, 4, 5, *([] if trouble == "old listing" else [6])])


def try_writing(trouble: str) -> Outcome:
    mine, said = checkpoints(), []
    mine._say = said.append
    Weather.turn(trouble)
    mine._tell_unless_writable()
    return Outcome(True, " ".join(said))


def load(trouble: str) -> Outcome:
    file, state = write_one(URL, objects(2), 6, keep=9)
    Weather.turn(trouble)
    return Outcome(checkpoints().patiently(lambda: bring_back(URL, state)) == file)


def run_writer(trouble: str, point: str, await_it: Callable[[DurableJobs], None]) -> Outcome:
    """Write step 7 as a checkpoint server does; ``trouble`` begins at the failpoint ``point``."""
    points, said = Failpoints(""), []

    def begin(name: str, *_: object) -> None:
        if name == point:
            points.on_hit = None
            Weather.turn(trouble)

    points.on_hit = begin
    if not point:
        Weather.turn(trouble)

    async def main() -> None:
        memory = SlotTable()
        await published(memory, 7)
        jobs = DurableJobs(memory)

        async def write(request: DurableJob) -> dict[str, object]:
            try:
                arguments = (
                    replace(request, made=jobs._made),
                    manifest_for(FILE, 7),
                    memoryview(bytearray(FILE)),
                    points,
                )
                result = await asyncio.to_thread(writer.write, *arguments)
            except StateError as error:
                gone = isinstance(error, StorageGone)
                return {
                    "ok": False,
                    "error": f"{error}",
                    "away": isinstance(error, StorageAway),
                    "gone": gone,
                }
            said.extend(result.warnings)
            return {"ok": True, "digest": manifest_for(FILE, 7)["digest"], **asdict(result)}

        jobs._write = write  # type: ignore[method-assign]
        jobs.start(
            DurableJob(
                URL,
                "job",
                "r0",
                1,
                generation=1,
                step=7,
                keep=1 if point == "durable-complete" else 9,
                urgent=True,
            )
        )
        await await_it(jobs)
        memory.close()

    asyncio.run(main())
    return Outcome(7 in complete(), " ".join(said))


async def _finish(jobs: DurableJobs) -> None:
    await jobs.finish()


async def _close_after_the_writer(jobs: DurableJobs) -> None:
    """End as the checkpoint server does after its trainer."""
    await jobs.finish()
    await jobs.close()


async def _await_saved(jobs: DurableJobs) -> None:
    """Wait as a trainer with notice does."""
    handle = SimpleNamespace(durable_outcome=jobs.outcome)
    await asyncio.to_thread(checkpoints().await_written, handle, 7, 1)


def command(chosen, *arguments: str) -> Callable[[str], Outcome]:
    def run(trouble: str) -> Outcome:
        write_one(URL, objects(2), 6, keep=9)
        if trouble == "old listing":
            Weather.listed = frozenset()
        Weather.turn(trouble)
        result = CliRunner().invoke(chosen, [f"{URL}/job", *arguments])
        if result.exception is not None:
            assert isinstance(result.exception, StateError), result.exception
        return Outcome(result.exit_code == 0 and "step" in result.output)

    return run


def examine(trouble: str) -> Outcome:
    Weather.turn(trouble)
    finding = doctor._durable(Settings(durable=URL))
    return Outcome(True, "" if finding.level == "ok" else finding.what)


PLACES: dict[str, Callable[[str], Outcome]] = {
    "look for checkpoints at a start": look,
    "trial write at a start": try_writing,
    "load a checkpoint": load,
    "write a part": lambda trouble: run_writer(trouble, "", _finish),
    "set the marker": lambda trouble: run_writer(trouble, "durable-marker", _finish),
    "delete old checkpoints": lambda trouble: run_writer(trouble, "durable-complete", _finish),
    "save at a notice": lambda trouble: run_writer(trouble, "", _await_saved),
    "end of a checkpoint server": lambda trouble: run_writer(trouble, "", _close_after_the_writer),
    "`fabric inspect`": command(inspect_state),
    "`fabric pull`": command(pull, "-o", "state.safetensors"),
    "`fabric doctor`": examine,
}


def word(place: str, trouble: str, expected: str) -> str:
    """Return what a place does about a trouble: one of the words of the table.

    ``expected`` is its word there: a place that must not wait gets time on a loaded machine.
    """
    found: list[Outcome] = []
    thread = threading.Thread(target=lambda: found.append(PLACES[place](trouble)), daemon=True)
    thread.start()
    if trouble == "slow":
        assert Weather.asked.wait(60)
        thread.join(60 if expected == "told" else 0.5)
        if not thread.is_alive():
            assert "has not answered" in found[0].said
            return "told"
        Weather.answers.set()
        thread.join(60)
        return "waits" if found[0].is_right else "fails"
    thread.join(60)
    (outcome,) = found
    if not outcome.is_right:
        return "fails"
    if outcome.said:
        return "told"
    is_again = len(Weather.old) > len(set(Weather.old)) or (trouble == "away" and Weather.met == REFUSALS)
    return "again" if is_again else "works"


def table() -> dict[tuple[str, str], str]:
    """The words in the runbook's table, by place and trouble."""
    text = RUNBOOK.read_text().partition("| place | away |")[2]
    cells = {}
    for line in text.splitlines()[2:]:
        if not line.startswith("|"):
            break
        places, *words = (cell.strip() for cell in line.strip("|").split("|"))
        for place in places.split(", "):
            cells |= {(place, trouble): found for trouble, found in zip(TROUBLES, words, strict=True)}
    return cells


def test_the_table_has_a_row_for_each_place():
    assert {place for place, _ in table()} == set(PLACES)


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("place", PLACES)
def test_a_place_does_what_the_table_says(place, trouble, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    expected = table()[place, trouble]
    assert word(place, trouble, expected) == expected
    assert {3, 4, 5} <= set(complete()) or 7 in complete(), "no checkpoint is lost"


# --- a try after another one -----------------------------------------------------------------------------


def test_another_try_of_rank_0_finds_the_parts_of_the_other_ranks():
    files = [bytes(to_bytes(capture(objects(rank), 7))) for rank in (0, 1)]
    manifests = [manifest_for(file, 7) for file in files]
    digests = [m["digest"] for m in manifests]
    order, points = DurableJob(URL, "job", "r0", 9, patience_s=0.0), Failpoints("")

    def run(rank: int):
        file = memoryview(bytearray(files[rank]))
        return writer.write(order, of_rank(manifests[rank], rank, digests), file, points)

    assert not run(1).complete
    points.on_hit = lambda name, *_: Weather.turn("away") if name == "durable-shards" else None
    with pytest.raises(StorageAway):
        run(0)
    points.on_hit = None
    Weather.turn("")
    assert run(0).complete and 7 in complete()


def test_a_marker_that_storage_has_taken_after_all_counts_and_nothing_is_written_over_it(monkeypatch):
    order, manifest = DurableJob(URL, "job", "r0", 9), manifest_for(FILE, 7)
    Weather.lies_about = MARKER
    with pytest.raises(StorageAway, match="timed out"):
        writer.write(order, manifest, memoryview(bytearray(FILE)), Failpoints(""))
    Weather.lies_about = ""
    monkeypatch.setattr(Storage, "create", lambda *_: pytest.fail("it is written again"))
    assert writer.write(order, manifest, memoryview(bytearray(FILE)), Failpoints("")).complete
    assert 7 in complete()


def test_a_file_that_has_another_size_than_was_written_is_written_again():
    order, manifest = DurableJob(URL, "job", "r0", 9), manifest_for(FILE, 7)
    size, sizes = Storage.size, [0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Storage, "size", lambda self, name: sizes.pop() if sizes else size(self, name))
        with pytest.raises(StorageAway, match="does not read back as it was written"):
            writer.write(order, manifest, memoryview(bytearray(FILE)), Failpoints(""))
        assert writer.write(order, manifest, memoryview(bytearray(FILE)), Failpoints("")).complete


def test_storage_that_vanishes_and_comes_back_gets_the_checkpoint_and_the_disk_below_nothing(
    tmp_path, monkeypatch
):
    place, elsewhere, points = tmp_path / "durable", tmp_path / "elsewhere", Failpoints("")
    moved, tries = [], []

    def vanish(name: str, *_: object) -> None:
        if name == "durable-data" and not moved:
            moved.append(place.rename(elsewhere))
            place.mkdir()  # a mount point without its file system

    points.on_hit = vanish
    sleep = asyncio.sleep

    async def come_back(seconds: float) -> None:
        tries.append(list(place.iterdir()))
        if len(tries) == REFUSALS:
            place.rmdir()
            elsewhere.rename(place)
        await sleep(0)

    async def main() -> DurableJobs:
        memory = SlotTable()
        await published(memory, 7)
        jobs = DurableJobs(memory)

        async def write(request: DurableJob) -> dict[str, object]:
            try:
                arguments = (
                    replace(request, made=jobs._made),
                    manifest_for(FILE, 7),
                    memoryview(bytearray(FILE)),
                    points,
                )
                return {"ok": True, "digest": "", **asdict(writer.write(*arguments))}
            except StateError as error:
                gone = isinstance(error, StorageGone)
                return {
                    "ok": False,
                    "error": f"{error}",
                    "away": isinstance(error, StorageAway),
                    "gone": gone,
                }

        jobs._write = write  # type: ignore[method-assign]
        monkeypatch.setattr(durable_jobs.asyncio, "sleep", come_back)
        jobs.start(DurableJob(str(place), "job", "r0", 1, generation=1, step=7, keep=9))
        await jobs.finish()
        memory.close()
        return jobs

    jobs = asyncio.run(main())
    assert tries == [[]] * REFUSALS and not jobs.error
    assert [c.state.step for c in list_checkpoints(Storage(str(place)).at("job"), "job").complete] == [7]


def test_a_full_disk_below_an_error_of_torch_is_no_storage_that_is_away():
    with pytest.raises(StorageError, match="No space left") as failed, storage_errors("written", "/c/x"):
        try:
            raise OSError(errno.ENOSPC, "No space left on device")
        except OSError:
            raise RuntimeError("unexpected pos 704 vs 598") from None
    assert not isinstance(failed.value, StorageAway)
