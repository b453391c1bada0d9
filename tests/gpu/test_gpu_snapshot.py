"""On a real GPU a snapshot holds the state of its step, although the optimizer goes on."""

import pytest
import torch

from fabric.ckpt_server.format.manifest import file_digest
from fabric.ckpt_server.state.snapshot import CudaCopier
from fabric.ckpt_server.state.training_state import capture, restore

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
        step()  # this step changes every tensor, and the copy must not see the change
        digests = copier.join()
        assert digests.digest == digest
        assert file_digest(memoryview(target)[: view.nbytes]) == digest
    fresh = torch.nn.Sequential(*(torch.nn.Linear(1024, 1024) for _ in range(8))).cuda()
    joiner = {"model": fresh, "optimizer": torch.optim.AdamW(fresh.parameters(), lr=1e-2)}
    assert restore(memoryview(target)[: view.nbytes], joiner) == 4
    assert capture(joiner, 4).digest() == digest
    copier.close()
