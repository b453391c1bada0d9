"""DistributedDataParallel: the model stays wrapped, and DDP's process group has only this process.

Fabric exchanges the gradients between replicas while backward still runs.
"""

import tempfile

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client


def main() -> None:
    with tempfile.NamedTemporaryFile() as rendezvous:
        distributed.init_process_group("gloo", init_method=f"file://{rendezvous.name}", rank=0, world_size=1)
    model = DistributedDataParallel(make_model(), gradient_as_bucket_view=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    session = fabric.client.attach(model, optimizer)
    fabric.client.ddp(model, session)
    data = session.loader(Samples(), global_batch_size=24, micro_batch_size=6)
    for step in session.steps(data, until=STEPS):
        for x, y in step:  # all but the last micro-batch run under no_sync
            step.backward(loss_fn(model, x, y))
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
