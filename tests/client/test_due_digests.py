"""A digest of the state is due from the first other replica on, because members compare digests."""

from types import SimpleNamespace

import pytest
import torch

from fabric.ckpt_server.state.training_state import StateDescriber
from fabric.client.gradients.gradient_backend import HostBackend
from fabric.client.loop.local_state import LocalState, LoopProgress
from fabric.client.process.journal import Journal


def state(begun: list[int], **engine) -> LocalState:
    """``engine``: what the engine says. ``begun`` gets the steps whose digest was begun beside user code."""
    parts = SimpleNamespace(
        describer=StateDescriber({"model": torch.nn.Linear(3, 5)}),
        gradients=None,
        process=SimpleNamespace(group=None, rank=0),
        exchange=SimpleNamespace(backend=HostBackend(), lanes=None),
        snapshots=SimpleNamespace(
            content=None,
            is_due=lambda *_: False,
            begin_digest=lambda step, _: begun.append(step),
        ),
        snapshot_worker=SimpleNamespace(submit=None),
        durable=SimpleNamespace(is_due=lambda *_: False),
        settings=SimpleNamespace(digest_steps=10),
        journal=Journal(None, "r0", 1),
    )
    said = SimpleNamespace(generation=1, epoch=1, current=None, member=None, **engine)
    return LocalState(parts, said, LoopProgress(state_step=20))


@pytest.mark.parametrize("has_met", [False, True])
def test_a_replica_that_has_met_no_other_one_takes_no_digest(has_met):
    begun: list[int] = []
    assert state(begun, may_be_asked=lambda: has_met).reach_boundary() == ("", has_met)
    assert begun == ([20] if has_met else [])


@pytest.mark.parametrize("change", ["behind", "first"])
def test_the_first_state_and_one_that_was_loaded_are_digested_all_the_same(change):
    own = state([], may_be_asked=lambda: False)
    if change == "behind":
        own._progress.behind = True
    else:
        own._engine.generation = own._engine.epoch = 0
    digest, later = own.reach_boundary()
    assert digest == own.digest() and not later
