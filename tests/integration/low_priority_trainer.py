"""Trains tiny_trainer's model with two optimizers and prints the thread of each optimizer step.

The first optimizer is torch's own code alone; the second one has a hook of the user's.
"""

import os
import threading
import time

import torch
from tiny_trainer import Samples, build

import fabric.client
from fabric.runtime import priority


def main() -> None:
    torch.set_num_threads(1)
    priority._waited_s = lambda: 0.0  # low priority holds also on a crowded host
    model, _, _ = build(64)
    first, *rest = model.parameters()
    plain = torch.optim.AdamW([first], lr=1e-2)
    hooked = torch.optim.SGD(rest, lr=1e-2, momentum=0.9)
    ran: dict[str, str] = {}
    plain._optimizer_step_code = lambda: ran.update(plain=threading.current_thread().name)
    hooked.register_step_post_hook(lambda *_: ran.update(hook=threading.current_thread().name))
    session = fabric.client.attach(model, [plain, hooked])
    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=4, seed=0)
    for step in session.steps(data, until=int(os.environ["EXAMPLE_STEPS"])):
        computed = 0
        for x, y in step:
            time.sleep(float(os.environ["EXAMPLE_PAUSE_S"]))  # this pause stands for a device that computes
            step.backward(torch.nn.functional.mse_loss(model(x), y))
            computed += 1
        plain.step()
        hooked.step()
        plain.zero_grad()
        hooked.zero_grad()
        print(f"step {step.number}: ran {computed} {ran['plain']} {ran['hook']}", flush=True)
    session.close()
