"""Snapshots: the copy equals the state, its digests describe it, and the order of events holds."""

import functools
import mmap
import os
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.ckpt_server.format.manifest import BLOCK_BYTES, check_manifest, file_digest
from fabric.ckpt_server.state.device_digest import digest_of_file
from fabric.ckpt_server.state.snapshot import (
    Bytes,
    CopyPass,
    CpuCopier,
    CudaCopier,
    build_manifest,
    copy_together,
)
from fabric.ckpt_server.state.training_state import StateView, capture, host_bytes, restore
from fabric.errors import IntegrityError, StateError


class Tensors:
    """State that is just tensors."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        self.kept = dict(enumerate(tensors))

    def state_dict(self) -> dict[int, torch.Tensor]:
        return dict(self.kept)

    def load_state_dict(self, state: dict[int, torch.Tensor]) -> None:
        self.kept = state


def filled(count: int, dtype: torch.dtype = torch.uint8, seed: int = 0) -> torch.Tensor:
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, np.uint8)
    return torch.from_numpy(raw).view(dtype)


def expected_file(view: StateView) -> bytes:
    return view.header + b"".join(host_bytes(tensor.cpu()).tobytes() for _, tensor in view.tensors)


def check(view: StateView, target: Any, digests: Any) -> None:
    file = bytes(target[: view.nbytes])
    assert file == expected_file(view)
    assert digests.digest == view.digest() == file_digest(memoryview(file))
    cuts = range(0, len(file), BLOCK_BYTES)
    assert digests.blocks == tuple(xxhash.xxh3_64_hexdigest(file[cut : cut + BLOCK_BYTES]) for cut in cuts)
    # the digest as docs/http.md defines it
    told = b"".join(int(block, 16).to_bytes(8, "big") for block in digests.blocks)
    sizes = len(file).to_bytes(8, "big") + (4 << 20).to_bytes(8, "big")
    assert digests.digest == xxhash.xxh3_128_hexdigest(sizes + told)


@pytest.fixture
def copier():
    copier = CpuCopier()
    yield copier
    copier.close()


SIZES = [0, 1, 3, 4096, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES + 17]


@pytest.mark.parametrize("sizes", [[], [0], SIZES, SIZES[::-1], [1] * 3000, [3 * BLOCK_BYTES]])
def test_copy_and_digests_at_block_boundaries(copier: CpuCopier, sizes: list[int]) -> None:
    state = Tensors(*(filled(size, seed=index) for index, size in enumerate(sizes)))
    view = capture({"x": state}, 4)
    target = bytearray(view.nbytes + 100)
    copier.start(view, memoryview(target))
    check(view, target, copier.join())
    assert not any(target[view.nbytes :])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 3 * BLOCK_BYTES // 2), max_size=5), st.integers(1, 2))
def test_copy_of_any_sizes(sizes: list[int], threads: int) -> None:
    view = capture({"x": Tensors(*(filled(size, seed=size) for size in sizes))}, 1)
    target = bytearray(view.nbytes)
    with mock.patch("os.sched_getaffinity", lambda _: range(threads + 1)):
        copier = CpuCopier()
    try:
        copier.start(view, memoryview(target))
        check(view, target, copier.join())
    finally:
        copier.close()


def test_into_shared_memory_and_out_again(copier: CpuCopier) -> None:
    state = Tensors(filled(3_000_000, torch.float32), filled(77, torch.bfloat16), torch.tensor(True))
    view = capture({"x": state}, 12)
    file = os.memfd_create("slot")
    os.ftruncate(file, view.nbytes)
    with mmap.mmap(file, view.nbytes) as memory:
        os.close(file)
        slot = memoryview(memory)
        for _ in range(2):  # the second snapshot uses the same slot
            copier.start(view, slot)
            copier.fence()
            digests = copier.join()
            target = Tensors()
            assert restore(slot, {"x": target}) == 12
            assert capture({"x": target}, 12).digest() == digests.digest
        slot.release()


def test_after_the_fence_the_state_may_change(copier: CpuCopier) -> None:
    tensor = filled(2_000_000)
    view = capture({"x": Tensors(tensor)}, 1)
    before, digest = expected_file(view), view.digest()
    target = bytearray(view.nbytes)
    copier.start(view, memoryview(target))
    copier.fence()
    tensor.zero_()
    assert copier.join().digest == digest
    assert bytes(target) == before


def test_a_starved_pool_does_not_stop_the_trainer(copier: CpuCopier) -> None:
    gate = threading.Event()
    for _ in range(2):
        copier._pool.submit(gate.wait, 60)  # keep the copying threads busy, as a starving scheduler would
    view = capture({"x": Tensors(*(filled(BLOCK_BYTES, seed=n) for n in range(4)))}, 1)
    target = bytearray(view.nbytes)
    try:
        copier.start(view, memoryview(target))
        fence = threading.Thread(target=copier.fence)
        fence.start()
        fence.join(20)
        assert not fence.is_alive()
        check(view, target, copier.join())
    finally:
        gate.set()


def test_misuse_is_refused_in_a_sentence(copier: CpuCopier) -> None:
    view = capture({"x": Tensors(filled(1000))}, 1)
    with pytest.raises(StateError, match="No snapshot was started"):
        copier.join()
    with pytest.raises(StateError, match=f"needs {view.nbytes} bytes and its slot has 10"):
        copier.start(view, memoryview(bytearray(10)))
    with pytest.raises(StateError, match="writable"):
        copier.start(view, memoryview(bytes(view.nbytes)))
    meta = StateView(view.header, (("w", torch.empty(3, device="meta")),), view.nbytes, 1)
    with pytest.raises(StateError, match="w is on meta"):
        copier.start(meta, memoryview(bytearray(view.nbytes)))
    copier.start(view, memoryview(bytearray(view.nbytes)))
    with pytest.raises(StateError, match="still being copied"):
        copier.start(view, memoryview(bytearray(view.nbytes)))
    copier.join()


def test_an_error_in_a_thread_comes_out_of_join_and_the_next_copy_works(copier, monkeypatch) -> None:
    view = capture({"x": Tensors(filled(100))}, 1)

    def burn(self: CopyPass, block: int) -> None:
        raise RuntimeError("the memory burns")

    with monkeypatch.context() as patch:
        patch.setattr(CopyPass, "_take", burn)
        copier.start(view, memoryview(bytearray(view.nbytes)))
        copier.fence()  # the fence keeps the error for ``join``
        with pytest.raises(StateError, match="the memory burns"):
            copier.join()
    target = bytearray(view.nbytes)
    copier.start(view, memoryview(target))
    check(view, target, copier.join())


def test_manifest_describes_the_snapshot(copier: CpuCopier) -> None:
    view = capture({"x": Tensors(filled(BLOCK_BYTES + 9))}, 31)
    target = bytearray(view.nbytes)
    copier.start(view, memoryview(target))
    digests = copier.join()
    manifest = build_manifest(view, digests, job="j", replica="r0", generation=2, created=1.5)
    assert check_manifest(manifest) is manifest
    assert manifest["step"] == 31
    assert manifest["generation"] == 2
    assert manifest["nbytes"] == len(target)
    assert manifest["blocks"] == list(digests.blocks)
    with pytest.raises(IntegrityError, match="blocks give the digest"):
        check_manifest(dict(manifest, blocks=["0" * 16] * len(digests.blocks)))


# --- the order of events on a device, with a lane that does nothing before it must ----------------


class LazyLane:
    """A device whose copies run only when a thread waits for their event."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.device = torch.device("cpu")
        self.pending: list[Callable[[], object]] = []
        self.happened, self.turn = threading.Event(), threading.Lock()
        self.error: Exception | None = None

    def owns(self, tensor: torch.Tensor) -> bool:
        # larger tensors are on the device, step counters on the host
        return tensor.numel() * tensor.dtype.itemsize > 4

    def register(self, memory: Bytes) -> None:
        self.log.append("register")

    def begin(self) -> None:
        self.log.append("begin")

    def copy(self, tensors: list[torch.Tensor], memory: Bytes) -> None:
        assert sum(tensor.numel() for tensor in tensors) == memory.nbytes
        self.log.append("copy")
        self.pending.append(lambda: copy_together(tensors, memory))

    def run(self, work: Callable[[], object]) -> None:
        self.log.append("run")
        self.pending.append(work)

    def end(self) -> "LazyLane":
        self.log.append("end")
        return self

    def hold(self, event: Any) -> None:
        assert event is self
        self.log.append("hold")

    def staging(self, nbytes: int) -> Bytes:
        return np.full(nbytes, 7, np.uint8)

    def close(self) -> None:
        self.log.append("close")

    def synchronize(self) -> None:
        if self.error is not None:
            raise self.error
        with self.turn:  # several threads wait for one event
            for work in self.pending:
                work()
            self.pending.clear()
        self.happened.set()


def adam_like() -> Tensors:
    big = [filled(size, seed=size) for size in (BLOCK_BYTES + 5, 700_000, 300, 200, 100)]
    return Tensors(*big, torch.tensor(3.0), torch.tensor(4.0))


def test_device_copy_is_ordered_by_events() -> None:
    lane = LazyLane()
    copier = CudaCopier(lane)
    view = capture({"x": adam_like()}, 2)
    target = bytearray(view.nbytes)
    copier.start(view, memoryview(target))
    copier.fence()
    digests = copier.join()
    # three small tensors go in one copy; the state is digested behind the copies, and last the finished copy
    start = ["register", "begin", "copy", "copy", "copy", "begin", "run", "end"]
    assert lane.log == [*start, "end", "hold", "run", "end"]
    assert lane.happened.is_set()
    check(view, target, digests)
    assert digests.state == digests.name == digest_of_file(memoryview(target)[: view.nbytes])
    copier.start(view, memoryview(target))
    check(view, target, copier.join())
    copier.close()
    assert lane.log[-1] == "close"


def test_a_copy_that_differs_from_the_state_on_the_device_is_refused() -> None:
    lane = LazyLane()
    copier = CudaCopier(lane)
    view = capture({"x": adam_like()}, 2)
    target = bytearray(view.nbytes)
    run = lane.run
    flip = functools.partial(target.__setitem__, -1, 1)
    lane.run = lambda work: run(lambda: (work(), flip()))  # type: ignore[method-assign]
    copier.start(view, memoryview(target))
    lane.run = run  # type: ignore[method-assign]
    with pytest.raises(StateError, match="another digest than the state on the device"):
        copier.join()
    copier.start(view, memoryview(target))
    assert copier.join().name == digest_of_file(memoryview(target)[: view.nbytes])
    copier.close()


def test_a_state_on_a_device_is_digested_there_behind_earlier_work() -> None:
    """The digest is that of the file's bytes, wherever the tensors lie, however small they are."""
    lane = LazyLane()
    copier = CudaCopier(lane)
    for state in (
        adam_like(),
        Tensors(torch.tensor(3.0)),
        Tensors(*[filled(900, seed=i) for i in range(20)]),
        Tensors(*[filled(size, seed=size) for size in (3, BLOCK_BYTES, 1, 2 * BLOCK_BYTES + 3, 5)]),
    ):
        view = capture({"x": state}, 2)
        lane.log.clear()
        digesting = copier.digest(view)
        assert lane.log == ["begin", "run", "end"] and lane.pending
        assert digesting.digest() == digest_of_file(memoryview(bytearray(expected_file(view))))
    assert digesting.digest() != copier.digest(capture({"x": state}, 3)).digest()
    lane.error = RuntimeError("device lost")
    with pytest.raises(StateError, match="device lost"):
        copier.digest(capture({"x": adam_like()}, 2)).digest()
    copier.close()


def test_large_tensors_that_stay_on_the_host_are_digested_by_another_thread() -> None:
    """Their way to the device would block the trainer. Small ones are read before the trainer goes on."""
    lane = LazyLane()
    lane.owns = lambda tensor: False  # type: ignore[method-assign]
    copier = CudaCopier(lane)
    view = capture({"x": adam_like()}, 2)
    expected, threads = digest_of_file(memoryview(bytearray(expected_file(view)))), []
    run = lane.run
    lane.run = lambda work: (threads.append(threading.current_thread()), run(work))  # type: ignore[method-assign]
    digesting = copier._digesting.submit(lambda: copier.digest(view)).result(20)
    for _, tensor in view.tensors:
        if tensor.numel() == 1:
            tensor.add_(1)
    assert digesting.digest() == expected
    small = capture({"x": Tensors(torch.tensor(3.0))}, 2)
    copier.digest(small).digest()
    assert threads[1] is threading.current_thread() and len(threads) == 2
    copier.close()


def test_device_error_is_kept_for_join() -> None:
    lane = LazyLane()
    copier = CudaCopier(lane)
    view = capture({"x": adam_like()}, 2)
    target = bytearray(view.nbytes)
    lane.error = RuntimeError("device lost")
    copier.start(view, memoryview(target))
    copier.fence()
    with pytest.raises(StateError, match="device lost"):
        copier.join()
    lane.error = None
    copier.start(view, memoryview(target))
    check(view, target, copier.join())
    copier.close()


@pytest.mark.parametrize(("make", "name"), [(CpuCopier, "_take"), (lambda: CudaCopier(LazyLane()), "copy")])
def test_a_fence_waits_for_a_block_that_another_thread_copies(monkeypatch, make, name) -> None:
    """One thread joins while the trainer fences: a block that a thread has taken may not be copied yet."""
    copier = make()
    counters = [torch.tensor(float(n)) for n in range(4)]
    view = capture({"x": Tensors(filled(2 * BLOCK_BYTES), *counters)}, 2)
    target = bytearray(view.nbytes)
    blocked, gate, take = threading.Event(), threading.Event(), getattr(CopyPass, name)

    def slow(self: CopyPass, part: Any) -> Any:
        blocked.set()
        assert gate.wait(30)
        return take(self, part)

    monkeypatch.setattr(CopyPass, name, slow)
    copier.start(view, memoryview(target))
    assert blocked.wait(20)
    results: list[Any] = []
    keeper = threading.Thread(target=lambda: results.append(copier.join()))
    keeper.start()
    fence = threading.Thread(target=copier.fence)
    fence.start()
    fence.join(0.2)
    assert fence.is_alive()
    gate.set()
    fence.join(20)
    keeper.join(20)
    assert bytes(target) == expected_file(view)
    check(view, target, results[0])
    copier.close()
