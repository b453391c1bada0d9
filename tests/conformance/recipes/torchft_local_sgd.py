"""torchft's LocalSGD: each replica makes four steps alone, and then the weights are averaged.

Replicas that train alone train otherwise than one process, by design.
"""

import os

import recipe
import torch

AREA = "torchft"
STEPS = 20
UNLIKE = ("killed",)
EVERY = 4

torch.manual_seed(0)
replica = int(os.environ.get("FABRIC_REPLICA", "r0").removeprefix("r"))
data = recipe.Samples()
sampler = torch.utils.data.DistributedSampler(data, num_replicas=recipe.REPLICAS, rank=replica)
loader = torch.utils.data.DataLoader(data, recipe.GLOBAL_BATCH // recipe.REPLICAS, sampler=sampler)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batches():
    while True:
        yield from loader


def inner_step(x, y):
    optimizer.zero_grad()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()


if recipe.FABRIC:
    from fabric.integrations.torchft import LocalSGD, Manager, ProcessGroupGloo

    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        use_async_quorum=False,
        load_state_dict=lambda _: None,
        state_dict=lambda: {"model": model.state_dict(), "optim": optimizer.state_dict()},
        replica_id=f"train_localsgd_{replica}",
    )
    with LocalSGD(manager, model, optimizer, sync_every=EVERY):
        for x, y in batches():
            inner_step(x, y)
            if manager.current_step() >= recipe.STEPS:
                break
else:
    for number, (x, y) in enumerate(batches()):
        inner_step(x, y)
        if number + 1 == recipe.STEPS * EVERY:
            break
recipe.report(model)
