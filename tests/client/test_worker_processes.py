"""Worker processes read what the trainer would read, and end with it."""

import ctypes
import os
import random
import select
import signal
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from forked_processes import TORCH, ForkedProcess, address, run_with_torch
from loaders import loader_of

from fabric.client.data.loader import Loader, make_loader, parse_options
from fabric.client.data.sample_plan import SamplePlan
from fabric.errors import ConfigError
from fabric.runtime.config import Settings

SHARE = range(4)
PR_GET_PDEATHSIG = 2


class Noisy(torch.utils.data.Dataset):
    """Each sample has its index and numbers of three generators, as an augmentation draws them."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return index, float(torch.rand(())), float(np.random.rand()), random.random()


class Broken(Noisy):
    def __init__(self, index):
        self.index = index

    def __getitem__(self, index):
        if index == self.index:
            raise LookupError(f"sample {index} is damaged")
        return index


class Dying(Noisy):
    def __getitem__(self, index):
        os.kill(os.getpid(), signal.SIGKILL)


class Informed(Noisy):
    """Tells what torch tells a data set in a worker."""

    def __getitem__(self, index):
        info = torch.utils.data.get_worker_info()
        return info.dataset is self, info.num_workers, info.seed, getattr(self, "told", None)


def tell(worker: int) -> None:
    torch.utils.data.get_worker_info().dataset.told = worker


def loader_for(dataset, replica="r0", number=2, **options) -> Loader:
    return make_loader(
        dataset, (8, 2, 3), list, number, parse_options(options), Settings(replica=replica, replicas="1")
    )


def batches(loader, step=0):
    loader.read_ahead(step, SHARE)
    return [loader.fetch(step, i) for i in SHARE]


# A worker that is spawned imports torch again, which takes seconds of a processor.
WORKERS = [(2, "fork"), (1, "spawn")]


@pytest.mark.parametrize(("workers", "context"), WORKERS)
def test_workers_draw_the_same_numbers_as_the_trainer_itself(workers, context):
    """So a replica that inherits a micro-batch gets the same augmentation."""
    plan = SamplePlan(40, 8, 2, seed=3)
    alone = loader_of(Noisy(), plan)
    loader = loader_for(Noisy(), number=workers, multiprocessing_context=context)
    for step in (0, 1, 5):
        assert batches(loader, step) == batches(alone, step)
    loader.close()


def test_a_share_that_changes_gets_its_micro_batches_and_no_others():
    plan = SamplePlan(40, 8, 2, seed=3)
    loader = loader_of(Noisy(), plan, workers=2, kind="processes")
    alone = loader_of(Noisy(), plan)
    script = [(0, (0, 1)), (0, (2,)), (1, (0, 1)), (2, (3,)), (2, ()), (7, (1, 2)), (3, (0, 1, 2, 3))]
    for step, share in script:
        loader.read_ahead(step, share)
        for micro_batch in share:
            assert loader.fetch(step, micro_batch) == alone.fetch(step, micro_batch)
        loader.expect(step + 1, share)
    assert loader.fetch(9, 1) == alone.fetch(9, 1), "nobody announced it"
    loader.close()


def test_the_data_set_and_worker_init_fn_find_what_torch_tells_them():
    seeds = []
    for replica in ("r0", "r1"):
        loader = loader_for(Informed(), replica, worker_init_fn=tell)
        rows = [row for batch in batches(loader) for row in batch]
        assert {row[:2] for row in rows} == {(True, 2)}
        assert {row[3] for row in rows} == {0, 1}
        seeds.append({row[2] for row in rows})
        loader.close()
    assert not seeds[0] & seeds[1], "the workers of two replicas have equal seeds"


class Epochs(Noisy):
    epoch = -1

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __getitem__(self, index):
        return self.epoch


@pytest.mark.parametrize(("workers", "context"), [(0, ""), *WORKERS])
def test_a_data_set_with_set_epoch_is_told_the_pass_of_each_micro_batch(workers, context):
    """Wherever it is read, and although workers read ahead into the next pass."""
    options = {"multiprocessing_context": context} if workers else {}
    chosen = parse_options({"epoch_end": "short", "sampler": range(20), **options})
    loader = make_loader(Epochs(), (8, 2, 3), list, workers, chosen, Settings(replica="r0", replicas="1"))
    for step, number in ((0, 0), (2, 0), (3, 1), (8, 2), (3, 1)):
        loader.read_ahead(step, range(2))
        assert [loader.fetch(step, i) for i in range(2)] == [[number] * 2] * 2
    loader.close()
    with pytest.raises(ConfigError, match=r'the data set has set_epoch, .*: give workers="processes"'):
        make_loader(
            Epochs(),
            (8, 2, 3),
            list,
            2,
            parse_options({"workers": "threads"}),
            Settings(replica="r0", replicas="1"),
        )


def test_an_error_of_the_data_set_is_raised_where_the_micro_batch_is_needed():
    plan = SamplePlan(40, 8, 2, seed=3)
    damaged = plan.samples(0, 3)[0]
    loader = loader_of(Broken(damaged), plan, workers=1, kind="processes")
    loader.read_ahead(0, SHARE)
    for i in (0, 1, 2):
        assert loader.fetch(0, i) == plan.samples(0, i)
    with pytest.raises(LookupError, match=f"sample {damaged} is damaged"):
        loader.fetch(0, 3)
    loader.read_ahead(1, SHARE)
    assert loader.fetch(1, 0) == plan.samples(1, 0), "the workers go on"
    loader.close()


def test_an_error_in_a_micro_batch_that_another_replica_computes_is_not_raised():
    plan = SamplePlan(40, 8, 2, seed=3)
    loader = loader_of(Broken(plan.samples(1, 0)[0]), plan, workers=1, kind="processes")
    loader.read_ahead(0, [0])
    loader.fetch(0, 0)  # meanwhile the worker reads micro-batch 0 of step 1
    loader.read_ahead(1, [1, 2])
    assert [loader.fetch(1, i) for i in (1, 2)] == [plan.samples(1, i) for i in (1, 2)]
    loader.close()


def test_a_worker_that_dies_raises_as_in_torch():
    loader = loader_for(Dying())
    with pytest.raises(RuntimeError, match=r"DataLoader worker .* (killed|exited)"):
        batches(loader)
    loader.close()


def test_close_ends_the_workers():
    class Named(Noisy):
        def __getitem__(self, index):
            return os.getpid()

    loader = loader_for(Named())
    workers = {pid for batch in batches(loader) for pid in batch}
    assert os.getpid() not in workers
    loader.close()
    assert not any(Path(f"/proc/{pid}").exists() for pid in workers)


def test_the_kernel_ends_a_worker_together_with_its_trainer():
    """The watchdog of torch takes up to five seconds, in which a worker holds the trainer's ports."""

    class Signal(Noisy):
        def __getitem__(self, index):
            number = ctypes.c_int()
            assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(number)) == 0
            return number.value

    loader = loader_for(Signal())
    assert {number for batch in batches(loader) for number in batch} == {signal.SIGKILL}
    loader.close()


def read_in_a_thread() -> None:
    loader = loader_for(Noisy())
    found = []
    thread = threading.Thread(target=lambda: found.append(batches(loader)))
    thread.start()
    thread.join()
    print(len(batches(loader, 1)), len(found[0]))
    loader.close()


def test_workers_that_another_thread_starts_outlive_that_thread():
    """The trainer is a process of its own: a fork takes along what other tests have left, and may crash."""
    done = run_with_torch(__file__, PYTHONPATH=os.pathsep.join(sys.path))
    assert done.stdout == "4 4\n", done.stderr


def test_a_killed_trainer_leaves_no_worker_and_no_shared_memory(tmp_path):
    path = tmp_path / "records"
    path.write_bytes(bytes(range(64)))
    before = set(Path("/dev/shm").iterdir())
    reader, writer = os.pipe()
    words = (str(Path(__file__).parent / "lazy_reader.py"), str(path))
    given = {0: 0, 1: writer, 2: 2}
    trainer = ForkedProcess(address(TORCH), words, given, {**os.environ, "FABRIC_DISABLE": "1"})
    os.close(writer)
    with os.fdopen(reader) as said:
        workers = [int(word) for word in said.readline().split()]
    assert len(workers) == 2 and trainer.pid not in workers
    ends = [os.pidfd_open(pid) for pid in workers]
    trainer.kill()
    trainer.wait()
    for end in ends:
        assert select.select([end], [], [], 60)[0], "a worker outlives its trainer"
        os.close(end)
    left = set(Path("/dev/shm").iterdir()) - before
    assert not [x for x in left if str(trainer.pid) in x.name]


def test_threads_share_the_data_set_where_the_user_says_so():
    loader = loader_for(Noisy(), workers="threads")
    assert [[row[0] for row in batch] for batch in batches(loader)] == [
        loader.plan.samples(0, i) for i in SHARE
    ]
    loader.close()
    with pytest.raises(ConfigError, match='workers is "fibres": it must be "processes" or "threads"'):
        parse_options({"workers": "fibres"})
    with pytest.raises(ConfigError, match="worker_init_fn goes with worker processes"):
        loader_for(Noisy(), workers="threads", worker_init_fn=tell)


if __name__ == "__main__":
    read_in_a_thread()
