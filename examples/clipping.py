"""Clipping: after the inner loop ``.grad`` is the average, bitwise equal on all replicas, so they clip
alike."""

import torch
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client


def main() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = fabric.client.attach(model, optimizer)
    data = session.loader(Samples(), global_batch_size=24, micro_batch_size=6)
    for step in session.steps(data, until=STEPS):
        for x, y in step:
            step.backward(loss_fn(model, x, y))
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
        print(f"step {step.number}: norm {norm.item():.9g}")
        optimizer.step()
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    main()
