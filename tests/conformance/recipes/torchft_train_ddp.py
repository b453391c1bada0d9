"""torchft's train_ddp.py: a StatefulDataLoader with workers, a transport, and an end by `exit()`.

As with torchft, the part of a replica that is away is left out, and a replica that restarts begins its pass
again.
"""

import os
from datetime import timedelta

import recipe
import torch

AREA = "torchft"
NEEDS = ("torchdata",)
QUICK = True
UNLIKE = ("killed",)

from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: E402

REPLICA_GROUP_ID = int(os.environ.get("FABRIC_REPLICA", "r0").removeprefix("r"))
loss_fn = torch.nn.CrossEntropyLoss()


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = torch.nn.Sequential(torch.nn.Conv1d(1, 3, 5), torch.nn.ReLU(), torch.nn.MaxPool1d(2))
        self.useless = torch.nn.Embedding(100, 4)
        self.classifier = torch.nn.Sequential(
            torch.nn.Linear(18, 12), torch.nn.ReLU(), torch.nn.Linear(12, 4)
        )

    def forward(self, x):
        x = self.classifier(torch.flatten(self.cnn(x[:, None]), 1))
        return x + self.useless.weight[0]


def with_torchft():
    from fabric.integrations.torchft import (
        DistributedDataParallel,
        DistributedSampler,
        Manager,
        Optimizer,
        PGTransport,
        ProcessGroupGloo,
    )

    data = recipe.Samples()
    sampler = DistributedSampler(
        data,
        replica_rank=REPLICA_GROUP_ID,
        num_replica_groups=recipe.REPLICAS,
        group_rank=0,
        num_replicas=1,
        shuffle=True,
    )
    batch = recipe.GLOBAL_BATCH // recipe.REPLICAS
    loader = StatefulDataLoader(data, batch_size=batch, num_workers=2, sampler=sampler)

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])

    def state_dict():
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    group = ProcessGroupGloo(timeout=timedelta(seconds=5))
    manager = Manager(
        pg=group,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_ddp_{REPLICA_GROUP_ID}",
        timeout=timedelta(seconds=30),
        checkpoint_transport=PGTransport(group, timeout=timedelta(seconds=10), device="cpu"),
    )
    model = DistributedDataParallel(manager, Net())
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters()))
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss = loss_fn(model(x), y)
            loss.backward()
            optimizer.step()
            if manager.current_step() >= recipe.STEPS:
                recipe.report(model.module, optimizer.optim, steps=manager.current_step())
                exit()


def with_torch():
    data = recipe.Samples()
    sampler = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0, shuffle=True)
    loader = StatefulDataLoader(data, batch_size=recipe.GLOBAL_BATCH, num_workers=2, sampler=sampler)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    steps = 0
    while True:
        for x, y in loader:
            optimizer.zero_grad()
            loss_fn(model(x), y).backward()
            optimizer.step()
            steps += 1
            if steps >= recipe.STEPS:
                recipe.report(model, optimizer, steps=steps)
                exit()


if __name__ == "__main__":
    torch.manual_seed(0)
    with_torchft() if recipe.FABRIC else with_torch()
