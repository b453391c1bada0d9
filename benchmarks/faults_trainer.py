"""The trainer of ``faults.py``: 84 million parameters, AdamW, and compute that stands for a device.

A micro-batch is a timer, during which this process uses no CPU, or (mode ``cpu``) a fixed amount of matrix
products; then its gradients are really written. Every step appends one line of JSON to ``FAULTS_DIR``:
monotonic times in seconds of each micro-batch and of the commit. Other orders to a trainer (hold the
interpreter's lock, stay in user code) lie in a file with its name, which it takes away.
"""

import ctypes
import json
import os
import time
from pathlib import Path

import torch
from faults_model import MatrixModel

import fabric.client

MICRO_BATCHES = 6
TIMER_S = 0.25
PRODUCTS = 6
FOLDER = Path(os.environ["FAULTS_DIR"])
NAME = os.environ["FABRIC_REPLICA"]


def compute(mode):
    """Spend the time of a device, or do real work in this process."""
    if mode == "cpu":
        a = b = torch.full((1024, 1024), 1 / 1024)
        for _ in range(PRODUCTS):
            a = a @ b
    else:
        time.sleep(TIMER_S)


def act():
    """Perform once the order in the file with this replica's name."""
    path = FOLDER / f"{NAME}.act"
    try:
        what, seconds = path.read_text().split()
    except OSError:
        return
    path.unlink()
    if what == "hold":
        # PyDLL keeps the interpreter's lock, so no thread of this process runs Python during the call.
        ctypes.PyDLL(None).usleep(int(float(seconds) * 1e6))
    else:
        time.sleep(float(seconds))


def main():
    torch.set_num_threads(1)
    log = os.open(FOLDER / f"{NAME}.steps", os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
    model = MatrixModel()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    session = fabric.client.attach(model, optimizer)
    samples = torch.arange(6000, dtype=torch.float32)
    data = session.loader(samples, global_batch_size=MICRO_BATCHES, micro_batch_size=1, seed=1)
    for step in session.steps(data, until=1_000_000):
        batches = []
        mode = (FOLDER / "mode").read_text()
        for batch in step:
            began = time.monotonic()
            act()
            compute(mode)
            step.backward(model(float(batch[0]) / 6000))
            batches.append((began, time.monotonic()))
        line = {
            "step": step.number,
            "end": time.monotonic(),
            "contributed": step.contributed,
            "batches": batches,
        }
        line |= {"mode": mode, "members": len(session.members), "pid": os.getpid()}
        os.write(log, json.dumps(line).encode() + b"\n")
        optimizer.step()
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    main()
