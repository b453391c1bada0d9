"""A trainer's use of durable checkpoints: which member writes them and when, and memory before storage."""

import threading
from dataclasses import dataclass
from types import SimpleNamespace

import fsspec
import pytest
from ckpt_server.test_durable_format import objects, write_one
from fsspec import AbstractFileSystem
from msgspec.structs import replace
from protocol.makers import record_of

from fabric.ckpt_server.durable.storage import StorageAway
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.reshard import Layout
from fabric.client.process.incarnation_lock import ProcessIdentity
from fabric.client.process.journal import Journal
from fabric.client.state import durable_policy as client_durable
from fabric.client.state.durable_policy import DurableCheckpoints, StorageUnavailable
from fabric.client.state.fetch_thread import FetchThread
from fabric.client.state.state_loader import StateLoader
from fabric.errors import IntegrityError, StateError
from fabric.model import DURABLE, SnapshotRef
from fabric.protocol.messages import member_events as io
from fabric.runtime.config import Settings
from fabric.runtime.failpoints import Failpoints

RECORD = record_of("a b c", epoch=1)
NOBODY = "http://127.0.0.1:9"  # the discard port: no process listens there


def durable(url: str, replica: str = "a", group=None, **settings) -> DurableCheckpoints:
    found = Settings(job="job", replica=replica, durable=url, **settings)
    return DurableCheckpoints(found, Journal(None, replica, 1), ProcessIdentity(1, True, group))


class TestWhoAndWhen:
    def writers(self, step: int, record=RECORD, **settings) -> list[str]:
        return [r for r in "abc" if durable("x", r, **settings).is_due(step, record)]

    def test_the_lowest_member_writes_every_so_many_steps(self):
        assert self.writers(20, durable_every=10) == ["a"]
        assert self.writers(25, durable_every=10) == self.writers(0, durable_every=10) == []

    def test_when_the_writer_is_gone_the_next_member_writes_but_no_joining_member(self):
        without = replace(RECORD, roster=RECORD.roster[1:])
        assert self.writers(20, without, durable_every=10) == ["b"]
        fresh = replace(RECORD, roster=(replace(RECORD.roster[0], joining=True), *RECORD.roster[1:]))
        assert self.writers(20, fresh, durable_every=10) == ["b"]

    def test_a_member_without_storage_leaves_the_checkpoints_to_the_next_member(self):
        without = replace(RECORD, roster=(replace(RECORD.roster[0], stores=False), *RECORD.roster[1:]))
        assert self.writers(20, without, durable_every=10) == ["b"]

    def test_the_interval_between_checkpoints_counts_from_the_start(self):
        assert self.writers(3, durable_every="0s") == ["a"]
        assert self.writers(3, durable_every="100h") == []

    def test_a_step_is_written_once_and_the_last_one_always(self):
        mine = durable("x", durable_every=10)
        assert mine.is_due(20, RECORD) and not mine.is_due(20, RECORD)
        assert not mine.is_due(20, RECORD, last=True) and mine.is_due(23, RECORD, last=True)

    def test_no_member_writes_without_storage_or_before_the_first_epoch(self):
        assert not durable("", durable_every=1).is_due(5, RECORD)
        assert not durable("x", durable_every=1).is_due(5, None)
        assert durable("").find() == ()


class TestFinding:
    def test_storage_that_cannot_be_written_is_reported_once(self, tmp_path, capfd):
        (tmp_path / "file").touch()
        assert durable("/proc/nope").find() == ()
        said = capfd.readouterr().err
        assert said.startswith("fabric: a: no durable checkpoint will be written") and "/proc/nope" in said
        assert said.count("\n") == 1
        (tmp_path / "fine").mkdir()
        assert durable(str(tmp_path / "fine")).find() == () and capfd.readouterr().err == ""

    def test_a_missing_folder_is_made_and_that_is_reported(self, tmp_path, capfd):
        place = tmp_path / "runs" / "new"
        assert durable(str(place)).find() == () and place.is_dir()
        said = f"fabric: a: {place} did not exist and has been made: it holds no checkpoint to begin from\n"
        assert capfd.readouterr().err == said
        assert durable(str(place)).find() == () and capfd.readouterr().err == ""

    def test_a_trainer_that_requires_a_checkpoint_does_not_start_without_one(self, tmp_path):
        place = tmp_path / "typo"
        with pytest.raises(StateError, match=f"{place} holds no complete durable checkpoint of job job"):
            durable(str(place), durable_every="10m required").find()
        assert not place.exists()
        _, state = write_one(str(tmp_path), objects(1), 3)
        assert durable(str(tmp_path), durable_every="10m required").find() == (state,)

    def test_an_unknown_scheme_is_refused(self):
        with pytest.raises(StateError, match="nosuchfs"):
            durable("nosuchfs://x").find()

    def test_a_complete_checkpoint_is_found(self, tmp_path):
        _, state = write_one(str(tmp_path), objects(1), 3)
        assert durable(str(tmp_path)).find() == (state,)

    def test_storage_that_cannot_be_read_does_not_mean_that_it_is_empty(self, tmp_path):
        (tmp_path / "job").write_text("a file where a folder should be")
        away = (
            "could not be listed: Not a directory, for 0 s, and no lighthouse says that a member of the job"
        )
        with pytest.raises(StorageUnavailable, match=away):
            durable(str(tmp_path) + "/job/deeper", autonomy_s=0.0).find()


class Stuck(AbstractFileSystem):
    """Storage on a mount whose server has vanished: listing it blocks until the server is back."""

    protocol = "stuck"
    back = threading.Event()
    asked = threading.Event()

    def ls(self, path, detail=True, **_):
        self.asked.set()
        assert self.back.wait(60)
        return []


class TestStorageThatDoesNotAnswer:
    @pytest.fixture(autouse=True)
    def stuck(self, monkeypatch):
        monkeypatch.setattr(client_durable, "_ANSWER_S", 0.05)
        monkeypatch.setattr(client_durable, "_LOOK_AGAIN_S", 0.01)
        fsspec.register_implementation("stuck", Stuck, clobber=True)
        Stuck.back.clear()
        Stuck.asked.clear()
        yield
        Stuck.back.set()

    def test_storage_keeps_no_replica_out_whose_peers_hold_the_state(self, monkeypatch, capfd):
        monkeypatch.setattr(client_durable, "peers_hold_state", lambda _: Stuck.asked.is_set())
        assert durable("stuck://x", autonomy_s=0.0).find() is None
        said = capfd.readouterr().err
        assert "stuck://x/job has not answered for 0 s: it is read later, because" in said

    def test_without_peers_that_hold_the_state_the_trainer_waits_for_storage_and_says_so_once(
        self, monkeypatch, capfd
    ):
        def held(_):
            times.append(1)
            if len(times) == 5:
                Stuck.back.set()
            return False

        times: list[int] = []
        monkeypatch.setattr(client_durable, "peers_hold_state", held)
        assert durable("stuck://x", autonomy_s=0.0).find() == () and len(times) >= 5
        said = capfd.readouterr().err
        assert (
            said.count(
                "has not answered for 0 s: this replica waits for it, because no member holds the job's state"
            )
            == 1
        )


@dataclass
class Slots:
    """The slots for a fetched state; this host's own server holds no state."""

    memory: bytearray
    job, replica = "job", "a"

    @property
    def slots(self) -> "Slots":
        return self

    def held(self, state: SnapshotRef) -> int:
        return -1

    def target(self, nbytes: int, beside: SnapshotRef | None = None) -> tuple[int, memoryview]:
        self.memory = bytearray(nbytes)
        return 0, memoryview(self.memory)


class TestLadder:
    def fetch(self, url: str, state: SnapshotRef, urls: tuple[str, ...]):
        """Return the events for the member, and the content of its memory."""
        slots, heard = Slots(bytearray()), []

        def make_fetcher(rank: int = 0) -> StateFetcher:
            return StateFetcher(timeout_s=5.0, rank=rank)

        ladder = StateLoader(slots, durable(url, autonomy_s=0.0), Layout(objects(1)), 0, 1, make_fetcher)
        transfer = FetchThread(ladder, 0, Failpoints(""), heard.append)
        transfer.fetch_state(io.FetchState(state, urls), heard.append)
        transfer._worker.close(within_s=60.0)
        transfer.close()
        return heard, bytes(slots.memory)

    def test_storage_is_read_when_the_state_sources_fail(self, tmp_path):
        file, state = write_one(str(tmp_path), objects(1), 3)
        heard, found = self.fetch(str(tmp_path), state, (DURABLE, NOBODY))
        assert heard == [io.StateFetched(3, state.digest)] and found == file

    def test_a_missing_server_leaves_a_state_usable_and_failed_storage_makes_it_unusable(self, tmp_path):
        state = SnapshotRef(1, 3, "0" * 32)
        (away,), _ = self.fetch(str(tmp_path), state, (NOBODY,))
        assert isinstance(away, io.FetchFailed) and not away.unusable
        (gone,), _ = self.fetch(str(tmp_path), state, (NOBODY, DURABLE))
        assert gone.unusable and NOBODY in gone.why and "no complete checkpoint of step 3" in gone.why
        (unset,), _ = self.fetch("", state, (DURABLE,))
        assert unset.unusable and "FABRIC_DURABLE is not set" in unset.why


class TestStorageThatIsAwayForAMoment:
    @pytest.fixture(autouse=True)
    def without_pauses(self, monkeypatch):
        monkeypatch.setattr(client_durable, "_LOOK_AGAIN_S", 0.0)

    def test_a_read_is_tried_again_and_that_is_said_once(self, capfd):
        answers = [StorageAway("/c/x could not be read: Stale file handle")] * 3 + ["the state"]

        def read():
            answer = answers.pop(0)
            if isinstance(answer, Exception):
                raise answer
            return answer

        assert durable("/c", autonomy_s=60.0).patiently(read) == "the state" and not answers
        assert capfd.readouterr().err == (
            "fabric: a: /c/x could not be read: Stale file handle: this replica tries again, up to 60 s\n"
        )

    def test_storage_that_stays_away_is_left_to_the_next_process(self):
        def read():
            raise StorageAway("/c/x could not be read: Stale file handle")

        with pytest.raises(StorageUnavailable, match=r"for 0 s: mend the storage.*code 75"):
            durable("/c", autonomy_s=0.0).patiently(read)

    def test_a_damaged_file_is_not_read_again(self):
        reads = []

        def read():
            reads.append(1)
            raise IntegrityError("damaged")

        with pytest.raises(IntegrityError):
            durable("/c").patiently(read)
        assert len(reads) == 1


@pytest.mark.parametrize(
    ("outcomes", "said"),
    [
        ([(True, 7, "")], []),
        ([(False, 5, ""), (True, 7, "")], []),
        ([(False, 5, "step 7: away"), (False, 5, "step 7: away"), (True, 7, "")], ["waits for its last"]),
        ([(True, 5, "step 7: read-only")], ["is not written: step 7: read-only"]),
        ([(False, 5, "step 7: away"), (True, 5, "step 7: away")], ["waits for its last", "is not written"]),
    ],
    ids=["written", "slow", "away for a while", "fails at once", "given up"],
)
def test_a_trainer_ends_when_its_last_checkpoint_is_written_and_says_so_if_it_is_not(
    tmp_path, monkeypatch, outcomes, said
):
    checkpoints, sentences, left = durable(str(tmp_path)), [], iter(outcomes)
    monkeypatch.setattr(checkpoints, "_say", sentences.append)

    def outcome():
        idle, step, error = next(left)
        return {"idle": idle, "generation": 1, "step": step, "error": error}

    handle = SimpleNamespace(persist=lambda *_, **__: None, durable_outcome=outcome)
    checkpoints.await_last(handle)  # it has ordered none
    checkpoints.persist(handle, 7, 1)
    checkpoints.await_last(handle)
    assert list(left) == [] and len(sentences) == len(said)
    assert all(part in sentence for part, sentence in zip(said, sentences, strict=True))
