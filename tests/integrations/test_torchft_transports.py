"""torchft's transports over a real checkpoint server: sent, received elsewhere, withdrawn, refused."""

from datetime import timedelta

import pytest
import torch
from forked_processes import run_with_torch

from fabric.errors import FabricError, StateError
from fabric.integrations.torchft import HTTPTransport, PGTransport, ProcessGroupGloo

WAIT = timedelta(seconds=30)
RECEIVER = """
import sys
from datetime import timedelta
from fabric.integrations.torchft import HTTPTransport
state = HTTPTransport(timedelta(seconds=30), num_chunks=0).recv_checkpoint(
    src_rank=0, metadata=sys.argv[1], step=7, timeout=timedelta(seconds=30)
)
print(state["model"]["weight"].sum().item(), state["steps"], state["pair"])
"""


def state(value: float) -> dict:
    return {"model": {"weight": torch.full((300, 20), value)}, "steps": [1, 2], "pair": (True, None)}


@pytest.fixture(autouse=True)
def settings(monkeypatch):
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://127.0.0.1:9")  # no process listens there, or is asked
    monkeypatch.setenv("FABRIC_REPLICA", "r0")
    monkeypatch.delenv("FABRIC_TOKEN_FILE", raising=False)


@pytest.fixture(params=["http", "group"])
def sender(request):
    group = PGTransport(ProcessGroupGloo(), WAIT, torch.device("cpu"))
    made = HTTPTransport(WAIT, num_chunks=4) if request.param == "http" else group
    yield made
    made.shutdown()


@pytest.mark.parametrize("sender", ["http"], indirect=True)
def test_another_process_receives_the_state_of_the_step(sender):
    sender.send_checkpoint([1], 7, state(0.5), WAIT)
    done = run_with_torch("-c", RECEIVER, sender.metadata())
    assert done.stdout == "3000.0 [1, 2] (True, None)\n", done.stderr


def test_the_next_state_replaces_the_last_and_a_withdrawn_one_is_gone(sender):
    for step in (7, 8, 9):
        sender.send_checkpoint([1, 2], step, state(float(step)), WAIT)
    received = sender.recv_checkpoint(0, sender.metadata(), 9, WAIT)
    assert torch.equal(received["model"]["weight"], state(9.0)["model"]["weight"])
    with pytest.raises(FabricError):
        sender.recv_checkpoint(0, sender.metadata(), 7, WAIT)
    sender.disallow_checkpoint()
    with pytest.raises(FabricError):
        sender.recv_checkpoint(0, sender.metadata(), 9, WAIT)


def test_the_state_is_a_copy(sender):
    sent = state(1.0)
    sender.send_checkpoint([1], 7, sent, WAIT)
    sent["model"]["weight"].zero_()
    received = sender.recv_checkpoint(0, sender.metadata(), 7, WAIT)
    assert received["model"]["weight"].min() == 1.0


def test_a_value_that_cannot_be_sent_is_named(sender):
    with pytest.raises(StateError, match=r"state\.value\.open is a"):
        sender.send_checkpoint([1], 7, {"open": object()}, WAIT)


def test_a_sender_that_is_gone_is_one_sentence(sender):
    with pytest.raises(FabricError, match="does not answer") as error:
        sender.recv_checkpoint(0, "http://127.0.0.1:9", 7, WAIT)
    assert "\n" not in str(error.value)
