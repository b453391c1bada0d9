"""The trainer of a notebook: IPython runs its cells, shows their errors, and its process goes on."""

import os
import signal

from IPython.core.interactiveshell import InteractiveShell

CELLS = (
    """
import torch, fabric.client
torch.set_num_threads(1)
torch.manual_seed(1)
model = torch.nn.Linear(16, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
session = fabric.client.attach(model, optimizer)
""",
    """
def train(until):
    while session.committed_step < until:
        model(torch.ones(2, 16)).sum().backward()
        session.exchange()
        optimizer.step()
        optimizer.zero_grad()
train(5)
""",
)


def main() -> None:
    shell = InteractiveShell.instance(colors="NoColor")
    cell = os.environ.get("NOTEBOOK_CELL")
    for text in (*CELLS, *((cell, "train(10)") if cell else (f"train({os.environ['TINY_STEPS']})",))):
        shell.run_cell(text)
    if cell:
        print("the kernel goes on", flush=True)
        signal.pause()
    shell.run_cell("session.close()")
