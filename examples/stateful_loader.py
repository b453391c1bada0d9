"""torchdata's StatefulDataLoader: a replica that joins goes on where its data slot was."""

import os

import torch
from torchdata.stateful_dataloader import StatefulDataLoader
from toy import STEPS, Samples, loss_fn, make_model

import fabric.client


class OwnSamples(Samples):
    """The samples of one replica, with their numbers."""

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        return index, *super().__getitem__(index)


def main() -> None:
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    order = torch.Generator().manual_seed(int(os.environ.get("FABRIC_REPLICA", "r0")[-1]))
    loader = StatefulDataLoader(OwnSamples(), batch_size=4, shuffle=True, generator=order)
    session = fabric.client.attach(model, optimizer, local_state={"data": loader})
    for _, x, y in session.batches(loader):
        optimizer.zero_grad()
        loss_fn(model, x, y).backward()
        session.exchange(weight=len(x))
        optimizer.step()
        if session.committed_step == STEPS:
            break
    session.close()


if __name__ == "__main__":
    main()
