"""The weight of a micro-batch: counted once, however often backward runs, and 0 for no contribution."""

import math

import pytest
import torch

import fabric.client
from fabric.errors import ConfigError, FabricError

DATA = [(torch.randn(3, generator=torch.Generator().manual_seed(i)), float(i)) for i in range(24)]


def session_of(model, monkeypatch, **more):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    return fabric.client.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), **more)


def trained(monkeypatch, backward, steps=2, state=None):
    """Train two steps of two micro-batches with ``backward(step, model, x, y)``; return all gradients."""
    torch.manual_seed(0)
    model, found = torch.nn.Linear(3, 1), []
    session = session_of(model, monkeypatch, state=state or {})
    data = session.loader(DATA, global_batch_size=8, micro_batch_size=4)
    for step in session.steps(data, until=steps):
        for x, y in step:
            backward(step, model, x, y.float())
        found.append((step.skipped, None if model.weight.grad is None else model.weight.grad.clone()))
        model.zero_grad()
    return found


def losses(model, x, y):
    out = model(x).squeeze(1)
    return (out - y).square().mean(), 0.1 * out.square().mean()


def both_at_once(step, model, x, y):
    step.backward(sum(losses(model, x, y)))


def one_by_one(step, model, x, y):
    first, second = losses(model, x, y)
    step.backward(first, retain_graph=True)
    step.backward(second, work=3.0)


def with_a_weight(step, model, x, y):
    first, second = losses(model, x, y)
    step.backward(first, weight=5, retain_graph=True)
    step.backward(second)


@pytest.mark.parametrize("loop", [one_by_one, with_a_weight])
def test_two_backward_passes_of_one_micro_batch_are_the_sum(monkeypatch, loop):
    for (_, expected), (_, found) in zip(
        trained(monkeypatch, both_at_once), trained(monkeypatch, loop), strict=True
    ):
        torch.testing.assert_close(found, expected)


def test_two_weights_of_one_micro_batch_are_an_error(monkeypatch):
    def unequal(step, model, x, y):
        step.backward(losses(model, x, y)[0], weight=3)
        step.backward(losses(model, x, y)[1], weight=4)

    with pytest.raises(FabricError, match="one micro-batch has the weights 3 and 4: give all backward"):
        trained(monkeypatch, unequal)


def test_a_micro_batch_of_weight_0_adds_nothing_even_if_its_loss_is_not_a_number(monkeypatch):
    def half(step, model, x, y):
        seen.append(x)
        loss = losses(model, x, y)[0]
        step.backward(loss * math.nan if len(seen) % 2 else loss, weight=0 if len(seen) % 2 else 4)

    def second_alone(step, model, x, y):
        seen.append(x)
        if len(seen) % 2 == 0:
            step.backward(losses(model, x, y)[0])  # the other micro-batch is left out by the loop

    seen = []
    found = trained(monkeypatch, half)
    seen = []
    for (skipped, gradient), (_, expected) in zip(found, trained(monkeypatch, second_alone), strict=True):
        assert not skipped
        torch.testing.assert_close(gradient, expected)


def test_a_step_of_weight_0_has_no_update(monkeypatch):
    def nothing(step, model, x, y):
        step.backward(losses(model, x, y)[0] * math.nan, weight=0)

    assert trained(monkeypatch, nothing) == [(True, None), (True, None)]
    scaler = torch.amp.GradScaler("cpu")
    found = trained(monkeypatch, nothing, state={"scaler": scaler})
    assert [(skipped, float(gradient.abs().sum())) for skipped, gradient in found] == [(False, 0.0)] * 2


def test_a_gradient_without_a_weight_is_an_error(monkeypatch):
    def plain(step, model, x, y):
        losses(model, x, y)[0].backward()

    with pytest.raises(FabricError, match=r"call step\.backward\(loss\) in place of loss\.backward\(\)"):
        trained(monkeypatch, plain)


@pytest.mark.parametrize("weight", [-1, math.nan, math.inf])
def test_a_weight_that_counts_nothing_is_an_error(monkeypatch, weight):
    with pytest.raises(FabricError, match="must be a number from 0 on"):
        trained(monkeypatch, lambda step, model, x, y: step.backward(model(x).mean(), weight=weight))


# --- several loaders -------------------------------------------------------------------------------------


def test_each_call_of_steps_reads_its_own_loader_from_its_begin(monkeypatch):
    model = torch.nn.Linear(3, 1)
    session = session_of(model, monkeypatch)
    first = session.loader(DATA, global_batch_size=4, micro_batch_size=2)
    second = session.loader(list(range(100, 112)), global_batch_size=6, micro_batch_size=3, seed=1)
    read = []

    def run(data, until, **more):
        for step in session.steps(data, until, **more):
            batches = list(step)
            read.append((step.number, len(batches), batches))

    run(first, 2)
    run(second, 4)
    run(first, 5)
    run(second, 6)
    assert [(number, count) for number, count, _ in read] == [(i, 2) for i in range(6)]
    values = [
        sorted(float(v) for batch in b for v in (batch[1] if isinstance(batch, list) else batch))
        for _, _, b in read
    ]
    assert sorted(values[2] + values[3]) == list(range(100, 112)), "one pass from its first call on"
    assert len(set(values[0] + values[1] + values[4])) == 12, "the first loader goes on where it was"


def test_loaders_that_share_in_unequal_ways_are_refused(monkeypatch):
    session = session_of(torch.nn.Linear(3, 1), monkeypatch)
    first = session.loader(DATA, global_batch_size=4, micro_batch_size=2)
    second = session.loader(DATA, global_batch_size=4, micro_batch_size=2, policy="shrink")
    list(session.steps(first, 0))
    with pytest.raises(ConfigError, match="give all loaders of a run the same policy"):
        list(session.steps(second, 0))
    with pytest.raises(ConfigError, match="first_step=3, and this call has the steps from 0 on"):
        list(session.steps(first, 1, first_step=3))
