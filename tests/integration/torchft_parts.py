"""A script over the parts of torchft: running statistics, accumulation, a reported error."""

import os
import time

import torch
from torch import nn
from torchft import DistributedDataParallel, Manager, ProcessGroupGloo
from toy import PAUSE_S, STEPS

BROKEN_AT = 5
REPLICA = int(os.environ["REPLICA_GROUP_ID"])


def main() -> None:
    torch.set_num_threads(1)
    manager = Manager(
        pg=ProcessGroupGloo(),
        min_replica_size=1,
        load_state_dict=None,
        state_dict=None,
        use_async_quorum=False,
    )
    torch.manual_seed(REPLICA)  # unequal weights: one replica's become the job's
    module = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 1))
    model = DistributedDataParallel(manager, module)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen = {"positions": [0]}
    manager.set_state_dict_fns(seen.update, lambda: dict(seen))
    generator = torch.Generator().manual_seed(REPLICA)
    while manager.current_step() < STEPS:
        time.sleep(PAUSE_S)
        manager.start_quorum()
        optimizer.zero_grad()
        with model.no_sync():
            for _ in range(2):
                model(torch.randn(6, 8, generator=generator)).square().mean().backward()
        if REPLICA == 1 and manager.current_step() == BROKEN_AT:
            manager.report_error(RuntimeError("a broken gradient"))
        for work in [manager.allreduce(x.grad) for x in model.parameters()]:
            work.wait()
        if manager.should_commit():
            optimizer.step()
            seen["positions"] = [*seen["positions"], manager.batches_committed()]
    print("positions", seen["positions"], flush=True)
    manager.shutdown()


if __name__ == "__main__":
    main()
