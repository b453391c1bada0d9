"""A repeated capture describes the state exactly as a first capture would."""

import math
from collections import OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch

from fabric.ckpt_server.state import training_state
from fabric.ckpt_server.state.training_state import StateDescriber, capture, host_bytes, record_structure
from fabric.errors import StateError


class Holder:
    """Shared state that consists of one value."""

    def __init__(self, value):
        self.value = value

    def state_dict(self):
        return self.value

    def load_state_dict(self, value):
        self.value = value


def training():
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def step(objects):
    objects["model"](torch.rand(5, 4)).sum().backward()
    objects["optimizer"].step()
    objects["scheduler"].step()


def same(describer, number):
    """The cached description gives the same file as a new one, with the same tensors."""
    again, anew = describer.capture(number), capture(describer.objects, number)
    assert again.header == anew.header
    assert again.nbytes == anew.nbytes and again.digest() == anew.digest()
    assert [name for name, _ in again.tensors] == [name for name, _ in anew.tensors]
    for (_, one), (_, other) in zip(again.tensors, anew.tensors, strict=True):
        assert bytes(host_bytes(one)) == bytes(host_bytes(other))
    return again


@pytest.fixture
def encoded(monkeypatch):
    """Return the paths that the capture encodes, in order."""
    paths, encode = [], training_state.encode

    def note(value, path, blobs, ties=None):
        paths.append(path.blob)
        return encode(value, path, blobs, ties)

    monkeypatch.setattr(training_state, "encode", note)
    return paths


def test_after_the_first_step_only_settings_of_the_optimizer_are_described_again(encoded):
    objects = training()
    step(objects)
    describer = StateDescriber(objects)
    same(describer, 1)
    for number in (2, 3):
        step(objects)
        same(describer, number)
    encoded.clear()
    describer.capture(3)
    assert encoded == []
    step(objects)
    describer.capture(4)
    told = {path for path in encoded if not path.startswith("scheduler/")}
    assert told == {"optimizer/param_groups"}


def test_an_optimizer_that_gets_its_state_after_the_first_step_is_described(encoded):
    objects = training()
    describer = StateDescriber(objects)
    before = same(describer, 0)
    step(objects)
    assert len(same(describer, 1).tensors) > len(before.tensors)


def replace_data(model):
    model[0].weight.data = model[0].weight.data.clone()


def transpose_data(model):
    model[0].weight.data = model[0].weight.data.t().contiguous().t()


def shrink(model):
    model[0].bias.data.resize_(2)


def add(model):
    model.register_buffer("more", torch.arange(3))


def tie(model):
    model[2].bias.data = model[0].bias.data[:2]
    model[2].register_parameter("again", model[2].bias)


def widen(model):
    model[0].weight.data = model[0].weight.data.double()


@pytest.mark.parametrize("change", [replace_data, transpose_data, shrink, add, tie, widen])
def test_the_buffers_that_forward_changes_in_a_model(change):
    model = training()["model"]
    describer = StateDescriber({"model": model})
    same(describer, 1)
    change(model)
    same(describer, 2)
    with torch.no_grad():
        model[0].weight.add_(1)
    same(describer, 3)


VALUES = [
    {"a": 1, "b": [1.5, None, "x", (2, False)]},
    {"a": True, "b": [1.5, None, "x", (2, False)]},
    {"a": 1.0, "b": [1.5, None, "x", (2, 0)]},
    {"a": 1.0, "b": [1.5, None, "x", [2, 0]]},
    {"a": 0.0},
    {"a": -0.0},
    {"a": math.inf},
    {"a": math.nan},
    {"a": None},
    {"a": ""},
    {"0": 1},
    {0: 1},
    {"$a": 1},
    {"b": {"$a": 1}},
    OrderedDict(a=1, b=2),
    OrderedDict(b=2, a=1),
    {"a": defaultdict(list, x=[1]), "b": deque([1], maxlen=2), "c": {1, 2}, "d": np.arange(3)},
    {"a": defaultdict(list, x=[2]), "b": deque([1], maxlen=3), "c": {1, 3}, "d": np.arange(4)},
    {"a": torch.zeros(2, 3), "b": torch.zeros(0), "c": torch.tensor(1)},
    {"a": torch.zeros(3, 2), "b": torch.zeros(0, 1), "c": torch.tensor(1.0)},
    {
        "a": torch.zeros(3, 2).t(),
        "c": torch.tensor(1 + 1j).conj(),
        "d": torch.zeros(2, dtype=torch.complex64),
    },
    {},
    [],
    "text",
]


def test_the_description_is_right_after_any_change_of_value():
    holder = Holder(None)
    describer = StateDescriber({"a": Holder({"same": torch.ones(3)}), "x": holder})
    for one in VALUES:
        for other in VALUES:
            for value in (one, other):
                holder.value = value
                same(describer, 1)


def test_objects_in_containers_are_described_at_every_capture():
    inner = {"list": [1, {"deep": 2}]}
    describer = StateDescriber({"x": Holder({"a": inner})})
    same(describer, 1)
    inner["list"][1]["deep"] = 3
    same(describer, 2)
    inner["list"].append(torch.ones(1))
    same(describer, 3)


def test_an_indescribable_value_is_refused_at_every_capture_and_its_successor_is_described():
    holder = Holder({"a": 1})
    describer = StateDescriber({"x": holder})
    same(describer, 1)
    for _ in range(2):
        holder.value = {"a": object()}
        with pytest.raises(StateError, match=r"x\.a is a builtins\.object"):
            describer.capture(2)
    holder.value = {"a": 1, "b": torch.ones(2)}
    same(describer, 3)


def test_no_tensor_is_kept_alive_between_captures():
    import weakref

    holder = Holder({"a": torch.ones(3)})
    describer = StateDescriber({"x": holder})
    describer.capture(1)
    gone = weakref.ref(holder.value["a"].untyped_storage())
    holder.value = {"a": torch.ones(3)}
    assert gone() is None


def test_a_view_keeps_the_memory_that_it_describes():
    holder = Holder({"a": torch.ones(3)})
    describer = StateDescriber({"x": holder})
    describer.capture(1)
    view = describer.capture(2)
    holder.value["a"].data = torch.zeros(3)
    assert view.tensors[0][1].tolist() == [1, 1, 1]


def test_arrays_sets_and_deep_lists_are_not_cached():
    for value in (np.ones(2), {1, 2}, {"a": object()}, {(1,): 2}, math.nan, torch.zeros(2, 3).t()):
        assert not record_structure(value, [], [])
    deep = []
    for _ in range(50):
        deep = [deep]
    assert not record_structure(deep, [], [])
