"""The tiny trainer, and beside it a model whose gradients FSDP averages over the replicas, as HSDP does.

FSDP reduces over the first dimension of the mesh, in backward. With HSDP_HOOK the hook of a model sharded
inside the replica alone does it. With SHARDED_RANKS a replica has several ranks.
"""

import os

import torch
import torch.distributed as dist
from tiny_trainer import Samples, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import fabric.client


def make_model() -> torch.nn.Sequential:
    torch.manual_seed(5)
    return torch.nn.Sequential(torch.nn.Linear(16, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))


def make_sharded(session) -> torch.nn.Sequential:
    group = fabric.client.process_group(session)
    own = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("shard",))
    hooked = "HSDP_HOOK" in os.environ
    mesh = own if hooked else fabric.client.replicate_mesh(group, own)
    model = make_model()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
        if hooked:
            assert isinstance(module, FSDPModule)
            module.set_all_reduce_hook(lambda x: dist.all_reduce(x, op=dist.ReduceOp.AVG, group=group))
    if not hooked:
        assert mesh["replicate"].get_group() is group
    return model


def main() -> None:
    torch.set_num_threads(1)
    rank, ranks = int(os.environ.get("SHARDED_RANK", "0")), int(os.environ.get("SHARDED_RANKS", "1"))
    place = os.environ.get("SHARDED_STORE", "")
    store = dist.FileStore(place, ranks) if place else dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    model, optimizer, scheduler = build(64)
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=2, seed=3)
    sharded, plain = make_sharded(session), make_model()
    for step in session.steps(data, 6):
        for x, y in step:
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        assert step.contributed, "no replica of this job joins later"
        session.barrier()  # all replicas computed different samples
        for candidate in (sharded, plain):
            torch.nn.functional.mse_loss(candidate(x), y).backward()
        for reduced, own in zip(sharded.parameters(), plain.parameters(), strict=True):
            expected = session.all_reduce(own.grad, op="mean")
            local = reduced.grad.full_tensor()
            torch.testing.assert_close(local, expected)
            assert not torch.allclose(local, own.grad), "nothing was averaged"
            same = session.all_gather(local)
            assert all(torch.equal(x, local) for x in same.values()), "the replicas have other bits"
        sharded.zero_grad()
        plain.zero_grad()
        print(f"averaged {step.number}: {len(same)}", flush=True)
    session.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
