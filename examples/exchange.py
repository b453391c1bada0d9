"""session.exchange: one line, between backward and the update, in a training loop with its own data
loader."""

import os
import zlib

import torch
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client


def main() -> None:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    session = fabric.client.attach(model, optimizer)
    name = os.environ.get("FABRIC_REPLICA", "")  # each replica shuffles in its own order
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    loader = torch.utils.data.DataLoader(Samples(), batch_size=8, shuffle=True, generator=generator)

    while session.committed_step < STEPS:
        for x, y in loader:
            loss_fn(model, x, y).backward()
            session.exchange(weight=len(x))  # .grad is the average over all replicas' samples now
            optimizer.step()
            optimizer.zero_grad()
            if session.committed_step >= STEPS:
                break
    session.close()


if __name__ == "__main__":
    main()
