"""Tensors that forward changes: the choices, the values after a commit, and those that nobody named."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from fabric.client.gradients.forward_buffers import (
    BufferWatch,
    ForwardBuffers,
    choose_buffers,
    default_buffers,
    exact_values,
    first_member,
    write_exact,
)
from fabric.errors import ConfigError
from fabric.ftar.buckets import FlatGradients
from fabric.model import Member


class Queue(nn.Module):
    """As MoCo: keys go into a queue at a pointer; ``replaces`` assigns new tensors in place of writing."""

    def __init__(self, replaces: bool = False) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(4, 3), nn.Linear(4, 3)
        self.key.requires_grad_(False)
        self.register_buffer("queue", torch.zeros(3, 8))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("full", torch.zeros((), dtype=torch.bool))
        self.replaces = replaces

    @torch.no_grad()
    def enqueue(self, x: torch.Tensor) -> None:
        for mine, theirs in zip(self.key.parameters(), self.query.parameters(), strict=True):
            mine.data = mine.data * 0.5 + theirs.data * 0.5
        at, keys = int(self.pointer), self.key(x)
        queue = self.queue.clone() if self.replaces else self.queue
        queue[:, at : at + len(x)] = keys.T
        following = (at + len(x)) % 8
        if self.replaces:
            self.queue, self.pointer = queue, torch.tensor([following])
            self.full = self.full | (following == 0)
        else:
            self.pointer[0] = following
            self.full |= following == 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.enqueue(x)
        return self.query(x) @ self.queue.clone()


FIRST = {"queue": "first", "pointer": "first", "full": "first", "key.*": "first"}


class Replica:
    """A member without a job: the test adds its flat gradients to those of the others."""

    def __init__(self, model: nn.Module, buffers) -> None:
        self.model = model
        self.buffers = ForwardBuffers(model, choose_buffers(model, buffers))
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.gradients = FlatGradients([*trainable, *self.buffers.stand_ins])
        self.gradients.of_one = self.buffers.of_one
        self.weight = 0.0
        self.buffers.begin()

    def compute(self, x: torch.Tensor) -> None:
        (self.model(x).square().mean() * len(x)).backward()
        self.weight = float(len(x))
        self.buffers.contribute(self.weight)

    def sent(self, is_one: bool) -> torch.Tensor:
        flat = torch.zeros(self.gradients.nbytes, dtype=torch.uint8)
        for bucket in self.gradients.buckets if self.weight else ():
            self.gradients.gather_bucket(bucket, flat, is_one)
        return flat


def commit(replicas: list[Replica], one: Replica | None) -> None:
    flats = [replica.sent(replica is one) for replica in replicas]
    for bucket in replicas[0].gradients.buckets:
        for flat in flats[1:]:
            bucket.view(flats[0]).add_(bucket.view(flat))
    total = sum(replica.weight for replica in replicas)
    for replica in replicas:
        replica.gradients.scatter(flats[0], total)
        replica.buffers.commit(total)
        replica.weight = 0.0
        for p in replica.model.parameters():
            p.grad = None


def state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(one[name], other[name]) for name in one)


def queues(replaces: bool) -> list[Replica]:
    replicas = []
    for _ in range(3):
        torch.manual_seed(1)
        replicas.append(Replica(Queue(replaces), FIRST))
    return replicas


@pytest.mark.parametrize("replaces", [False, True])
def test_all_members_take_the_queue_of_the_first_bit_by_bit(replaces):
    replicas = queues(replaces)
    torch.manual_seed(2)
    for _ in range(3):
        for number, replica in enumerate(replicas):
            replica.compute(torch.randn(number + 1, 4))
        expected = state(replicas[1].model)
        commit(replicas, one=replicas[1])
        assert all(equal(expected, state(replica.model)) for replica in replicas)
    assert int(replicas[0].model.pointer) == 6


def test_without_the_first_member_the_queue_stays_as_the_step_began():
    replicas = queues(replaces=True)
    before = state(replicas[0].model)
    for replica in replicas[1:]:
        replica.compute(torch.randn(2, 4))
    commit(replicas, one=replicas[0])
    assert all(equal(before, state(replica.model)) for replica in replicas)


def test_a_dropped_gradient_takes_the_queue_and_the_second_encoder_with_it():
    (replica, *_) = queues(replaces=True)
    before = state(replica.model)
    replica.compute(torch.randn(2, 4))
    assert not equal(before, state(replica.model))
    replica.buffers.drop()
    assert equal(before, state(replica.model))
    assert all(stand_in.grad is None for _, stand_in in replica.buffers.stand_ins)


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.spectral_norm, nn.utils.spectral_norm])
@pytest.mark.parametrize("wanted", ["refuse", "average", "first"])
def test_spectral_norm_takes_the_vectors_of_one_member_whatever_the_choice_for_statistics(norm, wanted):
    replicas = []
    for _ in range(2):
        torch.manual_seed(1)
        replicas.append(
            Replica(nn.Sequential(norm(nn.Linear(4, 3)), nn.Tanh(), norm(nn.Linear(3, 2))), wanted)
        )
        for p in replicas[-1].model.parameters():
            p.data += torch.randn_like(p)  # the power iteration has converged for the first weights
    for number, replica in enumerate(replicas):
        for _ in range(number + 1):
            replica.compute(torch.randn(2, 4))
    assert not equal(*(state(replica.model) for replica in replicas))
    expected = state(replicas[0].model)
    commit(replicas, one=replicas[0])
    assert all(equal(expected, state(replica.model)) for replica in replicas)


VALUES = [
    torch.tensor([0.1, -3.0, float("inf"), float("nan")]),
    torch.tensor([0.1, 1e300], dtype=torch.float64),
    torch.tensor([0.1, 7.0], dtype=torch.bfloat16),
    torch.tensor([0.1, 7.0], dtype=torch.float16),
    torch.tensor([2**63 - 1, -(2**63), -1, 2**53 + 1]),
    torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32),
    torch.tensor([-128, 127], dtype=torch.int8),
    torch.tensor([0, 255], dtype=torch.uint8),
    torch.tensor([True, False]),
    torch.tensor([1 + 2j, 2 - 3j], dtype=torch.complex64),
    torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn),
    torch.tensor(5),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: f"{value.dtype}-{value.dim()}")
def test_a_value_of_any_type_arrives_bit_by_bit_after_a_sum_with_zeros(value):
    sent = exact_values(value)
    arrived = torch.zeros_like(value)
    write_exact(sent + torch.zeros_like(sent), arrived)
    as_bytes = [x.reshape(-1).view(torch.uint8) for x in (value, arrived)]
    assert torch.equal(*as_bytes)


def test_a_value_that_is_not_finite_is_no_fault_of_the_gradient():
    model = nn.Linear(2, 1)
    model.register_buffer("least", torch.full((1,), float("inf")))
    replica = Replica(model, {"least": "first"})
    replica.compute(torch.ones(1, 2))
    assert not replica.gradients.first_nonfinite_own()
    assert not replica.gradients.first_nonfinite(replica.sent(is_one=True))
    commit([replica], one=replica)
    assert model.least.isinf().all()


def test_the_first_member_by_name_gives_its_values_unless_it_joins():
    def member(name: str, joining: bool = False) -> Member:
        return Member(replica=name, incarnation=1, link="", ckpt="", joining=joining)

    def first(*members: Member) -> str:
        return first_member(SimpleNamespace(roster=members))

    assert first(member("r2"), member("r1")) == "r1"
    assert first(member("r2"), member("r1", joining=True)) == "r2"
    assert first(member("r2", joining=True), member("r1", joining=True)) == "r1"
    assert first_member(None) == ""


# --- choices ----------------------------------------------------------------------------------------------


def test_patterns_choose_for_buffers_and_frozen_parameters_and_the_first_that_fits_wins():
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "moco": Queue()})
    choices = choose_buffers(model, {"moco.queue": "first", "moco.*": "ignore", "*": "average"})
    assert choices.carried == {
        "norm.running_mean": "average",
        "norm.running_var": "average",
        "norm.num_batches_tracked": "average",
        "moco.queue": "first",
    }
    assert choices.local == {"moco.pointer", "moco.full", "moco.key.weight", "moco.key.bias"}


@pytest.mark.parametrize(
    ("buffers", "words"),
    [
        ("refuse", "forward changes the buffer 'norm.running_mean' differently on every replica"),
        ({"moco.queue": "first"}, "forward changes the buffer 'norm.running_mean' differently"),
        ({"norm.*": "average", "moco.queu": "first"}, "the pattern 'moco.queu', and no buffer"),
        ({"norm.*": "mean"}, r"buffers\['norm.\*'\] is 'mean': it must be"),
        ("mean", "buffers is 'mean': it must be"),
        ({"norm.*": "average", "moco.full": "average"}, "'moco.full' is bool, which has no exact average"),
        ({"norm.*": "average", "none": "first"}, "'none' has no element yet"),
        ({"norm.*": "average", "moco.query.*": "first"}, "the pattern 'moco.query.*', and no buffer"),
    ],
)
def test_a_choice_that_cannot_be_kept_is_refused(buffers, words):
    model = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "moco": Queue()})
    model.register_buffer("none", torch.empty(0))
    with pytest.raises(ConfigError, match=words):
        choose_buffers(model, buffers)


def test_a_script_that_cannot_choose_has_its_statistics_averaged():
    assert default_buffers(nn.BatchNorm1d(3)) == "average" and default_buffers(nn.Linear(1, 1)) == "refuse"


def test_a_shared_buffer_has_one_choice_under_all_its_names():
    norm = nn.BatchNorm1d(3)
    model = nn.ModuleDict({"a": norm, "b": norm})
    assert list(choose_buffers(model, {"b.*": "average"}).carried) == [
        "a.running_mean",
        "a.running_var",
        "a.num_batches_tracked",
    ]
    assert choose_buffers(model, "ignore").local >= {"a.running_mean", "b.running_mean"}


def test_observers_take_the_values_of_one_member():
    model = nn.Sequential(torch.ao.quantization.FakeQuantize(), torch.ao.quantization.MinMaxObserver())
    assert set(choose_buffers(model, "average").carried.values()) == {"first"}
    assert "0.activation_post_process.min_val" in choose_buffers(model, "refuse").carried


def test_a_buffer_that_the_state_lacks_is_shared_beside_it():
    models = [nn.Linear(2, 1) for _ in range(2)]
    for number, model in enumerate(models):
        model.register_buffer("memory", torch.full((2,), float(number)), persistent=False)
    one, other = (ForwardBuffers(m, choose_buffers(m, {"memory": "first"})) for m in models)
    assert one.shared == {"buffers": one}
    other.load_state_dict(one.state_dict())
    assert torch.equal(models[0].memory, models[1].memory)
    assert not ForwardBuffers(nn.BatchNorm1d(2), choose_buffers(nn.BatchNorm1d(2), "average")).shared


# --- tensors that nobody has named ------------------------------------------------------------------------


def watch(model: nn.Module, buffers="refuse") -> BufferWatch:
    return BufferWatch(model, choose_buffers(model, buffers).named)


@pytest.mark.parametrize("replaces", [False, True])
def test_what_the_first_forward_changes_is_refused_with_a_remedy(replaces):
    model = Queue(replaces)
    watched = watch(model)
    model(torch.randn(2, 4))
    words = r"forward has changed 'queue', 'pointer', 'key.weight' and 1 more, .*=\{\"queue\": \"first\"\}"
    with pytest.raises(ConfigError, match=words):
        watched.check()


def test_named_tensors_caches_and_untouched_tensors_are_no_fault():
    model = Queue()
    model.register_buffer("cache", torch.zeros(1), persistent=False)
    model.register_buffer("mask", torch.ones(4, 4))
    watched = watch(model, FIRST)
    model(torch.randn(2, 4))
    model.cache.add_(1)
    watched.check()


def test_a_few_places_of_a_large_tensor_are_found_by_its_version():
    model = nn.Linear(1, 1)
    model.register_buffer("table", torch.zeros(1_000_000))
    watched = watch(model)
    model.table[777_777] = 1.0
    with pytest.raises(ConfigError, match="'table'"):
        watched.check()


def test_forward_may_change_a_tensor_from_some_step_on():
    model = nn.Linear(1, 1)
    model.register_buffer("late", torch.zeros(1))
    watched, changed_at = watch(model), None
    for step in range(1, 20):
        watched.begin()
        if step >= 5:
            model.late.add_(1)
        try:
            watched.check()
        except ConfigError:
            changed_at = step
            break
    assert changed_at == 8


def test_a_state_that_the_user_loads_is_no_change_by_forward():
    model = Queue()
    watched = watch(model)
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    watched.check()
    watched.begin()
    model(torch.randn(2, 4))
    with pytest.raises(ConfigError, match="forward has changed"):
        watched.check()


def test_a_buffer_whose_shape_forward_changes_is_refused():
    model = nn.Linear(2, 1)
    model.register_buffer("seen", torch.zeros(1, 2))
    replica = Replica(model, {"seen": "first"})
    model.seen = torch.zeros(3, 2)
    with pytest.raises(
        ConfigError, match=r"changed the shape of the buffer 'seen' from \[1, 2\] to \[3, 2\]"
    ):
        replica.buffers.contribute(1.0)


def test_a_frozen_weight_that_was_made_in_inference_mode_is_watched_by_its_values():
    with torch.inference_mode():
        weight = torch.ones(3)
    model = nn.Linear(1, 1)
    model.register_buffer("weights", weight)
    watched = watch(model)
    watched.check()
    watched.begin()
    with torch.inference_mode():
        weight += 1
    with pytest.raises(ConfigError, match="'weights'"):
        watched.check()


def test_only_the_steps_that_are_watched_walk_over_the_modules(monkeypatch):
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    watched, walks, steps = watch(model, "average"), set(), []
    modules = nn.Module.named_modules

    def noted(module, *arguments, **named):
        walks.add(len(steps))
        return modules(module, *arguments, **named)

    monkeypatch.setattr(nn.Module, "named_modules", noted)
    for step in range(1, 17):
        steps.append(step)
        watched.begin()
        watched.check()
    assert walks == {1, 2, 4, 8, 16}
