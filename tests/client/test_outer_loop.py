"""Inner and outer steps without processes: schedules, fragments, the mathematics, and mistakes."""

import copy
import queue
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fabric.client
from fabric.client.gradients.exchange_thread import ExchangeThread
from fabric.client.gradients.gradient_backend import HostBackend
from fabric.client.gradients.gradient_slots import GradientSlot, GradientSlots
from fabric.client.outer.outer_loop import (
    GlobalParameters,
    JobRounds,
    OuterSchedule,
    OuterUpdates,
    cut_fragments,
    local_buffers,
    make_outer_loop,
)
from fabric.errors import ConfigError, FabricError
from fabric.ftar.buckets import FlatGradients
from fabric.ftar.reduce_ops import put_together
from fabric.model import Fence
from fabric.protocol.messages import member_events as io
from fabric.runtime.failpoints import Failpoints

ALONE = {"disable": True}


def make_model(seed: int = 1) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 2))


def sgd(model: torch.nn.Module, lr: float = 0.1, **more: float) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, **more)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(number))
    return x, x[:, :2] * 3


def inner_step(model: torch.nn.Module, inner: torch.optim.Optimizer, number: int) -> float:
    x, y = batch(number)
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    inner.step()
    inner.zero_grad()
    return loss.item()


# --- the schedule and the fragments -----------------------------------------------------------------------


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=30), st.data())
def test_fragments_are_consecutive_parameters_and_none_is_empty(sizes, data):
    fragments = data.draw(st.integers(1, len(sizes)))
    chosen = cut_fragments(sizes, fragments)
    assert len(chosen) == len(sizes)
    assert chosen == sorted(chosen)
    assert set(chosen) == set(range(fragments))


def test_fragments_of_equal_parameters_have_equal_sizes():
    assert cut_fragments([4] * 8, 4) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert cut_fragments([8, 1, 1, 8], 2) == [0, 0, 1, 1]


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        ((0,), "every is 0: give a whole number from 1"),
        ((2.5,), "every is 2.5"),
        ((4, 0), "fragments is 0"),
        ((4, 3), "a multiple of fragments"),
        ((4, 1, 4), "delay is 4: give a whole number from 0 to 3"),
        ((4, 2, 2), "from 0 to 1, so that one fragment's exchange ends before the next begins"),
        ((4, 1, -1), "delay is -1"),
        ((4, 1, 0, 1.5), "alpha is 1.5: give a number from 0"),
        ((4, 1, 0, -0.1), "alpha is -0.1"),
        ((4, 1, 0, float("nan")), "alpha is nan"),
    ],
)
def test_a_schedule_that_does_not_fit_is_refused(numbers, words):
    with pytest.raises(ConfigError, match=words):
        OuterSchedule(*numbers)


def test_a_bucket_has_parameters_of_one_fragment_and_is_exchanged_in_its_turn():
    model = make_model()
    fragments = {name: at // 2 for at, (name, _) in enumerate(model.named_parameters())}
    gradients = FlatGradients(model.named_parameters(), fragments=fragments)
    for step in range(4):
        exchanged = {n for b in gradients.buckets if gradients.is_exchanged(b, step) for n, _ in b.parameters}
        assert exchanged == {name for name, number in fragments.items() if number == step % 2}
    whole = FlatGradients(model.named_parameters())
    assert sum(b.end - b.begin for b in gradients.buckets) == sum(b.end - b.begin for b in whole.buckets)
    assert all(whole.is_exchanged(b, step) for b in whole.buckets for step in range(4))


class CountingPlane:
    """A data plane of one member that notes the bytes of each all-reduce."""

    waiting_s: dict[str, float] = {}  # noqa: RUF012
    sending_s: dict[str, float] = {}  # noqa: RUF012

    def __init__(self):
        self.sent: list[int] = []

    def all_reduce(self, epoch, step, source, result, *_, **__):
        put_together(source, result)
        self.sent.append(result.nbytes)


def test_only_the_bytes_of_the_fragment_in_turn_are_exchanged():
    model = make_model()
    fragments = {name: int(not name.startswith("0")) for name, _ in model.named_parameters()}
    gradients, plane = FlatGradients(model.named_parameters(), fragments=fragments), CountingPlane()
    slots = GradientSlots(None, gradients.nbytes, gradients.layout, plane)
    slots._slots = [GradientSlot(0, torch.full((gradients.nbytes,), 7, dtype=torch.uint8), shared=False)]
    slots._prepared = slots._slots[0]
    exchange = ExchangeThread(plane, gradients, slots, Failpoints(""), print, HostBackend())
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    posted: queue.SimpleQueue = queue.SimpleQueue()
    exchange.start(io.StartExchange(Fence("", 1, 1), 1, 1.0), None, posted.put)
    assert isinstance(posted.get(timeout=60), io.Exchanged)
    exchange.close()
    assert plane.sent == [4 * sum(p.numel() + 1 for p in model[2].parameters())]  # and its presence
    gradients.scatter(slots._slots[0].buffer, 1.0)
    assert [p.grad is None or float(p.grad.min()) for p in model.parameters()] == [True, True, 1, 1]


# --- the mathematics --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("delay", "alpha"), [(0, 0.0), (0, 0.5), (1, 0.0), (2, 0.25)])
def test_diloco_alone_is_a_plain_loop(delay, alpha):
    model, plain = make_model(), make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.02)
    outer = sgd(model, 0.7, momentum=0.9, nesterov=True)
    loop = fabric.client.diloco(model, inner, outer, every=3, delay=delay, alpha=alpha, until=8, **ALONE)

    shared = copy.deepcopy(plain)
    plain_inner = torch.optim.AdamW(plain.parameters(), lr=0.02)
    plain_outer = sgd(shared, 0.7, momentum=0.9, nesterov=True)
    number = 0
    while loop.committed_step < 8:
        assert inner_step(model, inner, number) == inner_step(plain, plain_inner, number)
        number += 1
        with torch.no_grad():
            if number % 3 == 0:
                for x, local in zip(shared.parameters(), plain.parameters(), strict=True):
                    x.grad = x - local
            if number > delay and (number - delay) % 3 == 0:
                plain_outer.step()
                for x, local in zip(shared.parameters(), plain.parameters(), strict=True):
                    local.copy_(torch.lerp(local, x, 1 - alpha))
    assert number == 24 + delay
    for ours, x in zip(loop.shared.parameters(), shared.parameters(), strict=True):
        assert torch.equal(ours, x)
    loop.close()
    for ours, x in zip(model.parameters(), shared.parameters(), strict=True):
        assert torch.equal(ours, x), "after close the model has the global parameters"


def test_one_inner_step_and_an_outer_learning_rate_of_one_average_the_parameters():
    models = [make_model(), make_model()]
    sides = [GlobalParameters(model, 1) for model in models]
    for number, model in enumerate(models):
        inner_step(model, sgd(model), number)
    expected = [sum(both) / 2 for both in zip(*(x.parameters() for x in models), strict=True)]
    outers = [sgd(x, 1.0) for x in models]
    for side, outer in zip(sides, outers, strict=True):
        side.move(outer)
        side.set_gradient(0)
    for both in zip(*(x.module.parameters() for x in sides), strict=True):
        average = sum(x.grad for x in both) / 2
        for x in both:
            x.grad = average.clone()
    for side, outer in zip(sides, outers, strict=True):
        outer.step()
        side.load()
    for model in models:
        for x, average in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(x, average)


def test_only_the_fragment_in_turn_and_its_optimizer_state_change():
    model = make_model()
    inner, outer = sgd(model), sgd(model, 0.5, momentum=0.9)
    loop = fabric.client.diloco(model, inner, outer, every=2, fragments=2, until=9, **ALONE)
    parameters = list(loop.shared.parameters())
    before = [x.detach().clone() for x in parameters]
    inner_step(model, inner, 0)
    changed = [not torch.equal(x, y) for x, y in zip(parameters, before, strict=True)]
    assert changed == [True, False, False, False], "the first parameter has more than half of the model"
    assert [x in outer.state for x in parameters] == changed
    inner_step(model, inner, 1)
    assert all(x in outer.state for x in parameters)


def test_the_global_parameters_have_the_names_of_the_model_and_tied_weights_stay_tied():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    model[1].weight = model[0].weight
    model.register_buffer("mask", torch.ones(3))
    model.register_buffer("scratch", torch.ones(3), persistent=False)
    model[0].bias.requires_grad_(False)
    shared = GlobalParameters(model, 2)
    assert list(shared.module.state_dict()) == list(model.state_dict())
    assert shared.module.get_parameter("1.weight") is shared.module.get_parameter("0.weight")
    assert shared.module.get_parameter("0.weight") is not model[0].weight
    assert shared.module.get_parameter("0.bias") is model[0].bias
    assert shared.fragments == {"0.weight": 0, "1.bias": 1}


# --- mistakes ---------------------------------------------------------------------------------------------


def refusal(model, inner, outer, schedule=None, **arguments) -> str:
    with pytest.raises(ConfigError) as error:
        make_outer_loop(model, inner, outer, schedule or OuterSchedule(2), {**ALONE, **arguments})
    return str(error.value)


def test_mistakes_are_named_and_nothing_is_half_applied():
    model, other = make_model(), make_model()
    inner, outer = sgd(model), sgd(model)
    assert "fragments is 5 and the model has 4" in refusal(model, inner, outer, OuterSchedule(5, 5))
    assert "one optimizer" in refusal(model, inner, inner)
    assert "is a float" in refusal(model, inner, 0.7)
    assert "torch.optim.LBFGS" in refusal(model, torch.optim.LBFGS(model.parameters()), outer)
    assert "not trainable in the model" in refusal(model, inner, sgd(other))
    half = torch.optim.SGD(model[0].parameters(), lr=1.0)
    assert "lacks 2.weight" in refusal(model, inner, half)
    assert half.param_groups[0]["params"][0] is model[0].weight
    used = sgd(model, momentum=0.9)
    inner_step(model, used, 0)
    assert "has made steps already" in refusal(model, inner, used)
    for parameter in other.parameters():
        parameter.requires_grad_(False)
    assert "nothing to exchange" in refusal(other, inner, outer)
    spread = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    assert "0.weight is on cpu and 1.weight on meta" in refusal(spread, sgd(spread), sgd(spread))
    assert "until is 0" in refusal(model, inner, outer, until=0)


def test_buffers_that_inner_steps_change_stay_local_only_by_choice():
    model = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.BatchNorm1d(4))
    for buffers in ("refuse", "average"):
        with pytest.raises(ConfigError, match=r"forward changes the buffer '1\.running_mean' in inner steps"):
            local_buffers(model, buffers)
    local_buffers(model, "ignore")


def test_a_mistake_ends_the_process_with_one_sentence(capsys):
    model = make_model()
    with pytest.raises(SystemExit) as end:
        fabric.client.diloco(model, sgd(model), sgd(model), every=0, **ALONE)
    assert end.value.code == 1
    assert capsys.readouterr().err == "fabric: every is 0: give a whole number from 1\n"
    with pytest.raises(SystemExit):
        fabric.client.local_sgd(model, sgd(model), every=4, exchange_every=3, **ALONE)
    assert "exchange_every" in capsys.readouterr().err


def test_a_closure_and_a_loop_that_goes_on_too_long_are_refused():
    model = make_model()
    inner = sgd(model)
    loop = fabric.client.local_sgd(model, inner, every=2, until=1, **ALONE)
    with pytest.raises(FabricError, match="got a closure"):
        inner.step(lambda: torch.zeros(()))
    inner_step(model, inner, 0)
    inner_step(model, inner, 1)
    assert loop.committed_step == 1
    with pytest.raises(FabricError, match="the job ends at outer step 1, which is committed"):
        inner.step()
    loop.close()
    inner_step(model, inner, 2)  # after close the optimizer is the user's own again


# --- the rounds of a job ----------------------------------------------------------------------------------


class ScriptedSession:
    """A session whose orders the test gives; ``given`` has the step and weight of each contribution."""

    def __init__(self) -> None:
        self.loads, self.committed_step, self.drawn = 0, 0, True
        self.orders, self.boundary, self.arrived, self.given = self, [], [], []

    def start_exchanges(self, *_: object) -> None:
        pass

    def reach_boundary(self):
        order = self.boundary.pop(0)
        self.loads += isinstance(order, io.Compute) and order.step > self.committed_step
        self.committed_step = order.step
        return order

    def end_step(self, order):
        self.committed_step = order.step + 1
        replayed = order.prepared is None
        return SimpleNamespace(number=order.step, contributed=order.contributed, replayed=replayed)

    def poll(self):
        return self.arrived.pop(0) if self.arrived else None

    next = poll

    def contribute(self, order, weight: float) -> None:
        self.given.append((order.step, weight))

    def take_drawn(self) -> bool:
        return self.drawn


def committed(step: int, contributed: bool = True, replayed: bool = False):
    return io.Apply(1, step, None if replayed else object(), contributed=contributed, digest=False)


@pytest.fixture
def rounds():
    """The rounds of a model of two fragments, opened at step 0, after an inner step."""
    model = make_model()
    shared, session = GlobalParameters(model, 2), ScriptedSession()
    outer = sgd(model, lr=0.5, momentum=0.9)
    shared.move(outer)
    made = JobRounds(session, OuterUpdates(shared, outer, OuterSchedule(2, 2)))
    made.model, made.shared, made.outer, made.session = model, shared, outer, session
    session.boundary.append(io.Compute(0, (0,)))
    assert made.open() is False and made.is_open
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0
    return made


def local_and_shared(rounds):
    return zip(rounds.model.parameters(), rounds.shared.module.parameters(), strict=True)


def test_inner_steps_without_data_give_no_weight(rounds):
    rounds.session.drawn = False
    rounds.hand_over()
    assert rounds.session.given == [(0, 0.0)]


@pytest.mark.parametrize(
    ("drops", "loads", "step", "weight"),
    [(True, 0, 0, 1.0), (False, 0, 0, 0.0), (True, 1, 0, 0.0), (True, 0, 1, 0.0)],
    ids=["dropped", "kept", "of a replaced state", "of another step"],
)
def test_a_redone_round_gets_the_pseudo_gradient_again_only_where_it_was_dropped(
    rounds, drops, loads, step, weight
):
    rounds.hand_over()
    if drops:
        rounds.outer.zero_grad(set_to_none=True)
    rounds.session.loads += loads
    rounds.session.arrived = [io.Compute(step, (0,))]
    assert not rounds.poll()
    assert rounds.session.given == [(0, 1.0), (step, weight)]
    assert rounds.shared.has_gradient == (weight > 0 or not drops)


def test_the_pseudo_gradient_points_from_the_local_to_the_global_parameters(rounds):
    rounds.hand_over()
    given = [x.grad for x in rounds.shared.module.parameters() if x.grad is not None]
    assert given and all(torch.allclose(x, torch.full_like(x, -1.0)) for x in given)


def test_a_commit_moves_its_fragment_alone_and_leaves_no_gradient(rounds):
    rounds.hand_over()
    for parameter in rounds.shared.module.parameters():
        parameter.grad = torch.ones_like(parameter)  # as after an exchange with another fragment's remains
    rounds.session.arrived = [committed(0)]
    rounds.commit()
    moved = {id(x) for x, state in rounds.outer.state.items() if state}
    assert 0 < len(moved) < len(list(rounds.shared.module.parameters()))
    assert not rounds.shared.has_gradient
    assert any(not torch.equal(a, b) for a, b in local_and_shared(rounds)), "the other fragment stays local"


def test_a_replica_that_gave_nothing_begins_from_the_global_parameters(rounds):
    rounds.hand_over()
    rounds.session.arrived = [committed(0, contributed=False)]
    rounds.commit()
    assert all(torch.equal(a, b) for a, b in local_and_shared(rounds))


def test_a_loaded_state_replaces_the_local_parameters(rounds):
    rounds.session.boundary.append(io.Compute(3, (0,)))
    assert rounds.open() is True
    assert all(torch.equal(a, b) for a, b in local_and_shared(rounds))


def test_a_replica_that_fell_behind_opens_the_next_round_at_once(rounds):
    rounds.hand_over()
    rounds.session.arrived = [committed(0, contributed=False, replayed=True)]
    assert rounds.poll(), "it fell behind"
    rounds.session.boundary.append(io.Compute(1, (0,)))
    rounds.commit()
    assert rounds.is_open


def test_alpha_is_the_share_of_the_local_parameters():
    model = make_model()
    shared = GlobalParameters(model, 1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 1.0
    shared.load(0, alpha=0.25)
    for local, other in zip(model.parameters(), shared.module.parameters(), strict=True):
        assert torch.allclose(local - other, torch.full_like(local, 0.25), atol=1e-6)
