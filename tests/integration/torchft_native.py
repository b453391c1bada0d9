"""The training of ``examples/torchft_ddp.py`` with fabric's own calls, for a comparison of the ends."""

import os

import torch
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client


def main() -> None:
    samples, replica = Samples(), int(os.environ["FABRIC_REPLICA"].removeprefix("r"))
    sampler = torch.utils.data.DistributedSampler(samples, num_replicas=2, rank=replica, shuffle=True)
    batches = torch.utils.data.DataLoader(samples, batch_size=8, sampler=sampler)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    while session.committed_step < STEPS:
        for x, y in batches:
            loss_fn(model, x, y).backward()
            session.exchange()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            if session.committed_step >= STEPS:
                break
    session.close()


if __name__ == "__main__":
    main()
