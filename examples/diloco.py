"""Streaming DiLoCo: each replica makes inner steps alone, and outer steps bring the replicas together."""

import os

import torch
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client

BATCH, EVERY, FRAGMENTS = 8, 8, 2


def main() -> None:
    model, samples = make_model(), Samples()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    replicas = int(os.environ.get("FABRIC_REPLICAS", "1"))
    per_replica = BATCH * EVERY // FRAGMENTS  # samples between two outer steps
    sampler = fabric.client.StepSampler(len(samples), global_batch_size=per_replica * replicas)
    loop = fabric.client.diloco(
        model,
        inner,
        outer,
        every=EVERY,
        fragments=FRAGMENTS,
        delay=1,
        alpha=0.5,
        until=STEPS,
        sampler=sampler,
    )
    loader = torch.utils.data.DataLoader(samples, batch_size=BATCH, sampler=sampler)
    while loop.committed_step < STEPS:
        for x, y in loader:
            loss_fn(model, x, y).backward()
            inner.step()  # every fourth of these hands a fragment over; its result comes one step later
            inner.zero_grad()
            if loop.committed_step >= STEPS:
                break
    loop.close()  # the model has the global parameters now, equal on all replicas


if __name__ == "__main__":
    main()
