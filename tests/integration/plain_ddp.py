"""A plain script in the layout of PyTorch's DDP tutorial, with a snapshot; it knows nothing of fabric."""

import os
import sys
import time
from pathlib import Path

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Pairs(Dataset):
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 20, generator=generator)
        self.y = self.x @ torch.randn(20, 1, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


class Trainer:
    def __init__(
        self, model: torch.nn.Module, data: DataLoader, optimizer, save_every: int, path: str
    ) -> None:
        self.model, self.data, self.optimizer = model, data, optimizer
        self.save_every, self.path, self.epochs_run = save_every, path, 0
        if Path(path).exists():
            saved = torch.load(path, weights_only=True)
            self.model.load_state_dict(saved["model"])
            self.epochs_run = saved["epochs_run"]
        self.model = DistributedDataParallel(self.model)

    def run_epoch(self, epoch: int) -> None:
        self.data.sampler.set_epoch(epoch)
        for x, y in self.data:
            time.sleep(float(os.environ.get("EXAMPLE_PAUSE_S", "0.01")))
            self.optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(self.model(x), y)
            loss.backward()
            self.optimizer.step()
        print(f"epoch {epoch}: {len(self.data)} batches, loss {loss.item():.6f}", flush=True)

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_run, epochs):
            self.run_epoch(epoch)
            if int(os.environ["RANK"]) == 0 and epoch % self.save_every == 0:
                state = {"model": self.model.module.state_dict(), "epochs_run": epoch + 1}
                torch.save(state, self.path)


def main(epochs: int, save_every: int, path: str) -> None:
    torch.set_num_threads(1)
    init_process_group("gloo")
    dataset = Pairs(480)
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    data = DataLoader(dataset, batch_size=32, shuffle=False, sampler=DistributedSampler(dataset))
    Trainer(model, data, optimizer, save_every, path).train(epochs)
    destroy_process_group()


if __name__ == "__main__":
    main(epochs=int(sys.argv[1]), save_every=2, path=sys.argv[2])
