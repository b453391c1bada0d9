"""States of real modules and optimizers load bit for bit, or change nothing at all."""

import copy
import io
import json

import pytest
import safetensors.torch
import torch
from torch.optim import lr_scheduler

from fabric.ckpt_server.format.manifest import file_digest
from fabric.ckpt_server.format.safetensors_file import read_preamble
from fabric.ckpt_server.state.training_state import (
    StateView,
    capture,
    check_serialisable,
    host_bytes,
    restore,
    verify,
)
from fabric.errors import IntegrityError, StateError


def to_bytes(view: StateView) -> bytearray:
    file = bytearray(view.header)
    for _, tensor in view.tensors:
        file += host_bytes(tensor)
    assert len(file) == view.nbytes
    return file


class Net(torch.nn.Module):
    """Tied weights, buffers, an odd dtype and a channels-last convolution."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(11, width)
        self.norm = torch.nn.BatchNorm1d(width)
        self.conv = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)
        self.head = torch.nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.embed(tokens))
        y = self.conv(torch.ones(1, 2, 4, 4)).mean()
        return self.head(x).sum() * 0.1 + y


def make(seed: int, width: int = 6, optimizer=torch.optim.AdamW, **options) -> dict:
    torch.manual_seed(seed)
    model = Net(width)
    opt = optimizer(model.parameters(), **({"lr": 1e-2} | options))
    schedule = lr_scheduler.LambdaLR(opt, lambda step: 0.9**step)
    ema = torch.optim.swa_utils.AveragedModel(model)
    return {"model": model, "optimizer": opt, "scheduler": schedule, "ema": ema}


def train(objects: dict, steps: int, seed: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        loss = objects["model"](torch.randint(0, 11, (5,), generator=generator))
        loss.backward()
        objects["optimizer"].step()
        objects["optimizer"].zero_grad()
        objects["scheduler"].step()
        objects["ema"].update_parameters(objects["model"])


def test_restored_replica_goes_on_bit_for_bit() -> None:
    veteran, joiner = make(1), make(2)
    train(veteran, 3)
    view = capture(veteran, 3)
    assert restore(memoryview(to_bytes(view)), joiner) == 3
    verify(joiner, 3, view.digest())
    train(veteran, 2, seed=9)
    train(joiner, 2, seed=9)
    assert capture(veteran, 5).digest() == capture(joiner, 5).digest()
    assert joiner["model"].head.weight is joiner["model"].embed.weight
    step = next(iter(joiner["optimizer"].state.values()))["step"]
    assert step.dtype == torch.float32
    assert float(step) == 5.0


def test_digest_sees_the_step_every_tensor_and_every_number() -> None:
    objects = make(1)
    train(objects, 1)
    seen = {capture(objects, 1).digest(), capture(objects, 2).digest()}
    with torch.no_grad():
        objects["model"].norm.running_mean[0] += 1e-7
    seen.add(capture(objects, 1).digest())
    objects["scheduler"].last_epoch += 1
    seen.add(capture(objects, 1).digest())
    next(iter(objects["optimizer"].state.values()))["step"] += 1
    seen.add(capture(objects, 1).digest())
    assert len(seen) == 5


def test_file_is_valid_safetensors_aligned_and_its_digest_the_live_one() -> None:
    objects = make(4)
    train(objects, 2)
    view = capture(objects, 2)
    file = to_bytes(view)
    loaded = safetensors.torch.load(bytes(file))
    assert torch.equal(loaded["model/conv.weight"], objects["model"].conv.weight)
    assert set(loaded) == {name for name, _ in view.tensors}
    header = read_preamble(memoryview(file))
    assert header.nbytes % 64 == 0
    sizes = {"F32": 4, "I64": 8}
    assert all(span.begin % sizes.get(span.dtype, 1) == 0 for span in header.tensors)
    assert file_digest(memoryview(file)) == view.digest()
    # this parameter is tied to the embedding, and the file stores it once
    assert "head.weight" not in "".join(loaded)


def test_equal_states_are_equal_bytes_whatever_order_dicts_were_filled_in() -> None:
    class Holder:
        def __init__(self, value: dict) -> None:
            self.value = value

        def state_dict(self) -> dict:
            return self.value

        def load_state_dict(self, value: dict) -> None:
            self.value = value

    one = {"b": 1, "a": {2: torch.ones(2), 1: torch.zeros(1)}}
    two = {"a": {1: torch.zeros(1), 2: torch.ones(2)}, "b": 1}
    assert to_bytes(capture({"x": Holder(one)}, 0)) == to_bytes(capture({"x": Holder(two)}, 0))


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.Adam, {"amsgrad": True}),
        (torch.optim.AdamW, {"fused": True}),
        (torch.optim.AdamW, {"foreach": True}),
        (torch.optim.AdamW, {"lr": torch.tensor(1e-2)}),
        (torch.optim.Adafactor, {}),
        (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
        (torch.optim.Adagrad, {}),
        (torch.optim.NAdam, {}),
        (torch.optim.ASGD, {}),
        (torch.optim.Rprop, {}),
    ],
)
def test_optimizers_start_from_nothing(optimizer, options: dict) -> None:
    veteran = make(1, optimizer=optimizer, **copy.deepcopy(options))
    train(veteran, 2)
    view = capture(veteran, 2)
    joiner = make(2, optimizer=optimizer, **copy.deepcopy(options))
    restore(memoryview(to_bytes(view)), joiner)
    verify(joiner, 2, view.digest())
    train(veteran, 1, seed=5)
    train(joiner, 1, seed=5)
    assert capture(veteran, 3).digest() == capture(joiner, 3).digest()


def test_lbfgs_state_with_lists_of_tensors() -> None:
    def build(seed: int) -> dict:
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 1)
        return {"model": model, "optimizer": torch.optim.LBFGS(model.parameters(), max_iter=3)}

    veteran, joiner = build(1), build(2)

    def closure() -> torch.Tensor:
        veteran["optimizer"].zero_grad()
        loss = veteran["model"](torch.ones(2, 3)).pow(2).sum()
        loss.backward()
        return loss

    veteran["optimizer"].step(closure)
    view = capture(veteran, 1)
    restore(memoryview(to_bytes(view)), joiner)
    verify(joiner, 1, view.digest())


def test_float32_averages_beside_bfloat16_parameters_keep_their_bits() -> None:
    class Mixed(torch.optim.Optimizer):
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p].setdefault("master", p.detach().float() + 1e-4)

    def build() -> dict:
        model = torch.nn.Linear(3, 3).to(torch.bfloat16)
        return {"model": model, "optimizer": Mixed(model.parameters(), {})}

    veteran, joiner = build(), build()
    veteran["optimizer"].step()
    view = capture(veteran, 1)
    restore(memoryview(to_bytes(view)), joiner)
    assert next(iter(joiner["optimizer"].state.values()))["master"].dtype == torch.float32
    verify(joiner, 1, view.digest())


@pytest.mark.parametrize(
    "build",
    [
        lambda o: lr_scheduler.MultiStepLR(o, [1, 3]),
        lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
        lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
        lambda o: lr_scheduler.SequentialLR(
            o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [2]
        ),
        lambda o: lr_scheduler.ChainedScheduler(
            [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
        ),
        lambda o: torch.optim.swa_utils.SWALR(o, 0.05),
    ],
)
def test_schedulers_are_restored(build) -> None:
    def setup() -> dict:
        optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        return {"optimizer": optimizer, "scheduler": build(optimizer)}

    def step(objects: dict) -> None:
        objects["optimizer"].step()
        if isinstance(objects["scheduler"], lr_scheduler.ReduceLROnPlateau):
            objects["scheduler"].step(1.0)
        else:
            objects["scheduler"].step()

    veteran, joiner = setup(), setup()
    for _ in range(3):
        step(veteran)
    view = capture(veteran, 3)
    restore(memoryview(to_bytes(view)), joiner)
    verify(joiner, 3, view.digest())
    step(veteran)
    step(joiner)
    assert capture(veteran, 4).digest() == capture(joiner, 4).digest()


def test_scaler_and_a_step_counter_that_goes_back() -> None:
    veteran = make(1) | {"scaler": torch.amp.GradScaler("cpu")}
    fresh = capture(veteran, 0)
    file = to_bytes(fresh)
    veteran["scaler"].scale(torch.ones(1))
    train(veteran, 2)
    # a cold start may go back to a step at which the optimizer had no state
    restore(memoryview(file), veteran)
    verify(veteran, 0, fresh.digest())
    assert not veteran["optimizer"].state


def snapshot(objects: dict) -> bytes:
    return bytes(to_bytes(capture(objects, 0)))


def refused(file: bytes | bytearray, objects: dict, match: str) -> None:
    before = snapshot(objects)
    with pytest.raises(StateError, match=match) as caught:
        restore(memoryview(file), objects)
    assert "\n" not in str(caught.value)
    assert snapshot(objects) == before


def test_differences_are_named_and_nothing_is_changed() -> None:
    veteran = make(1)
    train(veteran, 1)
    file = to_bytes(capture(veteran, 1))
    refused(file, make(2, width=7), r"model\.embed\.weight has shape \(11, 6\).*\(11, 7\)")
    untied = make(2)
    untied["model"].head.weight = torch.nn.Parameter(torch.zeros(11, 6))
    untied["optimizer"] = torch.optim.AdamW(untied["model"].parameters())
    refused(file, untied, "memory shared with embed.weight in the snapshot and None here|parameters:")
    bigger = make(2)
    bigger["model"].extra = torch.nn.Linear(1, 1)
    refused(file, bigger, "entry 'extra.bias' here and the snapshot has not")
    half = make(2)
    half["model"].norm.half()
    refused(file, half, r"norm.* has dtype torch.float32 in the snapshot and torch.float16 here")
    other = make(2, optimizer=torch.optim.SGD)
    refused(file, other, "option 'dampening' here and not in the snapshot")
    groups = make(2)
    groups["optimizer"].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
    refused(file, groups, "parameter groups: 1 in the snapshot and 2 here")
    refused(file, {k: v for k, v in make(2).items() if k != "ema"}, "attach the same objects")


class Stubborn:
    """Loads a few values and then refuses, as a user's broken object would."""

    def __init__(self) -> None:
        self.values = {"a": 1, "b": 2}

    def state_dict(self) -> dict:
        return dict(self.values)

    def load_state_dict(self, state: dict) -> None:
        self.values["a"] = state["a"]
        if state["b"] == 3:
            raise RuntimeError("no\nthree please")
        self.values["b"] = state["b"]


class StubbornNet(Net):
    def load_state_dict(self, state, *args, **kwargs):
        super().load_state_dict(state, *args, **kwargs)
        if state["mask"].sum() == 0:
            raise RuntimeError("an empty mask")


def test_an_object_that_refuses_takes_all_objects_back() -> None:
    veteran, joiner = make(1), make(2)
    train(veteran, 1)
    train(joiner, 2)
    veteran["a_custom"], joiner["a_custom"] = Stubborn(), Stubborn()
    veteran["z_model"], joiner["z_model"] = StubbornNet(), StubbornNet()
    veteran["a_custom"].values = {"a": 9, "b": 3}
    refused(to_bytes(capture(veteran, 1)), joiner, "a_custom .Stubborn. refused its state.* no three please")
    veteran["a_custom"].values = {"a": 9, "b": 4}
    veteran["z_model"].mask.fill_(False)
    refused(to_bytes(capture(veteran, 1)), joiner, "z_model .StubbornNet. refused .* an empty mask")


def test_nothing_restored_points_into_the_file() -> None:
    class Keeper:
        def __init__(self) -> None:
            self.kept = {"t": torch.zeros(3), "n": [torch.zeros(1)]}

        def state_dict(self) -> dict:
            return self.kept

        def load_state_dict(self, state: dict) -> None:
            self.kept = state

    veteran, joiner = make(1) | {"keeper": Keeper()}, make(2) | {"keeper": Keeper()}
    train(veteran, 1)
    view = capture(veteran, 1)
    file = to_bytes(view)
    restore(memoryview(file), joiner)
    file[:] = bytes(len(file))
    verify(joiner, 1, view.digest())


def test_read_only_memory_is_fine() -> None:
    veteran, joiner = make(1), make(2)
    train(veteran, 1)
    view = capture(veteran, 1)
    restore(memoryview(bytes(to_bytes(view))), joiner)
    verify(joiner, 1, view.digest())


def test_verify_notices_an_object_that_does_not_restore_its_state() -> None:
    class Forgetful(Stubborn):
        def load_state_dict(self, state: dict) -> None:
            self.values["a"] = state["a"]

    veteran, joiner = {"x": Forgetful()}, {"x": Forgetful()}
    veteran["x"].values = {"a": 5, "b": 6}
    view = capture(veteran, 1)
    restore(memoryview(to_bytes(view)), joiner)
    with pytest.raises(IntegrityError, match="did not take over all of its state"):
        verify(joiner, 1, view.digest())
    assert capture(veteran, 1).digest() == view.digest()


@pytest.mark.parametrize(
    ("value", "match"),
    [
        ({"lr_lambdas": [lambda step: step]}, r"thing\.lr_lambdas\[0\] is a builtins\.function"),
        ({"log": io.StringIO()}, r"thing\.log is a _io\.StringIO"),
        ({"sparse": torch.eye(3).to_sparse()}, r"thing\.sparse is a sparse"),
        ({"meta": torch.empty(2, device="meta")}, r"thing\.meta is on the meta device"),
        ({1: {"x y": object()}}, r"thing\[1\]\['x y'\] is a builtins\.object"),
        ({"lazy": torch.nn.LazyLinear(2).weight}, "UninitializedParameter"),
    ],
)
def test_a_value_that_cannot_be_serialised_is_named(value: dict, match: str) -> None:
    class Thing:
        def state_dict(self) -> dict:
            return value

        def load_state_dict(self, state: dict) -> None: ...

    with pytest.raises(StateError, match=match):
        check_serialisable({"thing": Thing()})


def test_endless_and_stateless_objects_are_refused() -> None:
    loop: dict = {}
    loop["again"] = loop
    holder = Stubborn()
    holder.values = loop
    with pytest.raises(StateError, match="does it contain itself"):
        check_serialisable({"x": holder})
    with pytest.raises(StateError, match=r"without state_dict\(\)"):
        check_serialisable({"x": object()})
    with pytest.raises(StateError, match="names must be strings"):
        check_serialisable({"": holder})
    with pytest.raises(StateError, match="whole number"):
        capture({}, -1)


def test_damaged_files_are_refused_whatever_is_damaged() -> None:
    veteran = make(1)
    train(veteran, 1)
    file = to_bytes(capture(veteran, 1))
    header = read_preamble(memoryview(file)).nbytes
    generator = torch.Generator().manual_seed(0)
    joiner = make(2)
    before = snapshot(joiner)
    for _ in range(300):
        bad = bytearray(file)
        position = int(torch.randint(0, header, (1,), generator=generator))
        bad[position] ^= 1 << int(torch.randint(0, 8, (1,), generator=generator))
        try:
            restore(memoryview(bad), joiner)
        except StateError as error:
            assert "\n" not in str(error)
            assert snapshot(joiner) == before
        else:
            restore(memoryview(to_bytes(capture(make(2), 0))), joiner)
            assert snapshot(joiner) == before
    for cut in (0, 7, 8, header - 1, header, len(file) - 1):
        refused(file[:cut], joiner, ".")
    refused(file + b"x", joiner, "end at byte")


def test_a_foreign_safetensors_file_is_no_snapshot() -> None:
    refused(safetensors.torch.save({"a": torch.ones(2)}), make(1), "carries no fabric metadata")


def rewrite(file: bytes | bytearray, change) -> bytes:
    """``file`` with its header changed by ``change(header, description)``."""
    length = int.from_bytes(file[:8], "little")
    header = json.loads(bytes(file[8 : 8 + length]))
    description = json.loads(header["__metadata__"]["fabric"])
    change(header, description)
    header["__metadata__"]["fabric"] = json.dumps(description)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(file[8 + length :])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda h, d: d.update(format=2), "not of format 1"),
        (lambda h, d: d.update(step=-1), "names no step"),
        (lambda h, d: d.update(step=True), "names no step"),
        (lambda h, d: d["state"].update(x={"$tensor": "nothing"}), "does not contain"),
        (lambda h, d: d["state"].update(x={"$exec": "1"}), "unknown encoding"),
        (lambda h, d: d["state"].update(x={"$tuple": 3}), "not a valid .tuple"),
        (lambda h, d: d["state"].update(x={"$bytes": "%"}), "not a valid .bytes"),
        (lambda h, d: d["state"].update(x={"$float": "00"}), "not a valid .float"),
        (lambda h, d: d["state"].update(x={"$map": [[[1], 2]]}), "not a valid .map"),
        (lambda h, d: d["state"].update(x=1), "belongs to nothing"),
        (lambda h, d: h["x/t"].update(dtype="F99"), "unknown dtype"),
        (lambda h, d: h["x/t"].update(shape=[1 << 40, 1 << 40]), "impossible shape"),
        (lambda h, d: h["x/t"].update(shape=[1 << 40, 1 << 40, 0]), "impossible shape"),
        (lambda h, d: h["x/t"].update(shape=[-3]), "impossible shape"),
        (lambda h, d: h["x/t"].update(shape=[4]), "where its shape needs 16"),
        (lambda h, d: h["x/t"].update(data_offsets=[0, 1e9]), "impossible offsets"),
        (lambda h, d: h.update(y=dict(h["x/t"])), "overlap or leave a gap"),
    ],
)
def test_a_false_header_is_refused_with_its_fault_named(change, match: str) -> None:
    holder = Stubborn()
    holder.values = {"a": 1, "b": 2, "t": torch.arange(3, dtype=torch.float32)}
    file = to_bytes(capture({"x": holder}, 1))
    refused(rewrite(file, change), {"x": holder}, match)
