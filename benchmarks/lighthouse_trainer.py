"""The trainer of ``lighthouse.py``: a step of 50 ms that uses hardly any processor time, and the time of each
step's end (monotonic seconds, a line each) in the file ``BENCHMARK_STEPS``."""

import os
import time

import torch

import fabric.client

STEP_S = 0.05
REPLICAS = 3


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # Without a launcher, the search for averages of the model takes 0.3 s of some steps: 3, 30, 300, 3000.
    session = fabric.client.attach(model, optimizer, unshared="ignore")
    samples = torch.randn(REPLICAS * 16, 64)
    data = session.loader(samples, global_batch_size=REPLICAS, micro_batch_size=1, seed=1)
    path = os.environ["BENCHMARK_STEPS"]
    log = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644) if path else -1
    for step in session.steps(data, until=1_000_000):
        for batch in step:
            time.sleep(STEP_S)
            step.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if log >= 0:
            os.write(log, f"{time.monotonic()!r}\n".encode())
    session.close()


if __name__ == "__main__":
    main()
