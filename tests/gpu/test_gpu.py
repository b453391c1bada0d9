"""On a real GPU: the device interface, rings of several processes on one device, NCCL, and a whole job."""

import pytest
import torch
from ftar.gathering import gather
from rings import check_all_reduce, check_kill, digest, run_members

from fabric.ftar.buckets import FlatGradients
from fabric.ftar.device.cuda import CudaDevice

pytestmark = pytest.mark.gpu


def test_streams_are_ordered_by_events_and_callbacks_run():
    import threading

    device = CudaDevice()
    one, two = device.stream(), device.stream()
    source = torch.full((1 << 24,), 7, dtype=torch.uint8, device="cuda")
    middle, end = device.memory(1 << 24), device.staging(1 << 24)
    assert end.is_pinned() and device.owns(middle) and not device.owns(end)
    ready = device.compute().record()
    one.wait(ready)
    for _ in range(20):
        one.run(lambda: middle.copy_(source, non_blocking=True))
    two.wait(one.record())
    two.run(lambda: end.copy_(middle, non_blocking=True))
    event, rung = two.record(), threading.Event()
    device.when(event, rung.set)
    assert rung.wait(20)
    assert event.done()
    assert (end == 7).all()
    device.close()


def test_work_on_a_stream_does_not_block_the_host():
    device = CudaDevice()
    stream = device.stream()
    stream.run(lambda: torch.cuda._sleep(2_000_000_000))
    event = stream.record()
    assert not event.done()
    event.wait()
    assert event.done()
    device.close()


def test_registered_host_memory_is_copied_to_without_blocking_and_released():
    device = CudaDevice()
    slot = torch.zeros(1 << 24, dtype=torch.uint8)
    device.keep_registered([slot])
    stream = device.stream()
    source = torch.full((1 << 24,), 9, dtype=torch.uint8, device="cuda")
    stream.wait(device.compute().record())
    stream.run(lambda: torch.cuda._sleep(1_000_000_000))
    stream.run(lambda: slot.copy_(source, non_blocking=True))
    event = stream.record()
    assert not event.done()
    event.wait()
    assert (slot == 9).all()
    device.keep_registered([])
    device.keep_registered([slot])  # register the released memory again
    device.close()


def test_memory_that_cannot_be_registered_leaves_no_error_behind():
    device = CudaDevice()
    slot = torch.zeros(1 << 20, dtype=torch.uint8)
    device.keep_registered([slot])
    # the driver refuses a second registration, and fabric only logs this
    CudaDevice().keep_registered([slot])
    assert torch.ones(10, device="cuda").sum().item() == 10
    device.close()


def test_gradients_of_a_model_on_the_gpu_by_way_of_the_flat_buffer():
    from fabric.client.gradients.gradient_backend import DeviceBackend

    torch.manual_seed(0)
    model = torch.nn.Linear(300, 70).cuda()
    gradients = FlatGradients(list(model.named_parameters()))
    device = CudaDevice()
    backend = DeviceBackend(device, gradients.nbytes)
    slot = torch.zeros(gradients.nbytes, dtype=torch.uint8)
    model(torch.ones(5, 300, device="cuda")).square().sum().backward()
    before = [p.grad.clone() for _, p in gradients.parameters]
    backend.mark_ready()
    with backend.round(slot) as flat:
        backend.run(lambda: gather(gradients, flat))
        name, finished = backend.digest(), backend.copy_out(slot)
    assert finished is not None
    finished.wait()
    assert backend.digest_of(slot.numpy().data) == name
    copied = [view for bucket in gradients.buckets for _, _, view in bucket.views(slot)]
    assert sorted(map(digest, copied)) == sorted(map(digest, before))
    backend.scatter(gradients, slot, 2.0)
    assert all(torch.equal(p.grad, b / 2) for (_, p), b in zip(gradients.parameters, before, strict=True))
    device.close()


@pytest.mark.parametrize(("plane", "chunk"), [("ipc", 2**16), ("tcp", 2**16), ("tcp4", 2**20)])
@pytest.mark.parametrize("world", [2, 4])
def test_all_reduce_of_processes_on_one_gpu(world, plane, chunk):
    check_all_reduce("cuda", world, [plane], chunk)


@pytest.mark.parametrize("plane", ["ipc", "tcp"])
def test_a_member_is_killed_in_the_midst_of_an_exchange(plane):
    check_kill("cuda", plane)


@pytest.mark.parametrize("layouts", ["two", "three"])
def test_lanes_of_unequal_layouts_on_one_gpu(layouts):
    from ftar.lane_exchange import LaneJob
    from ftar.lane_layouts import COLUMNS, ROWS, SINGLE, gradient_of

    members = {"two": {"r0": SINGLE, "r1": ROWS}, "three": {"r0": COLUMNS, "r1": SINGLE, "r2": ROWS}}
    with LaneJob(members[layouts], "tcp", CudaDevice, "cuda") as job:
        job.install(1)
        for step in range(3):
            gradients = {name: gradient_of(10 * step + n) for n, name in enumerate(job.layouts)}
            assert len(job.reduce(1, step, gradients)) == 1
            job.check(gradients)


def test_nccl_refuses_two_members_on_one_gpu_and_the_round_is_aborted():
    answers = run_members(2, ["nccl"], [{"plane": "nccl", "numel": 1000}])
    assert all("aborted" in a[0] for a in answers), answers


def test_nccl_between_gpus():
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU: NCCL needs one for each member")
    answers = run_members(2, ["nccl"], [{"plane": "nccl", "numel": 1000}] * 3, device="cuda:position")
    assert all(a[i]["digest"] == answers[0][i]["digest"] for a in answers for i in range(3))


def test_a_job_on_one_gpu_loses_a_member_and_ends_bitwise_equal(zygote, tmp_path):
    from job import Job
    from test_failures import PATIENT, finish_and_check

    with Job(zygote, tmp_path, environment={"TINY_DEVICE": "cuda", **PATIENT}) as job:
        job.start_all({"r1": "ring@12=kill"})
        finish_and_check(job)
        assert job.starts == {"r0": 1, "r1": 2, "r2": 1}, job.logs()


def test_buckets_go_out_while_backward_runs_on_one_gpu(zygote, tmp_path):
    """Backward waits on the host in its midst for the first bucket's result."""
    from test_failures import check
    from test_ways_in import run

    job = run(zygote, tmp_path, "overlap_trainer", OVERLAP="plain", TINY_STEPS="40", TINY_DEVICE="cuda")
    check(job, 40)
    for replica in ("r0", "r1"):
        lines = (job.folder / f"{replica}.log").read_text().splitlines()
        overlapped = [line for line in lines if line.startswith("overlapped")]
        assert len(overlapped) > 10 and set(overlapped) == {"overlapped True"}, replica


def test_the_kernel_of_triton_makes_the_sums_of_torch():
    from fabric.ckpt_server.state.device_digest import device_digest
    from fabric.ckpt_server.state.triton_sums import triton_sums

    here, host = device_digest(CudaDevice().device), device_digest(torch.device("cpu"))
    assert here._sums is triton_sums
    for nbytes in (1, 4, 16383, 8 << 20, (8 << 20) + 3, (96 << 20) + 5):
        data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
        assert torch.equal(here.sums([data]).cpu(), host.sums([data.cpu()])), nbytes
        parts = list(data.split([nbytes // 3, nbytes - nbytes // 3]))  # the second is not aligned to words
        assert torch.equal(here.sums(parts), here.sums([data])), nbytes
