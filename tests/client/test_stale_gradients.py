"""Gradients that a loop keeps from one step to the next, or drops within a step, are refused."""

import ast
import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.pipelining.stage import _PipelineStageBase
from torch.nn.utils import clip_grad_norm_

import fabric.client
from fabric.client.attach import refuse_hook_memory
from fabric.client.gradients import bucket_stream
from fabric.client.gradients.bucket_stream import Overlap, StaleGradients
from fabric.client.loop.loop_flow import early_change
from fabric.client.loop.model_watch import refuse_gradient_hooks, refuse_optimizers
from fabric.errors import ConfigError
from fabric.ftar.buckets import FlatGradients

WORDS = "the gradient of the step before was still there"


def loop(update, steps: int = 6) -> int:
    """Train alone; ``update(number, optimizer)`` is the user's code after a step. Return the steps made."""
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = fabric.client.attach(model, optimizer, job="j", replica="r0", disable=True)
    data = session.loader(torch.randn(8, 2), global_batch_size=4, micro_batch_size=2)
    for step in session.steps(data, until=steps):
        for x in step:
            step.backward(model(x).square().mean())
        update(step.number, optimizer)
    return session.committed_step


def test_an_accumulation_over_steps_is_refused_at_its_first_update():
    made = []

    def update(number, optimizer):
        made.append(number)
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()

    with pytest.raises(ConfigError, match=WORDS):
        loop(update)
    assert made == [0, 1, 2, 3]


def test_a_forgotten_zero_grad_is_refused_at_the_second_update():
    made = []

    def update(number, optimizer):
        made.append(number)
        optimizer.step()

    with pytest.raises(ConfigError, match=WORDS):
        loop(update)
    assert made == [0, 1]


@pytest.mark.parametrize("to_none", [True, False])
def test_a_gradient_that_is_none_or_zero_is_not_stale(to_none):
    def update(number, optimizer):
        optimizer.step()
        optimizer.zero_grad(set_to_none=to_none)

    assert loop(update) == 6


def test_another_optimizers_gradient_may_stay_until_that_one_clears_it():
    """As in a GAN: the generator's loss leaves gradients at the critic, whose turn clears them first."""
    parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
    critic, generator = (torch.optim.SGD([p], lr=0.1) for p in parameters)
    stale = StaleGradients([critic, generator])
    for step in range(80):
        turn = (critic, generator)[step % 2]
        turn.zero_grad()
        stale.begin(step)
        for p in parameters:
            p.grad = torch.ones(2)
        turn.step()


def test_the_watch_does_not_look_at_parameters_after_its_first_looks(monkeypatch):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    stale, looks = StaleGradients([optimizer]), []
    look = bucket_stream._parameters
    monkeypatch.setattr(bucket_stream, "_parameters", lambda x: looks.append(x) or look(x))
    counts = []
    for step in range(300):
        for number in range(2):
            with stale.micro_batch(number == 0, False):
                stale.begin(step)
                model(torch.ones(2)).sum().backward()
                stale.added()
        optimizer.zero_grad()
        counts.append(len(looks))
    assert 64 < counts[199] == counts[299] < 400


def test_a_replayed_step_writes_over_what_is_there():
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    stale = StaleGradients([optimizer])
    parameter.grad = torch.ones(2)
    stale.begin(1)
    stale.end()
    optimizer.step()


def test_a_framework_that_calls_backward_itself_adds_gradients():
    model = torch.nn.Linear(2, 1)
    stale = StaleGradients([torch.optim.SGD(model.parameters(), lr=0.1)])
    stale.own_loop = False
    for number in range(3):
        with stale.micro_batch(number == 0, False):
            model(torch.ones(2)).sum().backward()


@pytest.mark.parametrize("own_loop", [True, False])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_framework_may_not_change_gradients_before_they_are_averaged(own_loop, micro_batches):
    """A hook such as Lightning's ``on_after_backward`` does, and no loop that the source shows."""
    model = torch.nn.Linear(2, 1)
    stale = StaleGradients([torch.optim.SGD(model.parameters(), lr=0.1)])
    stale.own_loop = own_loop
    refuses = pytest.raises(ConfigError, match="changes gradients after a backward pass")
    for changes in (False, True):
        with refuses if changes and not own_loop else contextlib.nullcontext():
            for number in range(micro_batches):
                with stale.micro_batch(number == 0, micro_batches == 1):
                    stale.begin(int(changes))
                    model(torch.ones(2)).sum().backward()
                    stale.added()
                    if changes:
                        model.weight.grad.mul_(0.5)
        model.zero_grad()


# --- gradients that are dropped within a step ---------------------------------------------------------------

DROPPED = "the gradients of this step's earlier micro-batches are gone"


def compute(zero_grad, size: int = 2, steps: int = 4) -> tuple[int, torch.Tensor]:
    """Train alone with ``8 / size`` micro-batches; ``zero_grad`` gets a place and may drop gradients.

    Return the weight, and the steps made before a refusal; -1: no refusal.
    """
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = fabric.client.attach(model, optimizer, job="j", replica="r0", disable=True)
    data = session.loader(torch.randn(8, 2), global_batch_size=8, micro_batch_size=size)
    made = 0
    try:
        for step in session.steps(data, until=steps):
            zero_grad("step", 0, optimizer)
            for number, x in enumerate(step):
                zero_grad("before", number, optimizer)
                step.backward(model(x).square().mean())
                zero_grad("after", number, optimizer)
            optimizer.step()
            zero_grad("update", 0, optimizer)
            made += 1
    except ConfigError as error:
        assert DROPPED in str(error)
        return made, model.weight
    return -1, model.weight


@pytest.mark.parametrize("to_none", [True, False])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_zero_grad_at_each_micro_batch_is_refused_before_the_first_update(place, to_none):
    def drop(where, number, optimizer):
        if where == place:
            optimizer.zero_grad(set_to_none=to_none)

    assert compute(drop)[0] == 0


def test_a_zero_grad_in_the_only_micro_batch_of_a_step_is_refused_at_the_second_step():
    made, _ = compute(lambda where, number, optimizer: where == "before" and optimizer.zero_grad(), size=8)
    assert made == 1


@pytest.mark.parametrize("to_none", [True, False])
def test_a_zero_grad_once_in_each_step_is_no_fault_wherever_it_is(to_none):
    weights = []
    for place in ("step", "update", "first"):

        def drop(where, number, optimizer, place=place):
            if where == place or (where == "before" and place == "first" and number == 0):
                optimizer.zero_grad(set_to_none=to_none)

        made, weight = compute(drop)
        assert made == -1
        weights.append(weight)
    assert torch.equal(weights[0], weights[1]) and torch.equal(weights[0], weights[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_gradient_has_a_value_unless_all_its_elements_are_zeros_of_any_sign(dtype):
    for size in (0, 1, 40, 1000):
        zeros = torch.zeros(size, dtype=dtype)
        assert not bucket_stream._has_value(zeros)
        assert not bucket_stream._has_value(-zeros)
        for place in {0, size // 2, size - 1} if size else ():
            for value in (1.0, -1.0, float("nan"), torch.finfo(dtype).tiny):
                gradient = -zeros
                gradient[place] = value
                assert bucket_stream._has_value(gradient)
                assert bucket_stream._has_value(gradient[None].expand(2, size))
        shared = torch.cat([torch.ones(16, dtype=dtype), zeros])
        assert not bucket_stream._has_value(shared[16:])


def test_a_gradient_that_is_masked_in_part_is_not_dropped():
    parameter = torch.nn.Parameter(torch.zeros(4096))
    stale = StaleGradients([torch.optim.SGD([parameter], lr=0.1)])
    parameter.grad = torch.zeros(4096)
    parameter.grad[[1, 2049]] = 1.0  # the element that stays is not among the samples
    with stale.micro_batch(False, False):
        stale.added()
        parameter.grad[:16] = 0.0
    stale.added()
    parameter.grad[:16] = 1.0
    stale.added()
    with pytest.raises(ConfigError, match=DROPPED), stale.micro_batch(False, False):
        stale.added()
        parameter.grad.data.zero_()


def test_an_update_within_the_loop_over_the_micro_batches_is_refused():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = fabric.client.attach(model, optimizer, job="j", replica="r0", disable=True)
    data = session.loader(torch.randn(8, 2), global_batch_size=8, micro_batch_size=4)
    before = model.weight.clone()
    with pytest.raises(ConfigError, match=r"SGD\.step was called within the loop over the micro-batches"):
        for step in session.steps(data, until=1):
            for x in step:
                step.backward(model(x).square().mean())
                optimizer.step()
    assert torch.equal(model.weight, before)


def clip(model):
    clip_grad_norm_(model.parameters(), 0.1)


def clip_values(model):
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.1)


@pytest.mark.parametrize("change", [clip, clip_values])
@pytest.mark.parametrize("early", [True, False])
def test_clipping_within_the_loop_over_the_micro_batches_is_refused(change, early):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    session = fabric.client.attach(model, optimizer, job="j", replica="r0", disable=True)
    data = session.loader(torch.randn(8, 2), global_batch_size=8, micro_batch_size=4)

    def train():
        for step in session.steps(data, until=2):
            for x in step:
                step.backward(model(x).square().mean())
                if early:
                    change(model)
            change(model)
            optimizer.step()
            optimizer.zero_grad()

    if not early:
        train()
        assert session.committed_step == 2
        return
    with pytest.raises(
        ConfigError, match="the script clips gradients within the loop over the micro-batches"
    ):
        train()
    change(model)  # outside of the loop it is torch's own again


IN_THE_LOOP = [
    "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
    "scaler.unscale_(optimizer)",
    "for p in model.parameters(): p.grad.clamp_(-1, 1)",
    "for p in model.parameters(): p.grad *= 2",
    "for name, p in model.named_parameters(): p.grad.data.div_(norm)",
]
NOT_IN_THE_LOOP = [
    "for p in model.parameters(): norms.append(p.grad.norm())",
    "for p in model.parameters(): p.grad = None",
    "x.grad.data.mul_(2)",
    "for p, g in zip(model.parameters(), more): p.grad = g if p.grad is None else p.grad + g",
    "for p, g in zip(model.parameters(), more): p.grad += g",
    "for p, g in zip(model.parameters(), more): p.grad.add_(g)",
    "torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])",
]


@pytest.mark.parametrize(
    ("line", "found"), [(x, True) for x in IN_THE_LOOP] + [(x, False) for x in NOT_IN_THE_LOOP]
)
def test_a_gradient_that_a_loop_over_micro_batches_changes_is_found_in_its_source(line, found):
    head, colon, body = line.partition(": ")
    nested = f"{head}:\n        {body}" if colon else line
    assert bool(early_change(ast.parse(f"for x in step:\n    {nested}").body[0])) == found


def test_a_hook_on_what_a_replica_has_added_up_is_refused_and_one_on_a_gradient_is_not(capsys):
    def hook(parameter):
        parameter.grad.clamp_(-1.0, 1.0)

    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.bias.register_hook(lambda gradient: gradient.clamp(-1.0, 1.0))
    refuse_gradient_hooks(model)
    handle = model.bias.register_post_accumulate_grad_hook(hook)
    with pytest.raises(SystemExit):
        fabric.client.attach(model, optimizer, job="j", replica="r0", disable=True)
    assert "bias has a hook of register_post_accumulate_grad_hook" in capsys.readouterr().err
    handle.remove()
    Overlap(FlatGradients(list(model.named_parameters())), lambda *_: None, fewest_buckets=1)
    refuse_gradient_hooks(model)


memory = {}


def smoothed(gradient):
    memory["old"] = 0.5 * memory.get("old", 0.0) + 0.5 * gradient
    return memory["old"]


def noting(gradient):
    memory["norms"] = [*memory.get("norms", ()), gradient.norm()]


class Smoothing:
    old = 0.0

    def hook(self, module, _inputs, output):
        self.old = 0.9 * self.old + output.detach().mean()
        return output - self.old


def smoothed_output(module, _inputs, output):
    module.old = 0.9 * module.old + output.detach().mean()
    return output - module.old


def halved_output(module, _inputs, output):
    module.last = output.detach()
    return output / 2


@pytest.mark.parametrize(
    ("register", "hook", "kept"),
    [
        (lambda x: x.weight.register_hook, smoothed, "memory, which smoothed keeps"),
        (lambda x: x.register_forward_hook, Smoothing().hook, "self.old, which Smoothing.hook keeps"),
        (lambda x: x.register_forward_hook, smoothed_output, "module.old, which smoothed_output keeps"),
        (lambda x: x.weight.register_hook, noting, ""),
        (lambda x: x.register_forward_hook, halved_output, ""),
    ],
)
def test_a_hook_that_goes_by_its_earlier_calls_is_refused(register, hook, kept):
    model = torch.nn.Linear(2, 1)
    register(model)(hook)
    with pytest.raises(ConfigError, match=kept) if kept else contextlib.nullcontext():
        refuse_hook_memory(model, ())
    refuse_hook_memory(model, [memory, getattr(hook, "__self__", model)])


def test_a_schedule_that_divides_what_earlier_micro_batches_added_is_refused():
    """torch divides the whole ``.grad`` at the end of each schedule: the first micro-batch's part twice."""
    stage = SimpleNamespace(submod=torch.nn.Linear(2, 1))
    stage.submod.weight.grad = torch.ones(1, 2)
    stale = StaleGradients([torch.optim.SGD(stage.submod.parameters(), lr=0.1)])
    scale = _PipelineStageBase.scale_grads
    with stale.micro_batch(True, False):
        scale(stage, 1)
        with pytest.raises(ConfigError, match="scale_grads=True"):
            scale(stage, 2)
    scale(stage, 2)  # as torchtitan does, before session.exchange
    assert stage.submod.weight.grad.tolist() == [[0.5, 0.5]]


@pytest.mark.parametrize(
    ("state", "words"), [(None, ""), ([0.0], "DDP's communication hook hook keeps a list")]
)
def test_a_communication_hook_with_a_state_is_refused(state, words):
    def hook(state, bucket):
        raise AssertionError("never called")

    model = torch.nn.Linear(2, 1)
    model._comm_hooks = [(hook, state)]  # as DDP keeps them
    with pytest.raises(ConfigError, match=words) if words else contextlib.nullcontext():
        refuse_gradient_hooks(model)


def test_an_optimizer_whose_state_is_one_ranks_own_is_refused():
    class ZeroRedundancyOptimizer(torch.optim.SGD):
        """torch's own needs a world of several ranks."""

    with pytest.raises(ConfigError, match="a state that a rank which joins cannot take over"):
        refuse_optimizers([ZeroRedundancyOptimizer([torch.ones(1)])])
