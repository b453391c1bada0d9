"""``tiny_trainer``'s model on the GPU that all replicas share."""

import os
import time

import torch
from tiny_trainer import Samples, build

import fabric.client


def main() -> None:
    torch.manual_seed(1)
    model, _, _ = build(64)
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step / 50))
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=2, seed=3)
    step_s = float(os.environ.get("TINY_STEP_S", "0.02"))
    for step in session.steps(data, until=int(os.environ.get("TINY_STEPS", "60"))):
        if len(session.members) < int(os.environ.get("FABRIC_REPLICAS", "1")):
            time.sleep(step_s * 6)  # while a member is missing, give the restarted replica time to come back
        for x, y in step:
            time.sleep(step_s / 4)
            step.backward(torch.nn.functional.mse_loss(model(x.cuda()), y.cuda()))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    session.close()
