"""A plain script with a loop of Lightning Fabric; it knows nothing of this project."""

import os
import sys
import time

import torch
from lightning_fabric import Fabric
from torch.utils.data import DataLoader, TensorDataset


def main(epochs: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    fabric = Fabric(accelerator="cpu", devices=1)
    fabric.launch()
    inputs = torch.randn(480, 20)
    dataset = TensorDataset(inputs, inputs @ torch.randn(20, 1))
    model = torch.nn.Sequential(torch.nn.Linear(20, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
    data = fabric.setup_dataloaders(DataLoader(dataset, batch_size=32, shuffle=True))
    for epoch in range(epochs):
        for x, y in data:
            time.sleep(float(os.environ.get("EXAMPLE_PAUSE_S", "0.01")))
            loss = torch.nn.functional.mse_loss(model(x), y)
            fabric.backward(loss)
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        fabric.print(f"epoch {epoch}: loss {loss.item():.6f}", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
