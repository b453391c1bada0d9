"""A script for torchft's LocalSGD (TORCHFT_LOOP=local) and DiLoCo, whose two fragments take turns."""

import os
import time

import torch
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo, LocalSGD
from toy import PAUSE_S, STEPS

REPLICA, EVERY = int(os.environ["REPLICA_GROUP_ID"]), 4


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    def state_dict():
        return {"model": model.state_dict(), "inner": inner.state_dict(), "outer": outer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        use_async_quorum=False,
        load_state_dict=None,
        state_dict=None,
    )
    manager.set_state_dict_fns(lambda _: None, state_dict)
    if os.environ["TORCHFT_LOOP"] == "local":
        context = LocalSGD(manager, model, inner, sync_every=EVERY)
    else:
        context = DiLoCo(manager, [model[0], model[2]], inner, outer, sync_every=EVERY, fragment_sync_delay=1)
    generator = torch.Generator().manual_seed(REPLICA)
    with context:
        while manager.current_step() < STEPS:
            time.sleep(PAUSE_S)
            inner.zero_grad()
            model(torch.randn(6, 8, generator=generator)).square().mean().backward()
            inner.step()
    print(f"{manager.current_step()} steps", flush=True)


if __name__ == "__main__":
    main()
