"""A small language model in the layout of nanoGPT's loop; it knows nothing of fabric.

The loop draws random blocks of text one batch ahead, accumulates gradients, sets the learning rate by hand.
"""

import math
import os
import sys
import time

import numpy as np
import torch
from torch.nn import functional

batch_size, block_size, width, accumulation = 4, 16, 24, 2
max_iters, warmup, learning_rate, grad_clip, eval_interval = int(sys.argv[1]), 5, 1e-2, 1.0, 20
out_path = sys.argv[2]

torch.set_num_threads(1)
torch.manual_seed(1337)
text = np.random.default_rng(0).integers(0, 32, 4000)


def get_batch(size: int = batch_size) -> tuple[torch.Tensor, torch.Tensor]:
    starts = torch.randint(len(text) - block_size, (size,))
    x = torch.stack([torch.from_numpy(text[i : i + block_size]) for i in starts])
    y = torch.stack([torch.from_numpy(text[i + 1 : i + 1 + block_size]) for i in starts])
    return x, y


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.dropout = torch.nn.Embedding(32, width), torch.nn.Dropout(0.1)
        self.mix, self.head = torch.nn.GRU(width, width, batch_first=True), torch.nn.Linear(width, 32)

    def forward(self, x, targets=None):
        logits = self.head(self.mix(self.dropout(self.embedding(x)))[0])
        loss = None if targets is None else functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return logits, loss


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
scaler = torch.amp.GradScaler("cpu", enabled=False)


@torch.no_grad()
def estimate_loss() -> float:
    model.eval()
    losses = [model(*get_batch(8))[1].item() for _ in range(3)]
    model.train()
    return sum(losses) / len(losses)


def get_lr(it: int) -> float:
    return learning_rate * min(1, (it + 1) / warmup) * 0.5 * (1 + math.cos(math.pi * it / max_iters))


x, y = get_batch()
iter_num, best = 0, float("inf")
while True:
    for group in optimizer.param_groups:
        group["lr"] = get_lr(iter_num)
    if iter_num % eval_interval == 0:
        best = min(best, estimate_loss())
        torch.save({"model": model.state_dict(), "iter_num": iter_num}, out_path)
    for _ in range(accumulation):
        logits, loss = model(x, y)
        loss = loss / accumulation
        x, y = get_batch()
        scaler.scale(loss).backward()
    time.sleep(float(os.environ.get("EXAMPLE_PAUSE_S", "0.01")))
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {iter_num}: loss {loss.item() * accumulation:.4f}", flush=True)
    iter_num += 1
    if iter_num >= max_iters:
        break
