"""Gradients on a device: what a replay reads and what an exchange writes are different memory."""

import torch
from ftar.simulated_device import SimulatedDevice

from fabric.client.gradients.gradient_backend import DeviceBackend
from fabric.ftar.buckets import FlatGradients


def filled(gradients: FlatGradients, value: float) -> torch.Tensor:
    """Return a flat sum in which every gradient has this value, and one member has each."""
    flat = torch.zeros(gradients.nbytes, dtype=torch.uint8)
    for bucket in gradients.buckets:
        bucket.view(flat).fill_(value)
        bucket.presence(flat).fill_(1)
    return flat


def test_a_newcomer_applies_a_fetched_gradient_while_its_next_round_fills_the_flat_buffer():
    parameter = torch.nn.Parameter(torch.zeros(8))
    gradients = FlatGradients([("p", parameter)])
    backend = DeviceBackend(SimulatedDevice(immediate=True), gradients.nbytes)
    fetched, slot, sum_of_round = filled(gradients, 3), filled(gradients, 0), filled(gradients, 5)
    with backend.round(slot) as flat:
        backend.run(lambda: flat.copy_(sum_of_round))
        backend.digest()  # the round's sum is in the flat buffer
        backend.scatter(gradients, fetched, 1.0)
        copied = backend.copy_out(slot)
    assert copied is not None
    copied.wait()
    assert parameter.grad is not None
    assert parameter.grad.tolist() == [3.0] * 8
    assert torch.equal(slot, sum_of_round), "the replay wrote into the sum of the round"
    backend.scatter(gradients, slot, 1.0)
    assert parameter.grad.tolist() == [5.0] * 8
