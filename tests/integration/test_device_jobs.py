"""Whole jobs whose gradients are on a device: gathered, reduced and scattered there, killed and joined."""

import threading
from functools import partial

import pytest
import torch
from ftar.gathering import gather
from ftar.simulated_device import SimulatedDevice
from job import Job
from test_failures import finish_and_check

from fabric.ckpt_server.state.device_digest import BLOCK_BYTES
from fabric.client.gradients import gradient_backend
from fabric.client.gradients.bucket_stream import Overlap
from fabric.client.gradients.exchange_thread import ExchangeThread
from fabric.client.gradients.gradient_backend import (
    DeviceBackend,
    HostBackend,
    choose_backend,
    device_backend,
    device_of,
)
from fabric.client.gradients.gradient_slots import GradientSlot, GradientSlots
from fabric.errors import ConfigError
from fabric.ftar.buckets import FlatGradients
from fabric.ftar.device.device_ring import DeviceRing
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.model import Fence
from fabric.protocol.messages import member_events as io
from fabric.runtime.config import settings
from fabric.runtime.failpoints import Failpoints

DEVICE = {"TEST_TRAINER": "device_trainer"}


@pytest.mark.integration
def test_a_job_on_a_device_loses_a_member_in_the_ring_and_ends_bitwise_equal(zygote, tmp_path):
    with Job(zygote, tmp_path, environment=DEVICE) as job:
        job.start_all({"r1": "ring@12=kill"})
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}, job.logs()
        assert [e for e in job.events("r1", "commit") if e["contributed"] and e["step"] > 12]
        assert job.logs().count("gradients on SimulatedDevice") == 4, job.logs()


def one_layer() -> FlatGradients:
    torch.manual_seed(0)
    return FlatGradients(list(torch.nn.Linear(30, 7).named_parameters()))


def fill(gradients: FlatGradients, value: float) -> None:
    for _, parameter in gradients.parameters:
        parameter.grad = torch.full_like(parameter, value)


def test_the_flat_buffer_waits_for_backward_and_scatter_for_the_flat_buffer():
    """Backward, copies and the update run on the device, in any order that events allow."""
    device, gradients = SimulatedDevice(), one_layer()
    backend = DeviceBackend(device, gradients.nbytes)
    slot = torch.zeros(gradients.nbytes, dtype=torch.uint8)
    fill(gradients, 0.0)
    seen: set[str] = set()
    for step in range(1, 4):

        def backward(step: int = step) -> None:
            for _, parameter in gradients.parameters:
                assert parameter.grad is not None
                parameter.grad.fill_(float(step))

        device.compute().run(backward)
        backend.mark_ready()
        with backend.round(slot) as flat:
            backend.run(lambda flat=flat: gather(gradients, flat))
            backend.run(lambda flat=flat: gradients.buckets[0].view(flat).mul_(10))  # the reduction
            digest, copied = backend.digest(), backend.copy_out(slot)
        assert copied is not None
        copied.wait()
        assert digest == backend.digest_of(slot.numpy().data) and digest not in seen
        seen.add(digest)
        assert all((view == 10 * step).all() for _, _, view in gradients.buckets[0].views(slot))
        slot_before = slot.clone()
        backend.scatter(gradients, slot, 5.0)
        device.compute().record().wait()
        assert all((p.grad == 2 * step).all() for _, p in gradients.parameters)
        assert torch.equal(slot, slot_before)
    device.close()


def test_a_fetched_gradient_comes_up_from_host_memory_and_an_aborted_round_is_forgotten():
    device, gradients = SimulatedDevice(), one_layer()
    backend = DeviceBackend(device, gradients.nbytes)
    slot, fetched = (torch.zeros(gradients.nbytes, dtype=torch.uint8) for _ in range(2))
    gradients.buckets[0].view(fetched).fill_(6.0)
    fill(gradients, 1.0)
    backend.mark_ready()
    with backend.round(slot) as flat:
        backend.run(lambda: gather(gradients, flat))
        backend.copy_out(slot)
    backend.scatter(gradients, fetched, 2.0)
    device.compute().record().wait()
    assert all((p.grad == 3).all() for _, p in gradients.parameters)
    # The slot of an earlier round keeps its result when a later round is aborted.
    with pytest.raises(KeyboardInterrupt), backend.round(fetched) as flat:
        backend.run(lambda: flat.fill_(77))
        raise KeyboardInterrupt
    backend.scatter(gradients, slot, 1.0)
    device.compute().record().wait()
    assert all((p.grad == 1).all() for _, p in gradients.parameters)
    device.close()


@pytest.mark.parametrize("fetched", [False, True])
def test_a_parameter_that_no_member_used_has_no_gradient_on_a_device(fetched):
    """A member reads it beside the digest of its own round, and in host memory from a fetched sum."""
    device, gradients = SimulatedDevice(), one_layer()
    (_, weight), (_, bias) = gradients.parameters
    backend = DeviceBackend(device, gradients.nbytes)
    slots = GradientSlots(None, gradients.nbytes, gradients.layout, None)
    slots._slots = [GradientSlot(i, torch.zeros(gradients.nbytes, dtype=torch.uint8)) for i in range(3)]
    exchange = ExchangeThread(AlonePlane(), gradients, slots, Failpoints(""), print, backend)
    bias.grad = torch.ones_like(bias)
    backend.mark_ready()
    posted: list[io.Event] = []
    exchange.run_alone(io.StartExchange(Fence("", 1, 1), 4, 1.0), posted.append)
    assert isinstance(posted[0], io.Exchanged)
    slot = slots.find(4)
    assert slot.absent == {"weight"}
    slot.settle()
    weight.grad, bias.grad = torch.full_like(weight, 7.0), None  # as on a member whose gradient was dropped
    if fetched:
        backend.scatter(gradients, slot.buffer.clone(), 2.0)
    else:
        backend.scatter(gradients, slot.buffer, 2.0, slot.absent)
    device.compute().record().wait()
    assert weight.grad is None and (bias.grad == 0.5).all()
    exchange.close()
    device.close()


class AlonePlane:
    """The data plane of a single member: the sum is its own gradient."""

    waiting_s: dict[str, float] = {}  # noqa: RUF012
    sending_s: dict[str, float] = {}  # noqa: RUF012

    def all_reduce(self, *_, **__):
        pass


class WatchedPlane(AlonePlane):
    """Brings each bucket to the host, and says so."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self.first = device, threading.Event()

    def all_reduce(self, *_, **__):
        self.device.compute().record().wait()
        self.first.set()


@pytest.mark.parametrize("changed", [False, True])
def test_a_bucket_is_exchanged_on_a_device_while_backward_computes_the_next(changed):
    """Backward is as late as events allow, and adds to one bucket on two streams."""
    device = SimulatedDevice()
    model = torch.nn.Sequential(torch.nn.Linear(30, 7), torch.nn.Linear(7, 5))
    gradients = FlatGradients(list(model.named_parameters()), bucket_bytes=100)
    assert len(gradients.buckets) == 2
    backend = DeviceBackend(device, gradients.nbytes)
    slots = GradientSlots(None, gradients.nbytes, gradients.layout, None)
    slots._slots = [GradientSlot(i, torch.zeros(gradients.nbytes, dtype=torch.uint8)) for i in range(3)]
    plane, posted, over = WatchedPlane(device), [], threading.Event()
    exchange = ExchangeThread(plane, gradients, slots, Failpoints(""), print, backend)
    order = io.StartExchange(Fence("", 1, 1), 4, 1.0)

    def announce(step: int, weight: float) -> None:
        exchange.start(order, overlap.stream, lambda event: (posted.append(event), over.set()))

    overlap = Overlap(gradients, announce)
    overlap.stream_of_thread = backend.stream_of_thread
    ran: list[float] = []
    other = device.stream()

    def backward() -> None:
        for number, bucket in enumerate(gradients.buckets):
            for at, (_, parameter) in enumerate(bucket.parameters):
                value = 10.0 * number + at

                def add(parameter=parameter, value=value) -> None:
                    ran.append(value)
                    parameter.grad.fill_(value)

                with device.on(device.compute() if at else other):
                    device.compute().run(add)
                    overlap.ready(parameter)
            if number == 0:
                assert plane.first.wait(30)
                assert sorted(ran) == [0.0, 1.0]

    for _, parameter in gradients.parameters:
        parameter.grad = torch.zeros_like(parameter)
    overlap.micro_batch(4, last=False)
    overlap.backward(4, 1.0, lambda: None)
    overlap.micro_batch(4, last=True)
    overlap.backward(4, 1.0, backward)
    if changed:
        with torch.no_grad():
            model[0].weight.grad.mul_(1.0)
    assert over.wait(30) and isinstance(posted[0], io.Exchanged)
    # torch counts the writes that the device makes late here, so the versions tell nothing without a change
    assert not changed or "was changed after the last backward" in overlap.end_order(1.0)
    slot = slots.find(4)
    slot.settle()
    for number, bucket in enumerate(gradients.buckets):
        values = [float(view.flatten()[0]) for _, _, view in bucket.views(slot.buffer)]
        assert values == [10.0 * number, 10.0 * number + 1]
    assert posted[0].gradient_digest == backend.digest_of(slot.buffer.numpy().data)
    exchange.close()
    device.close()


def test_a_digest_that_grows_with_the_buckets_is_that_of_the_whole(monkeypatch):
    monkeypatch.setattr(gradient_backend, "BLOCK_BYTES", BLOCK_BYTES)
    monkeypatch.setattr(gradient_backend, "_DIGESTED_BYTES", BLOCK_BYTES)
    device = SimulatedDevice()
    names = [(f"p{n}", torch.nn.Parameter(torch.zeros(BLOCK_BYTES // 8 + n))) for n in range(5)]
    gradients = FlatGradients(names, bucket_bytes=BLOCK_BYTES // 2)
    backend = DeviceBackend(device, gradients.nbytes)
    slot = torch.zeros(gradients.nbytes, dtype=torch.uint8)
    with backend.round(slot) as flat:
        for number, bucket in enumerate(gradients.buckets):
            backend.run(partial(bucket.view(flat).fill_, number + 1.5), ())
            backend.reduced(bucket)
        assert len(backend._sums) <= 1 and backend._digested == 2 * BLOCK_BYTES
        digest, copied = backend.digest(), backend.copy_out(slot)
    assert copied is not None
    copied.wait()
    assert digest == backend.digest_of(slot.numpy().data)
    device.close()


def test_the_backend_is_chosen_by_the_parameters():
    gradients = one_layer()
    found = settings({}, job="j", replica="r0", lighthouse=("http://127.0.0.1:1",))
    plane, backend = choose_backend(found, gradients, lambda step: None)
    assert isinstance(plane, CpuRing) and isinstance(backend, HostBackend)
    plane.close()
    device = SimulatedDevice()
    plane, backend = device_backend(device, found, gradients, lambda step: None)
    assert isinstance(plane, DeviceRing) and isinstance(backend, DeviceBackend)
    plane.close()
    device.close()
    with pytest.raises(ConfigError, match="parameters are on the CPU"):
        choose_backend(
            settings({}, replica="r0", lighthouse=("http://127.0.0.1:1",), data_plane="nccl"),
            gradients,
            print,
        )
    here, there = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta")
    with pytest.raises(ConfigError, match="one device"):
        device_of((("here", here.weight), ("there", there.weight)))
    with pytest.raises(ConfigError, match="CPUs and CUDA devices"):
        device_of((("there", there.weight),))
