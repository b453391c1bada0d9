"""The trainer's side of a snapshot: when the state may change, and what the real server then serves."""

import contextlib
import re
import resource
import threading

import numpy as np
import pytest
import torch
from ftar.simulated_device import SimulatedCopyStream, SimulatedDevice
from server_support import fetch

from fabric.ckpt_server.state.device_digest import digest_of_file
from fabric.ckpt_server.state.snapshot import CopyPass, CpuCopier, CudaCopier, copy_together
from fabric.ckpt_server.state.training_state import StateDescriber, StateView, capture, host_bytes
from fabric.client.process.worker import Worker
from fabric.client.state import mutation_guard
from fabric.client.state.mutation_guard import MEANWHILE, MutationGuard
from fabric.client.state.snapshots import EverySteps, Snapshots
from fabric.errors import StateError
from fabric.model import SnapshotRef

NAME = "model/weight"
WHO = ("job", "r0")


def ref(step, digest=""):
    return SnapshotRef(1, step, digest)


def crash(error):
    raise error


@pytest.fixture(autouse=True)
def patient(monkeypatch):
    """Make the trainer wait longer than SLOT_S for the server, because the machine may be loaded."""
    monkeypatch.setattr("fabric.client.state.snapshots.SLOT_S", 60.0)


@pytest.fixture
def keeper():
    worker = Worker("keeper", crash)
    yield worker
    worker.close(within_s=20)


@pytest.fixture
def model():
    return torch.nn.Linear(1000, 6000)  # six blocks, so that threads digest the state


@pytest.fixture
def taken(attach, model):
    """A trainer's snapshots, and the server that serves them."""
    copier = CpuCopier()
    handle = attach()
    yield (
        Snapshots(handle, StateDescriber({"model": model}), copier, EverySteps(1), WHO, False, lambda: None),
        handle,
    )
    copier.close()


@pytest.fixture
def slow(monkeypatch):
    """No block is copied before the event is set."""
    go, take = threading.Event(), CopyPass._take

    def wait(self, block):
        assert go.wait(30)
        take(self, block)

    monkeypatch.setattr(CopyPass, "_take", wait)
    yield go
    go.set()


def test_the_state_of_the_boundary_is_served_and_the_next_may_begin(taken, keeper, model):
    snapshots, handle = taken
    said, done = [], threading.Event()
    for step in (4, 5):
        done.clear()
        expected = capture({"model": model}, step).digest()
        snapshots.start(ref(step), keeper.submit, lambda event: (said.append(event), done.set()))
        snapshots.wait_copied()
        with torch.no_grad():
            model.weight.add_(1.0)
        assert done.wait(30)
        assert (said[-1].step, said[-1].digest) == (step, expected)
    listed = fetch(handle.url, "/v1/snapshots").json
    assert [(s["step"], s["digest"]) for s in listed] == [(event.step, event.digest) for event in said]


def limit_memory(pid: int, nbytes: int) -> None:
    """Let no memfd of this process grow beyond ``nbytes``, as if the machine's shared memory were full."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, hard))


def test_without_memory_there_is_no_snapshot_and_the_trainer_goes_on(taken, keeper, model, caplog):
    snapshots, handle = taken
    said = []
    limit_memory(handle.pid, 1 << 20)
    for step in (1, 2):
        snapshots.start(ref(step), keeper.submit, said.append)
        snapshots.wait_copied()
        keeper.settle(within_s=30)
        with torch.no_grad():
            model.weight.add_(1.0)
    assert [event.digest for event in said] == ["", ""]
    told = [r.getMessage() for r in caplog.records if "no snapshot of step" in r.getMessage()]
    assert len(told) == 1 and re.search(
        r"r0: no snapshot of step 1: the snapshot slot 0 needs [\d.]+ MiB more .*, but: File too large: give",
        told[0],
    )
    assert fetch(handle.url, "/v1/snapshots").json == []
    limit_memory(handle.pid, resource.RLIM_INFINITY)
    snapshots.start(ref(3), keeper.submit, said.append)
    snapshots.wait_copied()
    keeper.settle(within_s=30)
    assert [s["step"] for s in fetch(handle.url, "/v1/snapshots").json] == [3]


def test_both_slots_have_their_memory_when_the_first_snapshot_is_there_and_keep_it(taken, keeper, model):
    snapshots, handle = taken
    found = []
    for step in (1, 2, 10**17):  # the file's header is longer at the last step
        snapshots.start(ref(step), keeper.submit, lambda event: None)
        snapshots.wait_copied()
        keeper.settle(within_s=30)
        found.append([handle.descriptor("snapshot", slot) for slot in (0, 1)])
    assert found[0] == found[1] == found[2]
    assert len(fetch(handle.url, "/v1/snapshots").json) == 2


@pytest.fixture
def large():
    """A state too large for a quick allocation; its optimizer makes its part at the first step."""
    model = torch.nn.Linear(17 << 10, 1 << 10, bias=False)
    model.weight.grad = torch.zeros_like(model.weight)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), momentum=0.9)}


def test_a_large_states_memory_is_there_before_a_step_could_wait_for_it(attach, keeper, large):
    handle, describer, jobs = attach(), StateDescriber(large), []
    with contextlib.closing(CpuCopier()) as copier:
        snapshots = Snapshots(handle, describer, copier, EverySteps(3), WHO, False, lambda: None)
        large["optimizer"].step()
        nbytes = describer.capture(1).nbytes
        # No snapshot is due yet, so the server allocates memory early.
        assert not snapshots.is_due(1, jobs.append) and len(jobs) == 1
        assert not handle.holds("snapshot", 0, nbytes)
        # The memory is not yet allocated at step 3, and is allocated afterwards.
        assert not snapshots.is_due(3, jobs.append) and len(jobs) == 1
        jobs.pop()()
        assert handle.holds("snapshot", 0, nbytes) and handle.holds("snapshot", 1, nbytes)
        assert not snapshots.is_due(4, jobs.append) and snapshots.is_due(6, jobs.append) and not jobs
        snapshots.start(ref(6), keeper.submit, lambda event: None)
        snapshots.wait_copied()
        keeper.settle(within_s=30)
        assert snapshots.is_due(9, jobs.append) and not jobs
        assert [s["step"] for s in fetch(handle.url, "/v1/snapshots").json] == [6]


def test_a_large_state_that_there_is_no_memory_for_says_so(attach, keeper, large, caplog):
    handle = attach()
    with contextlib.closing(CpuCopier()) as copier:
        snapshots = Snapshots(handle, StateDescriber(large), copier, EverySteps(1), WHO, False, lambda: None)
        limit_memory(handle.pid, 1 << 20)
        assert not snapshots.is_due(1, keeper.submit)
        keeper.settle(within_s=30)
        assert not caplog.records and snapshots.is_due(2, keeper.submit)
        snapshots.start(ref(2), keeper.submit, lambda event: None)
        snapshots.wait_copied()
        keeper.settle(within_s=30)
        assert "no snapshot of step 2: the snapshot slot 0 needs" in caplog.text
        limit_memory(handle.pid, resource.RLIM_INFINITY)
        snapshots.start(ref(3), keeper.submit, lambda event: None)
        snapshots.wait_copied()
        keeper.settle(within_s=30)
        assert [s["step"] for s in fetch(handle.url, "/v1/snapshots").json] == [3]


def test_the_trainer_is_held_back_until_its_state_is_read(taken, keeper, model, slow):
    snapshots, _ = taken
    snapshots.start(ref(1), keeper.submit, lambda event: None)
    passed = threading.Event()
    trainer = threading.Thread(target=lambda: (snapshots.wait_copied(), passed.set()))
    trainer.start()
    assert not passed.wait(0.2)
    slow.set()
    assert passed.wait(30)
    trainer.join()


def served(handle):
    return [s["step"] for s in fetch(handle.url, "/v1/snapshots").json]


def counted(model):
    with torch.no_grad():
        model.weight.mul_(1.5)


def in_place(model):
    model.weight.data.mul_(1.5)


def replaced(model):
    model.weight.data = model.weight.data * 1.5


WRITES = {"counted": counted, "in place": in_place, "replaced": replaced}


@pytest.mark.parametrize("kind", WRITES)
def test_a_state_that_changes_while_it_is_copied_is_refused_by_name_and_not_served(
    taken, keeper, model, slow, kind
):
    snapshots, handle = taken
    said, done = [], threading.Event()
    snapshots.start(ref(1), keeper.submit, lambda event: (said.append(event), done.set()))
    snapshots.expose()
    WRITES[kind](model)
    slow.set()
    with pytest.raises(StateError, match=f"{NAME} changed .*while forward and backward ran"):
        snapshots.wait_copied()
    assert done.wait(30) and said[0].digest == ""
    assert served(handle) == []


@pytest.fixture
def half_slow(monkeypatch):
    """The copy of the first block is done, all others wait for the event."""
    first, go, take = threading.Event(), threading.Event(), CopyPass._take

    def wait(self, block):
        if block:
            assert go.wait(30)
        take(self, block)
        first.set()

    monkeypatch.setattr(CopyPass, "_take", wait)
    go.first = first
    yield go
    go.set()


@pytest.mark.parametrize("kind", ["counted", "in place", "replaced", "one row"])
@pytest.mark.parametrize("known", [False, True])
def test_a_copy_of_weights_that_were_moved_for_a_moment_is_not_served(
    taken, keeper, model, half_slow, caplog, kind, known
):
    """As adversarial training moves an embedding and puts it back."""
    snapshots, handle = taken
    said, done = [], threading.Event()
    kept, boundary = model.weight.detach().clone(), capture({"model": model}, 1).digest()
    state = ref(1, boundary if known else "")
    snapshots.start(state, keeper.submit, lambda event: (said.append(event), done.set()))
    snapshots.begin_digest(1, copied=True)
    snapshots.expose()
    assert half_slow.first.wait(30)
    if kind == "one row":
        model.weight.data[-1] += 1.0
    else:
        WRITES[kind](model)
    half_slow.set()
    assert snapshots._taking.copied.wait(30)
    if kind == "counted":
        with torch.no_grad():
            model.weight.copy_(kept)
    elif kind == "replaced":
        model.weight.data = kept.clone()
    else:
        model.weight.data.copy_(kept)
    assert snapshots.digests.take(1) == boundary, "the digest is that of the state, not that of the copy"
    snapshots.wait_copied()
    assert done.wait(30) and said[0].digest == ""
    assert served(handle) == []
    told = [r.getMessage() for r in caplog.records if "for a moment" in r.getMessage()]
    assert len(told) == 1 and "copies and digests its state before your code goes on" in told[0]

    # From now on the state is read before user code goes on, and what it moves does no harm.
    done.clear()
    snapshots.start(ref(2), keeper.submit, lambda event: (said.append(event), done.set()))
    snapshots.begin_digest(2, copied=False)
    snapshots.expose()
    assert done.wait(30), "it is served while user code runs"
    counted(model)
    with torch.no_grad():
        model.weight.copy_(kept)
    assert snapshots.digests.take(2) == capture({"model": model}, 2).digest() == said[1].digest
    snapshots.wait_copied()
    assert served(handle) == [2]


def test_a_change_that_stays_is_refused_by_name_once_the_state_is_read_first(taken, keeper, model):
    snapshots, _ = taken
    snapshots.start(ref(1), keeper.submit, lambda event: None)
    snapshots.expose()
    with torch.no_grad():
        model.weight[7, 0] += 0.0
    snapshots.wait_copied()
    snapshots.start(ref(2), keeper.submit, lambda event: None)
    snapshots.expose()
    with torch.no_grad():
        model.weight[7, 0] += 1.0  # a few bytes, which no sample need show
    with pytest.raises(StateError, match=f"{NAME} changed while forward and backward ran"):
        snapshots.wait_copied()


def test_a_few_bytes_that_torch_does_not_count_are_found_where_the_digest_is_known(
    taken, keeper, model, slow
):
    snapshots, handle = taken
    said, done = [], threading.Event()
    digest = capture({"model": model}, 1).digest()
    snapshots.start(ref(1, digest), keeper.submit, lambda event: (said.append(event), done.set()))
    snapshots.expose()
    model.weight.data[5, 5] += 1.0
    slow.set()
    with pytest.raises(StateError, match="changed without torch's knowledge while forward"):
        snapshots.wait_copied()
    assert done.wait(30) and said[0].digest == ""
    assert served(handle) == []


def test_a_copy_that_user_code_could_not_touch_is_served_at_once(taken, keeper, model):
    """Members that wait for a newcomer serve their state while their own threads wait."""
    snapshots, handle = taken
    done = threading.Event()
    snapshots.start(ref(1), keeper.submit, lambda event: done.set())
    assert done.wait(30)
    assert served(handle) == [1]


def test_a_copy_beside_user_code_is_served_when_it_has_been_checked(taken, keeper, model, slow):
    snapshots, handle = taken
    done = threading.Event()
    snapshots.start(ref(1), keeper.submit, lambda event: done.set())
    snapshots.expose()
    slow.set()
    assert snapshots._taking.copied.wait(30)
    keeper.settle(within_s=30)
    assert served(handle) == []
    snapshots.settle()
    assert done.wait(30)
    assert served(handle) == [1]


def test_a_copy_is_served_between_two_micro_batches_and_later_changes_are_still_found(
    taken, keeper, model, slow, monkeypatch
):
    snapshots, handle = taken
    done = threading.Event()
    snapshots.start(ref(1), keeper.submit, lambda event: done.set())
    snapshots.expose()
    snapshots.offer()
    slow.set()
    assert snapshots._taking.copied.wait(30)
    assert served(handle) == [], "the copy was not over"
    with monkeypatch.context() as patch:
        patch.setattr(StateDescriber, "capture", None)  # FSDP would gather again on this rank alone
        snapshots.offer()
    assert done.wait(30)
    assert served(handle) == [1]
    with torch.no_grad():
        model.weight.add_(1.0)
    with pytest.raises(StateError, match=f"{NAME} changed while"):
        snapshots.settle()


@pytest.mark.parametrize("how", ["moved", "moved and put back", "moved before the copy", "moved by numpy"])
def test_a_copy_of_a_state_that_user_code_moves_is_not_served_between_micro_batches(
    taken, keeper, model, slow, how
):
    snapshots, handle = taken
    snapshots.start(ref(1), keeper.submit, lambda event: None)
    snapshots.expose()
    if how == "moved before the copy":
        model.weight.data.add_(1.0)  # without a count of torch, so the copy is equal to the state
    slow.set()
    assert snapshots._taking.copied.wait(30)
    with torch.no_grad():
        if how == "moved by numpy":
            model.weight.numpy()[:] += 1.0
        elif how != "moved before the copy":
            model.weight.add_(1.0)
            model.weight.sub_(1.0 if how == "moved and put back" else 0.5)
    snapshots.offer()
    keeper.settle(within_s=30)
    assert served(handle) == []


def test_a_copy_that_outlasts_user_code_is_served_before_the_trainer_waits_for_others(
    taken, keeper, model, slow
):
    """The others may need this state to go on: a copy that is served after the round would come too late."""
    snapshots, handle = taken
    done = threading.Event()
    snapshots.start(ref(1), keeper.submit, lambda event: done.set())
    snapshots.expose()
    trainer = threading.Thread(target=snapshots.settle)
    trainer.start()
    slow.set()
    trainer.join(30)
    assert done.wait(30)
    assert served(handle) == [1]


def test_a_guard_touches_few_bytes_all_over_a_tensor():
    tensor = torch.zeros(1 << 20)
    view = StateView(b"", tuple((f"t{i}", tensor) for i in range(4)), 0, 1)
    guard = MutationGuard(view)
    places = [place for _, _, _, places, _ in guard.watched for place in places]
    assert len(places) == 4 * 16
    for _, _, _, of_one, _ in guard.watched:
        assert [place // (tensor.nbytes // 16) for place in of_one] == list(range(16)), "one in each part"
    many = StateView(b"", tuple((f"t{i}", tensor) for i in range(2000)), 0, 1)
    assert sum(len(places) for _, _, _, places, _ in MutationGuard(many).watched) == 2000
    small = torch.zeros(100)
    guard = MutationGuard(StateView(b"", (("small", small),), 0, 1))
    for at in range(100):
        small.numpy()[at] = 1.0
        assert guard.changed(lambda: view) == f"small changed without torch's knowledge{MEANWHILE}"
        small.numpy()[at] = 0.0


def test_a_snapshot_is_published_under_the_digest_that_was_taken_before(taken, keeper, model):
    snapshots, handle = taken
    done = threading.Event()
    digest = capture({"model": model}, 7).digest()
    snapshots.start(ref(7, digest), keeper.submit, lambda event: done.set())
    snapshots.wait_copied()
    assert done.wait(30)
    assert [s["digest"] for s in fetch(handle.url, "/v1/snapshots").json] == [digest]


# --- the digest that is compared at a step -----------------------------------------------------------------


@pytest.mark.parametrize("copied", [False, True])
def test_the_digest_is_that_of_the_boundary_with_and_without_a_snapshot(taken, keeper, model, copied):
    snapshots, _ = taken
    for step in (3, 4):
        if copied:
            snapshots.start(ref(step), keeper.submit, lambda event: None)
        snapshots.begin_digest(step, copied)
        assert snapshots.digests.take(step) == capture({"model": model}, step).digest()
        assert snapshots.digests.take(step) == capture({"model": model}, step).digest(), "however often"
        snapshots.wait_copied()
        with torch.no_grad():
            model.weight.add_(1.0)


def test_a_snapshot_brings_the_digest_along_and_nothing_is_read_twice(taken, keeper, model, monkeypatch):
    snapshots, _ = taken
    monkeypatch.setattr(CpuCopier, "digest", None)
    snapshots.start(ref(1), keeper.submit, lambda event: None)
    snapshots.begin_digest(1, copied=True)
    assert snapshots.digests.take(1) == capture({"model": model}, 1).digest()


def test_a_digest_goes_on_during_a_snapshot_for_a_joining_replica(taken, keeper, model):
    snapshots, handle = taken
    done = threading.Event()
    expected = capture({"model": model}, 2).digest()
    snapshots.begin_digest(2, copied=False)
    snapshots.start(ref(2), keeper.submit, lambda event: done.set())
    assert snapshots.digests.take(2) == expected
    snapshots.wait_copied()
    assert done.wait(30)
    assert [s["digest"] for s in fetch(handle.url, "/v1/snapshots").json] == [expected]


def test_after_the_fence_the_digest_is_of_the_state_before_it(taken, keeper, model):
    """A forward that changes buffers waits for the copy first, long before the digest is due."""
    snapshots, _ = taken
    expected = capture({"model": model}, 1).digest()
    snapshots.begin_digest(1, copied=False)
    snapshots.wait_copied()
    with torch.no_grad():
        model.weight.add_(1.0)
    assert snapshots.digests.take(1) == expected
    assert snapshots.digests.take(2) == "", "nobody has begun that one"


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("kind", WRITES)
def test_a_state_that_changes_while_it_is_digested_is_refused_by_name(
    taken, keeper, model, slow, copied, kind
):
    snapshots, _ = taken
    if copied:
        snapshots.start(ref(1), keeper.submit, lambda event: None)
    snapshots.begin_digest(1, copied)
    snapshots.expose()
    WRITES[kind](model)
    slow.set()
    with pytest.raises(StateError, match=f"{NAME} changed .*while forward and backward ran"):
        snapshots.digests.take(1)


class Rates(dict):
    """The rates of a scheduler, which a callback sets at the begin of an epoch."""

    def state_dict(self):
        return dict(self)

    load_state_dict = dict.update


@pytest.mark.parametrize("known", [False, True], ids=["digest unknown", "digest known"])
@pytest.mark.parametrize("copied", [False, True], ids=["alone", "with a copy"])
def test_a_number_that_a_callback_sets_after_the_boundary_changes_no_digest(
    attach, keeper, model, copied, known
):
    rates = Rates(lr=0.8)
    objects, copier = {"model": model, "scheduler": rates}, CpuCopier()
    snapshots = Snapshots(attach(), StateDescriber(objects), copier, EverySteps(1), WHO, False, lambda: None)
    try:
        for step in range(6):  # the first readings are checked as a whole
            expected = capture(objects, step).digest()
            if copied:
                snapshots.start(ref(step, expected if known else ""), keeper.submit, lambda event: None)
            snapshots.begin_digest(step, copied)
            snapshots.expose()
            rates["lr"] /= 2
            with torch.no_grad():
                model.weight[0, 0] += 0.0  # weights that move for a moment, which are read again
            assert snapshots.digests.take(step) == expected
            snapshots.wait_copied()
    finally:
        copier.close()


def test_a_digest_is_taken_where_the_copy_had_no_memory(taken, keeper, model):
    snapshots, handle = taken
    handle.close()
    snapshots.start(ref(1), keeper.submit, lambda event: None)
    snapshots.begin_digest(1, copied=True)
    assert snapshots.digests.take(1) == "", "the session reads the state itself then"


class SlowLane:
    """A device whose memory is the host's; nothing is copied before ``go`` is set."""

    def __init__(self):
        self.go, self.held = threading.Event(), threading.Event()
        self.device = torch.device("cpu")
        self._pending, self._turn = [], threading.Lock()

    def owns(self, tensor):
        return True

    def register(self, memory):
        pass

    def begin(self):
        pass

    def copy(self, tensors, memory):
        self.run(lambda: copy_together(tensors, memory))

    def run(self, work):
        self._pending.append(work)

    def end(self):
        return self

    def hold(self, event):
        self.held.set()

    def staging(self, nbytes):
        return np.empty(nbytes, np.uint8)

    def synchronize(self):
        assert self.go.wait(30)
        with self._turn:  # several threads wait for one event
            for work in self._pending:
                work()
            self._pending.clear()

    def close(self):
        self.go.set()


@pytest.fixture
def on_device(attach, model):
    lane = SlowLane()
    copier = CudaCopier(lane)
    handle = attach()
    yield (
        Snapshots(handle, StateDescriber({"model": model}), copier, EverySteps(1), WHO, True, lambda: None),
        handle,
        lane,
    )
    lane.go.set()
    copier.close()


def test_on_a_device_a_counted_write_before_the_fence_is_not_served_and_then_refused_by_name(
    on_device, keeper, model
):
    """The device has not copied a byte yet, but the host knows which copies it has enqueued."""
    snapshots, handle, lane = on_device
    said, done = [], threading.Event()
    for step in (1, 2):
        snapshots.start(ref(step), keeper.submit, lambda event: (said.append(event), done.set()))
        snapshots.expose()
        with torch.no_grad():
            model.weight[0, 0] += 1.0
        if step == 1:
            snapshots.wait_copied()  # the host cannot know yet whether the change stays
            lane.go.set()
            assert done.wait(30) and said[0].digest == ""
            assert served(handle) == []
    with pytest.raises(StateError, match=f"{NAME} changed while forward and backward ran"):
        snapshots.wait_copied()


def test_on_a_device_a_write_behind_the_fence_is_allowed(on_device, keeper, model):
    snapshots, handle, lane = on_device
    done = threading.Event()
    digest = digest_of_file(as_file(capture({"model": model}, 1)))
    snapshots.start(ref(1, digest), keeper.submit, lambda event: done.set())
    snapshots.wait_copied()
    assert lane.held.is_set() and not done.is_set()
    with torch.no_grad():
        model.weight.add_(0.0)  # the device runs this update after the copy, and has not yet run the copy
    lane.go.set()
    assert done.wait(30)
    assert [s["step"] for s in fetch(handle.url, "/v1/snapshots").json] == [1]


def test_on_a_device_an_uncounted_write_stops_the_next_snapshot(on_device, keeper, model):
    """The digest is known only after the device's copy, when the trainer is already at its next step."""
    snapshots, handle, lane = on_device
    done = threading.Event()
    digest = digest_of_file(as_file(capture({"model": model}, 1)))
    snapshots.start(ref(1, digest), keeper.submit, lambda event: done.set())
    model.weight.data[5, 5] += 1.0
    snapshots.wait_copied()
    lane.go.set()
    assert done.wait(30)
    with pytest.raises(StateError, match="changed without torch's knowledge"):
        snapshots.start(ref(2), keeper.submit, lambda event: None)
    assert fetch(handle.url, "/v1/snapshots").json == []


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("voted", [False, True])
def test_on_a_device_a_digest_is_that_of_its_boundary_however_late_the_device_is(
    attach, keeper, model, copied, voted, monkeypatch
):
    """The update before the boundary has not run when the digest is begun, and the next one follows."""
    monkeypatch.setattr(mutation_guard, "samples", lambda tensor, places: b"")  # as for a device's memory
    device = SimulatedDevice()
    copier = CudaCopier(SimulatedCopyStream(device))
    describer = StateDescriber({"model": model})
    snapshots = Snapshots(attach(), describer, copier, EverySteps(1), WHO, True, lambda: None)
    wanted = []
    said, done = [], threading.Event()

    def update() -> None:
        model.weight.data.mul_(1.5)
        wanted.append(digest_of_file(as_file(capture({"model": model}, len(wanted) + 1))))

    device.compute().run(update)
    for step in (1, 2):
        if copied:
            done.clear()
            snapshots.start(ref(step), keeper.submit, lambda event: (said.append(event.digest), done.set()))
        snapshots.begin_digest(step, copied)
        assert step == 2 or not wanted
        if voted:
            assert snapshots.digests.take(step) == wanted[step - 1]
        snapshots.wait_copied()
        device.compute().run(update)
        device.compute().record().wait()
        assert snapshots.digests.take(step) == wanted[step - 1]
        if copied:
            assert done.wait(30) and said[-1] == wanted[step - 1]
    copier.close()
    device.close()


def as_file(view: StateView) -> memoryview:
    return memoryview(bytearray(view.header + b"".join(bytes(host_bytes(t)) for _, t in view.tensors)))


def test_the_check_of_a_copy_counts_as_a_cost_of_the_snapshot(taken, keeper, model, slow, monkeypatch):
    """User code has run beside the copy, so the trainer's thread compares the copy with the state."""
    snapshots, _ = taken
    costs, published = [], threading.Event()
    monkeypatch.setattr(EverySteps, "taken", lambda policy, step, now, cost_s: costs.append((step, cost_s)))
    snapshots.start(ref(4), keeper.submit, lambda event: published.set())
    snapshots.expose()
    slow.set()
    snapshots.wait_copied()
    assert published.wait(30)
    (first, copied), (second, checked) = costs
    assert first == second == 4 and checked > copied > 0


@pytest.mark.parametrize("copied", [True, False])
def test_a_digest_and_its_entries_view_the_state_once(taken, keeper, model, monkeypatch, copied):
    snapshots, _ = taken
    snapshots._watch._whole = 0  # of the first few digests each reads the state twice
    views, captures = StateDescriber.capture, []
    monkeypatch.setattr(
        StateDescriber, "capture", lambda describer, step: captures.append(step) or views(describer, step)
    )
    if copied:
        snapshots.start(ref(4), keeper.submit, lambda event: None)
    snapshots.begin_digest(4, copied=copied)
    snapshots.digests.take(4)
    guard = snapshots.digests.take_guard(4)
    assert captures == [4] and guard.view.step == 4
    assert snapshots.digests.take_guard(4) is None, "it would keep tensors alive"
