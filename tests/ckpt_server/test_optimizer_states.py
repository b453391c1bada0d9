"""Optimizer states of any shape: capture, load and capture again is the identity, bit by bit."""

import copy
import random
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.ckpt_server.state.optimizer_extras import remember
from fabric.ckpt_server.state.training_state import StateView, capture, host_bytes, restore
from fabric.errors import StateError

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool)


def to_bytes(view: StateView) -> bytearray:
    return bytearray(b"".join([view.header, *(bytes(host_bytes(tensor)) for _, tensor in view.tensors)]))


class Plain(torch.optim.Optimizer):
    """Keeps whatever state it is given."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        raise NotImplementedError


def parameters(count=3, seed=0):
    torch.manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(4, 2).to(torch.bfloat16)) for _ in range(count)]


def model_of(*params):
    return torch.nn.ParameterList(params)


@st.composite
def tensors(draw):
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    values = torch.randn(shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))) * 9
    return values.abs().to(draw(st.sampled_from(DTYPES)))


KEYS = st.one_of(st.integers(-2, 5), st.sampled_from(["GG", "step", "exp_avg", "$x", "a/b"]))
LEAVES = st.one_of(
    tensors(),
    tensors(),
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=True),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.builds(lambda n: np.arange(n, dtype=np.float32), st.integers(0, 3)),
    st.just(torch.Size([2, 3])),
    st.frozensets(st.integers(0, 3), max_size=3),
)


def containers(children):
    return st.one_of(
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.lists(children, max_size=3).map(lambda items: deque(items, maxlen=4)),
        st.dictionaries(KEYS, children, max_size=3),
        st.dictionaries(KEYS, children, max_size=3).map(OrderedDict),
        st.dictionaries(KEYS, children, max_size=3).map(lambda d: defaultdict(list, d)),
        st.dictionaries(KEYS, st.integers(), max_size=3).map(Counter),
    )


STATES = st.dictionaries(
    st.sampled_from(["step", "GG", "Q", "exp_avg", "qmap"]),
    st.recursive(LEAVES, containers, max_leaves=8),
    max_size=4,
)


@settings(max_examples=150, deadline=None)
@given(st.lists(STATES, min_size=3, max_size=3), st.booleans())
def test_any_nested_state_of_bfloat16_parameters_is_loaded_bit_for_bit(states, has_state_already):
    source, target = Plain(parameters()), Plain(parameters())
    for parameter, state in zip(source.param_groups[0]["params"], states, strict=True):
        if state:  # an optimizer makes the state of some parameters only
            source.state[parameter] = copy.deepcopy(state)
    if has_state_already:
        first = target.param_groups[0]["params"][0]
        target.state[first] = {"other": [torch.ones(2)]}
    view = capture({"optimizer": source}, 5)
    assert restore(memoryview(to_bytes(view)), {"optimizer": target}) == 5
    assert to_bytes(capture({"optimizer": target}, 5)) == to_bytes(view)


class RefusesOnce(torch.nn.Linear):
    """A module, which is loaded after the optimizer, that refuses its state the first time."""

    refuses = True

    def load_state_dict(self, *arguments, **options):
        if self.refuses:
            self.refuses = False
            raise ValueError("not today")
        return super().load_state_dict(*arguments, **options)


def filled(fill):
    optimizer = Plain(parameters())
    remember(optimizer)
    optimizer.total = torch.full((2,), fill)
    for parameter in optimizer.param_groups[0]["params"]:
        nested = [torch.full((3,), fill), {"Q": (torch.full((2,), fill),)}]
        optimizer.state[parameter] = {"GG": nested, "kind": "soap"}
    return optimizer


def test_a_refused_load_leaves_nested_state_as_it_was():
    objects = {"model": RefusesOnce(1, 1), "optimizer": filled(2.0)}
    before = to_bytes(capture(objects, 0))
    file = to_bytes(capture({"model": torch.nn.Linear(1, 1), "optimizer": filled(1.0)}, 1))
    with pytest.raises(StateError, match="nothing was loaded"):
        restore(memoryview(file), objects)
    assert to_bytes(capture(objects, 0)) == before


# --- what lies beside ``state`` ---------------------------------------------------------------------


def twins(make):
    """Two optimizers over equal models, as two replicas attach them."""
    pairs = []
    for _ in range(2):
        model = model_of(*parameters())
        optimizer = make(model)
        remember(optimizer, model.named_parameters())
        pairs.append((model, optimizer))
    return pairs


def move(source, target, names=("optimizer",)):
    file = to_bytes(capture(dict.fromkeys(names, source), 3))
    restore(memoryview(file), dict.fromkeys(names, target))
    assert to_bytes(capture(dict.fromkeys(names, target), 3)) == file


class Annealed(Plain):
    """Its number of steps, a running norm, a list and a generator are attributes."""

    def __init__(self, params):
        super().__init__(params)
        self.done, self.rank, self.norms, self.history = 0, random.randrange(10**9), torch.zeros(2), [0.5]
        self.noise = torch.Generator().manual_seed(1)

    def step(self, closure=None):
        self.done += 1
        self.norms += torch.rand(2, generator=self.noise)
        self.history.append(float(self.done))


def test_numbers_tensors_and_generators_that_change_are_shared():
    (_, source), (_, target) = twins(lambda model: Annealed(model.parameters()))
    rank, norms, noise = target.rank, target.norms, target.noise
    for _ in range(3):
        source.step()
    move(source, target)
    assert (target.done, target.history) == (3, source.history)
    assert target.rank == rank, "an attribute that stays is each process's own"
    assert target.norms is norms, "user code may refer to the tensor"
    assert target.noise is noise
    source.step()
    target.step()
    assert torch.equal(source.norms, target.norms)


def test_an_older_state_takes_attributes_back_to_their_first_values():
    (_, source), (_, target) = twins(lambda model: Annealed(model.parameters()))
    target.step()
    move(source, target)
    assert (target.done, target.history) == (0, [0.5])
    assert torch.equal(target.norms, torch.zeros(2))


def test_an_unchanged_optimizer_has_the_bytes_of_torchs_own_state_dict():
    model = model_of(*parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    without = to_bytes(capture({"optimizer": optimizer}, 1))
    remember(optimizer, model.named_parameters())
    assert to_bytes(capture({"optimizer": optimizer}, 1)) == without


class Sam(torch.optim.Optimizer):
    """As published: the inner optimizer's state is not in ``state_dict``."""

    def __init__(self, params, base, **options):
        super().__init__(params, dict(options))
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
        self.base_optimizer.step()

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


class Lookahead(torch.optim.Optimizer):
    """As published: it shares the inner optimizer's groups, and writes both states by itself."""

    def __init__(self, optimizer, k=2):
        self.optimizer, self.k = optimizer, k
        super().__init__(optimizer.param_groups, {})
        self.param_groups = optimizer.param_groups
        self.slow = {}
        self.fast_state = optimizer.state
        for group in self.param_groups:
            group["counter"] = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.optimizer.step()
        for group in self.param_groups:
            group["counter"] += 1
            for p in group["params"]:
                slow = self.state[p].setdefault("slow", p.detach().float().clone())
                if group["counter"] % self.k == 0:
                    slow += (p.float() - slow) * 0.5
                    p.copy_(slow)

    def state_dict(self):
        fast = self.optimizer.state_dict()
        return {
            "state": fast["state"],
            "slow": super().state_dict()["state"],
            "param_groups": fast["param_groups"],
        }

    def load_state_dict(self, state_dict):
        groups = state_dict["param_groups"]
        super().load_state_dict({"state": state_dict["slow"], "param_groups": groups})
        self.optimizer.load_state_dict({"state": state_dict["state"], "param_groups": groups})
        self.fast_state = self.optimizer.state


def train(model, optimizer, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        optimizer.step()


@pytest.mark.parametrize(
    "make",
    [
        lambda model: Sam(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9),
        lambda model: Sam(model.parameters(), torch.optim.AdamW, lr=0.1),
        lambda model: Lookahead(torch.optim.AdamW(model.parameters(), lr=0.1)),
        lambda model: Lookahead(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)),
    ],
    ids=["SAM over SGD", "SAM over AdamW", "Lookahead over AdamW", "Lookahead over SGD"],
)
def test_a_wrapper_goes_on_as_the_one_it_was_loaded_from(make):
    (model, source), (other, target) = twins(make)
    schedules = [torch.optim.lr_scheduler.StepLR(x, 1, 0.5) for x in (source, target)]
    train(model, source, 3, seed=1)
    file = to_bytes(capture({"model": model, "optimizer": source, "scheduler": schedules[0]}, 3))
    objects = {"model": other, "optimizer": target, "scheduler": schedules[1]}
    restore(memoryview(file), objects)
    for schedule in schedules:
        schedule.step()
    for each, optimizer in ((model, source), (other, target)):
        train(each, optimizer, 3, seed=2)
    assert to_bytes(capture(objects, 9)) == to_bytes(
        capture({"model": model, "optimizer": source, "scheduler": schedules[0]}, 9)
    ), "the learning rate that the schedule set reached the inner optimizer"


# --- groups in mid-training -----------------------------------------------------------------------------


def partly(model):
    return torch.optim.SGD([model[2]], lr=0.1, momentum=0.9)


def test_a_newcomer_gets_the_groups_that_were_added_in_mid_training():
    (model, source), (other, target) = twins(partly)
    train(model, source, 2, seed=1)
    source.add_param_group({"params": [model[0], model[1]], "lr": 0.01})
    train(model, source, 2, seed=2)
    assert len(target.param_groups) == 1
    move(source, target)
    assert [group["lr"] for group in target.param_groups] == [0.1, 0.01]
    assert [p is q for p, q in zip(target.param_groups[1]["params"], [other[0], other[1]], strict=True)] == [
        True
    ] * 2


def test_a_parameter_that_was_added_to_a_group_is_added_to_it():
    (model, source), (other, target) = twins(partly)
    source.param_groups[0]["params"].append(model[0])
    train(model, source, 2, seed=2)
    move(source, target)
    assert target.param_groups[0]["params"][1] is other[0]


def test_an_older_state_takes_an_added_group_away():
    (model, source), (other, target) = twins(partly)
    train(model, source, 1, seed=1)
    target.add_param_group({"params": [other[0]]})
    train(other, target, 2, seed=2)
    move(source, target)
    assert len(target.param_groups) == 1


def test_a_group_of_parameters_outside_the_model_is_refused_where_it_cannot_be_made():
    (_, source), (_, target) = twins(partly)
    source.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    file = to_bytes(capture({"optimizer": source}, 3))
    with pytest.raises(StateError, match="got in mid-training has the parameter outside the model"):
        restore(memoryview(file), {"optimizer": target})
    assert len(target.param_groups) == 1
