"""Parameters that a script changes by hand are found, and those that it leaves are not."""

import pytest
import torch

from fabric.client.loop.hand_updates import HandUpdates


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    return sum((p * p).sum().abs() for p in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64])
def test_any_change_of_a_parameter_is_found_and_accumulation_is_none(dtype):
    model = torch.nn.Linear(3, 2).to(dtype)
    updates = HandUpdates()
    assert not updates.have_begun()
    for _ in range(3):
        loss = loss_of(model)
        updates.note(loss)
        loss.backward()
    assert not updates.have_begun()
    model.bias.data[1] *= 1.0625
    assert updates.have_begun()
    updates.note([loss_of(model)])
    assert not updates.have_begun()


def test_parameters_without_a_backward_pass_may_change_and_the_dead_are_forgotten():
    model, other = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
    updates = HandUpdates()
    updates.note([loss_of(model), torch.zeros(1)])
    with torch.no_grad():
        other.weight.add_(1.0)
    assert not updates.have_begun()
    with torch.no_grad():
        model.weight.add_(1.0)
    del model
    assert not updates.have_begun()


def test_values_that_cannot_be_read_and_edges_of_the_graph_are_no_update():
    model = torch.nn.Linear(3, 2)
    updates = HandUpdates()
    loss = loss_of(model)
    updates.note(torch.autograd.graph.get_gradient_edge(loss))
    updates.note(iter([loss]))
    updates.note([loss])
    size = model.weight.untyped_storage().size()
    model.weight.untyped_storage().resize_(0)  # as FSDP does between two uses
    assert not updates.have_begun()
    model.weight.untyped_storage().resize_(size)
    with torch.no_grad():
        model.weight.fill_(torch.nan)
    assert not updates.have_begun(), "a job that has diverged says so itself"
    with torch.no_grad():
        model.bias.add_(1.0)
    assert updates.have_begun()
