"""The trainer's side of a snapshot, with a real server: when the state may change, and what is served."""

import threading

import pytest
import torch
from server_support import fetch

from fabric.ckpt_server.copying import Copying
from fabric.ckpt_server.snapshot import CpuCopier
from fabric.ckpt_server.state import capture
from fabric.client.snapshot_policy import EverySteps
from fabric.client.snapshots import Snapshots
from fabric.client.worker import Worker
from fabric.errors import StateError

NAME = "model/weight"


def crash(error):
    raise error


@pytest.fixture
def keeper():
    worker = Worker("keeper", crash)
    yield worker
    worker.close(within_s=20)


@pytest.fixture
def model():
    return torch.nn.Linear(1000, 3000)


@pytest.fixture
def taken(attach, model):
    """A trainer's snapshots, and the server that serves them."""
    copier = CpuCopier()
    handle = attach()
    yield (
        Snapshots(handle, {"model": model}, copier, EverySteps(1), ("job", "r0"), False, lambda: None),
        handle,
    )
    copier.close()


@pytest.fixture
def slow(monkeypatch):
    """No block is copied before the event is set."""
    go, take = threading.Event(), Copying._take

    def wait(self, block):
        assert go.wait(30)
        take(self, block)

    monkeypatch.setattr(Copying, "_take", wait)
    yield go
    go.set()


def test_the_state_of_the_boundary_is_served_and_the_next_may_begin(taken, keeper, model):
    snapshots, handle = taken
    said, done = [], threading.Event()
    for step in (4, 5):
        done.clear()
        expected = capture({"model": model}, step).digest()
        snapshots.start(step, 1, keeper.submit, lambda event: (said.append(event), done.set()))
        snapshots.wait_copied()
        with torch.no_grad():
            model.weight.add_(1.0)
        assert done.wait(30)
        assert (said[-1].step, said[-1].digest) == (step, expected)
    listed = fetch(handle.url, "/v1/snapshots").json
    assert [(s["step"], s["digest"]) for s in listed] == [(event.step, event.digest) for event in said]


def test_the_trainer_is_held_back_until_its_state_is_read(taken, keeper, model, slow):
    snapshots, _ = taken
    snapshots.start(1, 1, keeper.submit, lambda event: None)
    passed = threading.Event()
    trainer = threading.Thread(target=lambda: (snapshots.wait_copied(), passed.set()))
    trainer.start()
    assert not passed.wait(0.2)
    slow.set()
    assert passed.wait(30)
    trainer.join()


def test_a_state_that_changes_while_it_is_copied_is_refused_by_name_and_not_served(
    taken, keeper, model, slow
):
    snapshots, handle = taken
    said, done = [], threading.Event()
    snapshots.start(1, 1, keeper.submit, lambda event: (said.append(event), done.set()))
    with torch.no_grad():
        model.weight[0, 0] += 1.0
    slow.set()
    with pytest.raises(StateError, match=f"{NAME} changed while forward and backward ran"):
        snapshots.wait_copied()
    assert done.wait(30) and said[0].digest == ""
    assert fetch(handle.url, "/v1/snapshots").json == []
