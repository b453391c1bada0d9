"""A trainer whose own checkpoint server dies, or does not answer, while it needs it: with real servers."""

import contextlib
import os
import signal

import pytest
import torch
from ckpt_server.test_durable_format import objects, write_one
from server_support import alive, fetch, publish, snapshot_file, wait_for

from fabric.ckpt_server.fetch import StateFetcher
from fabric.ckpt_server.handle import ServerHandle
from fabric.ckpt_server.relayout import Layout
from fabric.ckpt_server.snapshot import CpuCopier
from fabric.ckpt_server.state import Describer
from fabric.client.durable import Durable
from fabric.client.journal import Journal
from fabric.client.ladder import Ladder
from fabric.client.place import Place
from fabric.client.snapshot_policy import EverySteps
from fabric.client.snapshots import Snapshots
from fabric.client.transfer import Transfer
from fabric.model import DURABLE, SnapshotRef
from fabric.protocol import member_io as io
from fabric.runtime.config import Settings
from fabric.runtime.points import Points

NOBODY = "http://127.0.0.1:9"  # discard: nothing listens there


def kill_server(handle: ServerHandle) -> None:
    os.kill(handle.pid, signal.SIGKILL)
    wait_for(lambda: not alive(handle.pid), "the server's end")


class Fetching:
    """One trainer's way to a state: its slots in a real server's memory, and the ladder that fills them."""

    def __init__(self, handle: ServerHandle, storage: str = "", restarts: bool = True) -> None:
        self.handle, self.restarts, self.copier = handle, restarts, CpuCopier()
        describer = Describer({"model": torch.nn.Linear(2, 2)})
        self.snapshots = Snapshots(
            handle, describer, self.copier, EverySteps(1), ("job", "r0"), False, self.recover
        )
        durable = Durable(
            Settings(job="job", replica="r0", durable=storage), Journal(None, "r0", 1), Place(1, True)
        )
        layout = Layout(objects(1))

        def make_fetcher(rank: int = 0) -> StateFetcher:
            return StateFetcher(timeout_s=20.0, rank=rank)

        ladder = Ladder(self.snapshots, durable, layout, (0, 1), make_fetcher)
        self.transfer = Transfer(ladder, 0, Points(""), self.crashed)

    def crashed(self, error: BaseException) -> None:
        raise error

    def recover(self) -> None:
        if self.restarts:
            self.handle.ensure()

    def fetch(self, state: SnapshotRef, urls: tuple[str, ...]) -> io.Event:
        heard: list[io.Event] = []
        self.transfer.fetch_state(io.FetchState(state, urls), heard.append)
        wait_for(lambda: heard, "the fetch to end")
        return heard[0]

    def close(self) -> None:
        self.transfer.close()
        self.copier.close()


@pytest.fixture
def fetching(attach):
    with contextlib.ExitStack() as stack:

        def start(**options) -> Fetching:
            return stack.enter_context(contextlib.closing(Fetching(attach(), **options)))

        yield start


class TestAServerThatDied:
    def test_who_waits_for_a_state_starts_its_own_server_again_and_serves_what_it_fetched(
        self, fetching, served
    ):
        mine = fetching()
        file = snapshot_file(3 << 20)
        publish(served, 0, file, 7)
        state = served_state(served, 7)
        before = mine.handle.pid
        kill_server(mine.handle)
        assert mine.fetch(state, (served.url,)) == io.StateFetched(7, state.digest)
        arrived = mine.transfer.state
        assert bytes(arrived.file) == file and mine.handle.pid != before
        mine.snapshots.serve(arrived.slot, arrived.fetched.manifest)
        assert [s["step"] for s in fetch(mine.handle.url, "/v1/snapshots").json] == [7]

    def test_a_durable_checkpoint_is_loaded_all_the_same(self, fetching, tmp_path):
        file, state = write_one(str(tmp_path), objects(1), 3)
        mine = fetching(storage=str(tmp_path))
        kill_server(mine.handle)
        assert mine.fetch(state, (NOBODY, DURABLE)) == io.StateFetched(3, state.digest)
        assert bytes(mine.transfer.state.file) == file

    def test_one_that_cannot_be_started_says_nothing_against_the_checkpoint(self, fetching, tmp_path):
        _, state = write_one(str(tmp_path), objects(1), 3)
        mine = fetching(storage=str(tmp_path), restarts=False)
        kill_server(mine.handle)
        failed = mine.fetch(state, (DURABLE,))
        assert isinstance(failed, io.FetchFailed) and "checkpoint server of r0" in failed.why
        assert not failed.unusable and not failed.misfit


def served_state(handle: ServerHandle, step: int) -> SnapshotRef:
    entry = next(s for s in fetch(handle.url, "/v1/snapshots").json if s["step"] == step)
    return SnapshotRef(entry["generation"], step, entry["digest"])
