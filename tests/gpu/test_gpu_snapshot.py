"""On a real GPU a snapshot holds the state of its step, although the optimizer goes on."""

import pytest
import torch

from fabric.ckpt_server.format.manifest import file_digest
from fabric.ckpt_server.state.device_digest import digest_of_file
from fabric.ckpt_server.state.snapshot import CudaCopier
from fabric.ckpt_server.state.training_state import capture, host_bytes, restore

pytestmark = pytest.mark.gpu


def test_cuda_snapshot_while_the_optimizer_goes_on() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    objects = {"model": model, "optimizer": optimizer}

    def step() -> None:
        optimizer.zero_grad()
        model(torch.ones(64, 1024, device="cuda")).square().sum().backward()
        copier.fence()
        optimizer.step()

    copier = CudaCopier()
    target = bytearray(256 << 20)
    step()
    for number in range(5):
        view = capture(objects, number)
        digest = view.digest()
        copier.start(view, memoryview(target))
        reading = copier.digest(view)
        copier.fence()
        held = copier.digest(view)
        assert reading.digest() == held.digest()
        step()  # this step changes every tensor, and the copy must not see the change
        digests = copier.join()
        assert digests.digest == digest
        assert digests.state == reading.digest() == digest_of_file(memoryview(target)[: view.nbytes])
        assert file_digest(memoryview(target)[: view.nbytes]) == digest
    fresh = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
    joiner = {"model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters(), lr=1e-2)}
    assert restore(memoryview(target)[: view.nbytes], joiner) == 4
    assert capture(joiner, 4).digest() == digest
    copier.close()


def test_a_digest_on_the_gpu_is_that_of_its_boundary() -> None:
    """A layer's state has large and small tensors, and Adam's counters on the host."""
    layer = torch.nn.Linear(4096, 4096).cuda()
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2)
    objects = {"model": layer, "optimizer": optimizer}
    copier = CudaCopier()
    for number in range(3):
        layer(torch.ones(64, 4096, device="cuda")).square().sum().backward()
        torch.cuda.synchronize()
        torch.cuda._sleep(1_000_000_000)
        optimizer.step()
        boundary = torch.cuda.Event()
        boundary.record()
        view = capture(objects, number)
        reading = copier.digest(view)
        assert number == 0 or not boundary.query()  # the first one may build the kernel
        found = reading.digest()
        assert boundary.query()
        file = bytearray(
            view.header + b"".join(bytes(host_bytes(tensor.cpu())) for _, tensor in view.tensors)
        )
        assert found == digest_of_file(memoryview(file))
    copier.close()
