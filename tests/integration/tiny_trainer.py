"""The user's loop on a tiny model: what the integration tests train, kill and compare."""

import os
import time

import torch
from pace import leave_time

import fabric.client

ON_POISON = os.environ.get("TINY_ON_POISON", "stop")


class Samples(torch.utils.data.Dataset):
    """Deterministic regression samples."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 16, generator=generator)
        self.y = self.x @ torch.randn(16, 4, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int):
        return self.x[index], self.y[index]


def build(width: int):
    torch.manual_seed(int(os.environ.get("TINY_SEED", "1")))
    model = torch.nn.Sequential(
        torch.nn.Linear(16, width), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(width, 4)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
    return model, optimizer, scheduler


def main() -> None:
    torch.set_num_threads(1)
    device = os.environ.get("TINY_DEVICE", "cpu")
    model, optimizer, scheduler = build(int(os.environ.get("TINY_WIDTH", "64")))
    model.to(device)  # the optimizer has the same parameters, whose memory moves
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=2, seed=3, on_poison=ON_POISON)
    step_s = float(os.environ.get("TINY_STEP_S", "0.02"))
    until = int(os.environ.get("TINY_STEPS", "40"))
    for step in session.steps(data, until):
        leave_time(session, until - step.number, step_s)
        for x, y in step:
            # The pause stands for a device that computes; without it the job would end before a replica
            # rejoins.
            time.sleep(step_s / 4)
            loss = torch.nn.functional.mse_loss(model(x.to(device)), y.to(device))
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x), samples=len(x))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    main()
