"""A replica that catches up steps torch's optimizers in low-priority threads, with the same bits.

User code stays in the main thread.
"""

import threading

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from fabric.ckpt_server.state.training_state import StateDescriber, restore, verify
from fabric.client.loop.replay import LowPrioritySteps
from fabric.runtime import priority
from fabric.runtime.priority import run_low_priority

OPTIMIZERS = {
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.1, momentum=0.9, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
}


@pytest.fixture(autouse=True)
def not_crowded(monkeypatch):
    """Pretend that the host is not crowded, because these tests are about threads, not about load."""
    monkeypatch.setattr(priority, "_waited_s", lambda: 0.0)
    monkeypatch.setattr(run_low_priority, "_waited_s", 0.0)


class Replica:
    """A model, its optimizer, and the threads in which the optimizer has stepped."""

    def __init__(self, make, seed: int = 1) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.Linear(20, 7))
        self.optimizer = make(self.model.parameters())
        self.objects = {"model": self.model, "optimizer": self.optimizer}
        self.threads: list[threading.Thread] = []
        self.optimizer._optimizer_step_code = lambda: self.threads.append(threading.current_thread())

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in self.model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        self.optimizer.step()

    def digest(self, step: int) -> str:
        return StateDescriber(self.objects).capture(step).digest()


def as_file(replica: Replica, step: int) -> memoryview:
    view = StateDescriber(replica.objects).capture(step)
    parts = [
        view.header,
        *(t.contiguous().reshape(-1).view(torch.uint8).numpy().data for _, t in view.tensors),
    ]
    return memoryview(bytearray(b"".join(parts)))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_state_loaded_and_replayed_at_low_priority_equals_the_other_members_bitwise(name):
    veteran, newcomer = Replica(OPTIMIZERS[name]), Replica(OPTIMIZERS[name], seed=2)
    for number in range(3):
        veteran.step(number)
    restore(as_file(veteran, 3), newcomer.objects, run_low_priority)
    verify(newcomer.objects, 3, veteran.digest(3), run_low_priority)
    steps = LowPrioritySteps([newcomer.optimizer])
    for number in range(3, 6):
        veteran.step(number)
        newcomer.step(number)
        assert newcomer.digest(number) == veteran.digest(number)
    steps.close()
    assert len(newcomer.threads) == 3 and threading.current_thread() not in newcomer.threads
    veteran.step(6)
    newcomer.step(6)
    assert newcomer.digest(7) == veteran.digest(7)
    assert newcomer.threads[-1] is threading.current_thread()
    assert "step" not in newcomer.optimizer.__dict__


def test_a_low_priority_operation_uses_as_many_threads_as_in_the_main_thread():
    # torch cuts a large sum by the number of threads, so this number decides the sum's bits.
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert run_low_priority(torch.get_num_threads) == before + 1
    finally:
        torch.set_num_threads(before)


class Own(torch.optim.SGD):
    """A user's optimizer."""


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def in_main_thread(replica: Replica, step) -> bool:
    steps = LowPrioritySteps([replica.optimizer])
    step()
    steps.close()
    (thread,) = replica.threads
    return thread is threading.current_thread()


def test_a_users_optimizer_steps_in_the_main_thread():
    replica = Replica(lambda p: Own(p, lr=0.1))
    assert in_main_thread(replica, lambda: replica.step(0))


def test_a_closure_runs_in_the_main_thread():
    replica, called = Replica(sgd), []

    def closure():
        called.append(threading.current_thread())
        return 0.0

    assert in_main_thread(replica, lambda: replica.optimizer.step(closure))
    assert called == [threading.current_thread()]


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_hooks_run_in_the_main_thread(kind):
    replica, called = Replica(sgd), []
    register = getattr(replica.optimizer, f"register_step_{kind}_hook")
    register(lambda *_: called.append(threading.current_thread()))
    assert in_main_thread(replica, lambda: replica.step(0))
    assert called == [threading.current_thread()]


def test_hooks_of_all_optimizers_run_in_the_main_thread():
    replica, called = Replica(sgd), []
    handle = register_optimizer_step_post_hook(lambda *_: called.append(threading.current_thread()))
    try:
        assert in_main_thread(replica, lambda: replica.step(0))
    finally:
        handle.remove()
    assert called == [threading.current_thread()]


@pytest.mark.parametrize("mode", [lambda: torch.device("cpu"), lambda: torch.autocast("cpu", torch.bfloat16)])
def test_a_mode_of_the_main_thread_holds(mode):
    replica = Replica(sgd)

    def step():
        with mode():
            replica.step(0)

    assert in_main_thread(replica, step)


def test_a_step_that_the_user_has_replaced_runs_in_the_main_thread():
    replica = Replica(sgd)
    replica.optimizer.step = lambda: torch.optim.SGD.step(replica.optimizer)
    own = replica.optimizer.step
    assert in_main_thread(replica, lambda: replica.step(0))
    assert replica.optimizer.step is own


def test_a_scheduler_goes_with_low_priority_steps_and_stays_in_place():
    replica = Replica(sgd)
    scheduler = torch.optim.lr_scheduler.StepLR(replica.optimizer, step_size=1)
    wrapped = replica.optimizer.step
    assert not in_main_thread(replica, lambda: (replica.step(0), scheduler.step()))
    assert replica.optimizer.step is wrapped
    assert replica.optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_scheduler_that_is_made_during_low_priority_steps_goes_on_working():
    replica = Replica(sgd)
    steps = LowPrioritySteps([replica.optimizer])
    scheduler = torch.optim.lr_scheduler.StepLR(replica.optimizer, step_size=1)
    replica.step(0)
    scheduler.step()
    steps.close()
    replica.step(1)
    scheduler.step()
    assert [thread is threading.current_thread() for thread in replica.threads] == [False, True]
    assert replica.optimizer.param_groups[0]["lr"] == pytest.approx(0.001)


def test_an_error_in_a_step_is_raised_where_the_step_was_called():
    replica = Replica(sgd)
    steps = LowPrioritySteps([replica.optimizer])
    replica.optimizer.param_groups[0]["lr"] = None
    with pytest.raises(TypeError):
        replica.step(0)
    steps.close()
