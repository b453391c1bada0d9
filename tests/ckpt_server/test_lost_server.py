"""A trainer's own checkpoint server dies or does not answer while the trainer needs it."""

import contextlib
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from ckpt_server.test_durable_format import objects, write_one
from server_support import alive, fetch, manifest_of, publish, snapshot_file, wait_for

import fabric.client
from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.reshard import Layout
from fabric.ckpt_server.state.snapshot import CpuCopier
from fabric.ckpt_server.state.training_state import StateDescriber
from fabric.ckpt_server.wire import channel_protocol
from fabric.client.gradients.gradient_slots import GradientSlots
from fabric.client.process.incarnation_lock import ProcessIdentity
from fabric.client.process.journal import Journal
from fabric.client.process.worker import Worker
from fabric.client.state.durable_policy import DurableCheckpoints
from fabric.client.state.fetch_thread import FetchThread
from fabric.client.state.snapshots import EverySteps, Snapshots, SnapshotSlots
from fabric.client.state.state_loader import StateLoader
from fabric.errors import FabricError, ServerLost
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.model import DURABLE, SnapshotRef
from fabric.protocol.messages import member_events as io
from fabric.runtime.config import Settings
from fabric.runtime.failpoints import Failpoints

NOBODY = "http://127.0.0.1:9"  # the discard port: no process listens there


def kill_server(handle: ServerHandle) -> None:
    os.kill(handle.pid, signal.SIGKILL)
    wait_for(lambda: not alive(handle.pid), "the server's end")


class Fetching:
    """One trainer's fetch of a state: its slots in a real server's memory, and the sources that fill them."""

    def __init__(self, handle: ServerHandle, storage: str = "", restarts: bool = True) -> None:
        self.handle, self.restarts, self.copier = handle, restarts, CpuCopier()
        describer = StateDescriber({"model": torch.nn.Linear(2, 2)})
        self.snapshots = Snapshots(
            handle, describer, self.copier, EverySteps(1), ("job", "r0"), False, self.recover
        )
        durable = DurableCheckpoints(
            Settings(job="job", replica="r0", durable=storage),
            Journal(None, "r0", 1),
            ProcessIdentity(1, True),
        )
        layout = Layout(objects(1))

        def make_fetcher(rank: int = 0) -> StateFetcher:
            return StateFetcher(timeout_s=20.0, rank=rank)

        ladder = StateLoader(self.snapshots, durable, layout, 0, 1, make_fetcher)
        self.transfer = FetchThread(ladder, 0, Failpoints(""), self.crashed)

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


def test_failed_and_unused_fetches_leave_the_newest_snapshot(fetching, served):
    mine, slots = fetching(), []
    for step in (4, 5):
        file = snapshot_file(1000, seed=step)
        slots.append(mine.snapshots.slots.take())
        mine.snapshots.slots.memory(slots[-1], len(file))[: len(file)] = file
        mine.snapshots.serve(slots[-1], manifest_of(file, step), 0.1)
    file = snapshot_file(3 << 20)
    publish(served, 0, file, 7)
    state, memory = served_state(served, 7), served.allocate("snapshot", 0, len(file))
    for _ in range(3):
        assert mine.fetch(state, (served.url,)) == io.StateFetched(7, state.digest), "and nobody loads it"
    memory[len(file) // 2] ^= 1
    for _ in range(3):
        assert isinstance(mine.fetch(state, (served.url,)), io.FetchFailed)
    assert [s["step"] for s in fetch(mine.handle.url, "/v1/snapshots").json] == [5]
    own = served_state(mine.handle, 5)
    assert mine.fetch(own, (mine.handle.url,)) == io.StateFetched(5, own.digest)
    assert mine.transfer.take_state().slot == slots[1], "its own memory has this state, which needs no slot"


def test_a_new_process_maps_the_memory_that_its_server_has_kept(fetching, attach):
    mine, file = fetching(), snapshot_file(1000)
    mine.snapshots.slots.memory(0, len(file))
    mine.handle.close()
    slots = SnapshotSlots(attach(incarnation=2), mine.copier)
    slots.map_next()
    assert slots.handle.holds("snapshot", 0, len(file))


def test_a_loaded_state_counts_as_a_snapshot(fetching):
    mine, file = fetching(), snapshot_file(1000)
    slot = mine.snapshots.slots.take()
    mine.snapshots.slots.memory(slot, len(file))[: len(file)] = file
    mine.snapshots.serve(slot, manifest_of(file, 4), 0.1)
    assert not mine.snapshots.is_due(4, pytest.fail) and mine.snapshots.is_due(5, pytest.fail)


class TestAServerThatDied:
    def test_a_replica_that_waits_for_a_state_restarts_its_server_and_serves_the_state(
        self, fetching, served
    ):
        mine = fetching()
        file = snapshot_file(3 << 20)
        publish(served, 0, file, 7)
        state = served_state(served, 7)
        before = mine.handle.pid
        kill_server(mine.handle)
        assert mine.fetch(state, (served.url,)) == io.StateFetched(7, state.digest)
        arrived = mine.transfer.take_state()
        assert bytes(arrived.file) == file and mine.handle.pid != before
        mine.snapshots.serve(arrived.slot, arrived.fetched.manifest, 0.1)
        assert [s["step"] for s in fetch(mine.handle.url, "/v1/snapshots").json] == [7]

    def test_a_durable_checkpoint_is_loaded_without_a_server(self, fetching, tmp_path):
        file, state = write_one(str(tmp_path), objects(1), 3)
        mine = fetching(storage=str(tmp_path))
        kill_server(mine.handle)
        assert mine.fetch(state, (NOBODY, DURABLE)) == io.StateFetched(3, state.digest)
        assert bytes(mine.transfer.take_state().file) == file

    def test_a_server_that_cannot_be_started_does_not_condemn_the_checkpoint(self, fetching, tmp_path):
        _, state = write_one(str(tmp_path), objects(1), 3)
        mine = fetching(storage=str(tmp_path), restarts=False)
        kill_server(mine.handle)
        failed = mine.fetch(state, (DURABLE,))
        assert isinstance(failed, io.FetchFailed) and "checkpoint server of r0" in failed.why
        assert not failed.unusable and not failed.misfit


def served_state(handle: ServerHandle, step: int) -> SnapshotRef:
    entry = next(s for s in fetch(handle.url, "/v1/snapshots").json if s["step"] == step)
    return SnapshotRef(entry["generation"], step, entry["digest"])


class Stopped:
    """A server that a SIGSTOP keeps from answering; ``go_on`` continues it."""

    def __init__(self, handle: ServerHandle) -> None:
        self.handle = handle
        os.kill(handle.pid, signal.SIGSTOP)
        wait_for(lambda: self._state == "T", "the server to stop")

    @property
    def _state(self) -> str:
        return Path(f"/proc/{self.handle.pid}/stat").read_text().rpartition(")")[2].split()[0]

    def go_on(self) -> None:
        os.kill(self.handle.pid, signal.SIGCONT)
        wait_for(lambda: self.handle.ensure() is False and not self.handle.hangs, "the answer that was owed")


@pytest.fixture
def stop():
    stopped: list[Stopped] = []

    def stop_(handle: ServerHandle) -> Stopped:
        stopped.append(Stopped(handle))
        return stopped[-1]

    yield stop_
    for server in stopped:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server.handle.pid, signal.SIGCONT)


@pytest.fixture
def asked(monkeypatch):
    """The names of all requests that this process sent to a server."""
    sent: list[str] = []
    encode_line = channel_protocol.encode_line

    def noting(body):
        sent.append(body["op"])
        return encode_line(body)

    monkeypatch.setattr(channel_protocol, "encode_line", noting)
    return sent


class TestAServerThatIsStopped:
    def test_a_stopped_server_is_asked_once_and_no_call_waits_for_it_until_it_answers(
        self, attach, stop, asked
    ):
        handle = attach()
        publish(handle, 0, snapshot_file(1 << 20), 3)
        before = handle.pid
        stopped = stop(handle)
        asked.clear()
        with pytest.raises(ServerLost, match="did not answer 'begin'"):
            handle.begin("snapshot", 1)
        assert handle.hangs
        for call in (lambda: handle.begin("gradient", 0), lambda: handle.allocate("gradient", 9, 100)):
            with pytest.raises(
                ServerLost, match=r"r0 has not answered 'begin' for .* continue it, or end it"
            ):
                call()
        assert handle.ensure() is False and asked == ["begin"]
        stopped.go_on()
        # The trainer is attached to the same server process, which still holds its snapshots.
        assert [s["step"] for s in fetch(handle.url, "/v1/snapshots").json] == [3] and handle.pid == before
        publish(handle, 1, snapshot_file(1 << 20), 4)
        assert [s["step"] for s in fetch(handle.url, "/v1/snapshots").json] == [3, 4]

    def test_memory_that_a_stopped_server_allocates_too_late_is_given_up_with_its_descriptors(
        self, attach, stop, monkeypatch
    ):
        handle = attach()
        stopped, opened = stop(handle), descriptors()
        monkeypatch.setattr("fabric.ckpt_server.attach._ANSWER_S", 0.05)
        monkeypatch.setattr(ServerHandle, "_demand_answer", lambda self: None)
        with pytest.raises(ServerLost, match="did not answer 'allocate'"):
            handle.allocate("gradient", 3, 1000)
        stopped.go_on()
        assert descriptors() == opened
        assert len(handle.allocate("gradient", 3, 1000)) == 1000

    def test_a_server_that_is_killed_while_it_hangs_is_started_again(self, attach, stop):
        handle = attach()
        before = handle.pid
        stop(handle)
        with pytest.raises(ServerLost):
            handle.begin("snapshot", 1)
        kill_server(handle)
        # The kernel closes the channel when the last thread of the dead process is gone.
        wait_for(handle.ensure, "another server")
        assert handle.pid != before and not handle.hangs
        handle.begin("snapshot", 1)

    def test_the_trainer_goes_on_without_a_snapshot_and_has_the_next_one_when_the_server_goes_on(
        self, attach, stop, asked, caplog, monkeypatch
    ):
        handle, model, said = attach(), torch.nn.Linear(100, 100), []
        keeper = Worker("keeper", raise_)
        with contextlib.closing(CpuCopier()) as copier:
            describer = StateDescriber({"model": model})
            snapshots = Snapshots(
                handle, describer, copier, EverySteps(1), ("job", "r0"), False, handle.ensure
            )
            stopped = stop(handle)
            asked.clear()
            for step in range(1, 6):
                snapshots.start(SnapshotRef(1, step, ""), keeper.submit, said.append)
                snapshots.begin_digest(step, copied=True)
                snapshots.wait_copied()
                with torch.no_grad():
                    model.weight.add_(1.0)
            keeper.settle(within_s=30)
            assert [(event.step, event.digest) for event in sorted(said, key=lambda e: e.step)] == [
                (step, "") for step in range(1, 6)
            ]
            assert asked == ["begin"]
            assert [r.getMessage() for r in caplog.records if "no snapshot of step 1" in r.getMessage()]
            stopped.go_on()
            monkeypatch.setattr("fabric.client.state.snapshots.SLOT_S", 60.0)
            snapshots.start(SnapshotRef(1, 6, ""), keeper.submit, said.append)
            snapshots.wait_copied()
            keeper.settle(within_s=30)
        assert said[-1].step == 6 and said[-1].digest == describer.capture(6).digest()
        assert [s["step"] for s in fetch(handle.url, "/v1/snapshots").json] == [6]
        keeper.close(within_s=20)

    def test_a_snapshot_that_was_given_up_does_not_begin_when_its_slot_becomes_free(
        self, attach, monkeypatch
    ):
        handle, model, said = attach(), torch.nn.Linear(100, 100), []
        keeper, go, take = Worker("keeper", raise_), threading.Event(), SnapshotSlots.take
        monkeypatch.setattr("fabric.client.state.snapshots.SLOT_S", 0.01)
        monkeypatch.setattr(SnapshotSlots, "take", lambda self: go.wait(30) and take(self))
        with contextlib.closing(CpuCopier()) as copier:
            snapshots = Snapshots(
                handle,
                StateDescriber({"model": model}),
                copier,
                EverySteps(1),
                ("job", "r0"),
                False,
                handle.ensure,
            )
            snapshots.start(SnapshotRef(1, 1, ""), keeper.submit, said.append)
            snapshots.wait_copied()
            assert not snapshots.is_due(2, keeper.submit)
            go.set()
            keeper.settle(within_s=30)
            assert [event.digest for event in said] == [""]
            assert fetch(handle.url, "/v1/snapshots").json == []
        keeper.close(within_s=20)

    def test_rounds_go_on_without_slots_of_a_stopped_server_and_do_not_write_to_published_slots(
        self, attach, stop
    ):
        handle, plane = attach(), CpuRing()
        slots = GradientSlots(handle, 1024, "layout", plane)
        slots.listening = True
        run_rounds(slots, 0, 8)
        before = {row["step"]: row["digest"] for row in fetch(handle.url, "/v1/gradients").json}
        stopped = stop(handle)
        with pytest.raises(ServerLost):
            handle.begin("snapshot", 0)
        shared = [bytes(slot.buffer.numpy()) for slot in slots._slots]
        held = [slot.buffer for slot in slots._slots]
        for step in range(8, 20):
            slots.for_round(1, step).buffer[:] = step
            with contextlib.suppress(FabricError):
                slots.publish(1, hold(step))
        # One slot was already withdrawn for the next round, so only that slot's memory may change.
        changed = [i for i, buffer in enumerate(held) if bytes(buffer.numpy()) != shared[i]]
        assert len(changed) == 1
        stopped.go_on()
        found = {row["step"]: row["digest"] for row in fetch(handle.url, "/v1/gradients").json}
        assert found.items() <= before.items()
        run_rounds(slots, 20, 40)
        assert sorted(row["step"] for row in fetch(handle.url, "/v1/gradients").json)[-5:] == list(
            range(35, 40)
        )
        plane.close()


def hold(step: int) -> io.PreparedRound:
    return io.PreparedRound(1, step, f"{step:032x}", 1.0, (("r0", (0,)),))


def run_rounds(slots: GradientSlots, first: int, last: int) -> None:
    for step in range(first, last):
        slots.for_round(1, step).buffer[:] = step
        slots.publish(1, hold(step))
        slots.prepare()


def raise_(error: BaseException) -> None:
    raise error


def descriptors() -> int:
    """The number of descriptors that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def test_a_trainer_that_finds_its_server_stopped_is_to_be_started_again(
    attach, run_dir, stop, tmp_path, monkeypatch, capsys
):
    handle = attach(job="job", replica="r0")
    handle.close()
    stop(handle)
    monkeypatch.setattr("fabric.ckpt_server.attach.ATTACH_S", 0.2)
    token = tmp_path / "token"
    token.write_text("a-token")
    token.chmod(0o600)
    model = torch.nn.Linear(2, 2)
    with pytest.raises(SystemExit) as ended:
        fabric.client.attach(
            model,
            torch.optim.SGD(model.parameters()),
            job="job",
            replica="r0",
            lighthouse=("http://127.0.0.1:9",),
            token_file=token,
            run_dir=run_dir,
        )
    assert ended.value.code == 75
    assert "could not be attached to within" in capsys.readouterr().err
