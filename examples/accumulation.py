"""Gradient accumulation by micro-batches. Each micro-batch is weighted by its number of tokens.

So the averaged gradient is the mean over all tokens of the global batch, however micro-batches divide
them."""

import torch
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client


def main() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = fabric.client.attach(model, optimizer)
    # 48 samples a step in micro-batches of 4 give 12 micro-batches; each of two replicas accumulates 6.
    data = session.loader(Samples(), global_batch_size=48, micro_batch_size=4)
    for step in session.steps(data, until=STEPS):
        for x, y in step:
            tokens = x[:, 0] > 0  # a mask whose sum differs from one micro-batch to the next
            if not tokens.any():
                continue
            step.backward(loss_fn(model, x[tokens], y[tokens]), weight=int(tokens.sum()))
        optimizer.step()
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    main()
