"""torchft: a training script for torchft, whose import line is changed and nothing else."""

import os
from datetime import timedelta

import torch
from toy import STEPS, Samples, loss_fn, make_model

from fabric.integrations.torchft import (
    DistributedDataParallel,
    DistributedSampler,
    Manager,
    Optimizer,
    ProcessGroupGloo,
)

REPLICA = int(os.environ["REPLICA_GROUP_ID"])
REPLICAS = int(os.environ["NUM_REPLICA_GROUPS"])


def main() -> None:
    samples = Samples()
    sampler = DistributedSampler(samples, replica_rank=REPLICA, num_replica_groups=REPLICAS, shuffle=True)
    batches = torch.utils.data.DataLoader(samples, batch_size=8, sampler=sampler)

    def load_state_dict(state):
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optim"])
        scheduler.load_state_dict(state["scheduler"])

    def state_dict():
        states = {"model": model, "optim": optimizer, "scheduler": scheduler}
        return {name: value.state_dict() for name, value in states.items()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"train_ddp_{REPLICA}",
        timeout=timedelta(seconds=30),
    )
    model = DistributedDataParallel(manager, make_model())
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    while True:
        for x, y in batches:
            optimizer.zero_grad()
            loss = loss_fn(model, x, y)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            print(f"step {manager.current_step()}: {manager.num_participants()} replicas, loss {loss:.4f}")
            if manager.current_step() >= STEPS:
                exit()


if __name__ == "__main__":
    main()
