"""A replica of one process, and a timed wait that stands for its device.

While the file HELD_SLOW exists, another thread holds the interpreter for HOLD_S at a time, as a library does
that computes with the interpreter's lock. So each operation of this process takes longer, also in a
micro-benchmark, and no processor is busier for it.
"""

import ctypes
import os
import threading
import time
from pathlib import Path

import torch
from tiny_trainer import Samples, build

import fabric.client

# Long beside the operations of a micro-batch: the process takes some 1.5 times as long, and each operation
# many times as long. So a loaded host does not change the verdict of the micro-benchmark.
MICRO_BATCH_S = 0.15
HOLD_S = 0.04


def hold_interpreter(while_exists: Path) -> None:
    """Sleep with the interpreter's lock, again and again, while the file exists."""
    libc = ctypes.PyDLL(None)  # unlike CDLL, it keeps the lock during a call
    while True:
        if while_exists.exists():
            libc.usleep(int(HOLD_S * 1e6))
        else:
            time.sleep(HOLD_S)


def main() -> None:
    torch.set_num_threads(1)
    model, optimizer, scheduler = build(64)
    session = fabric.client.attach(model, optimizer, state={"scheduler": scheduler})
    with Path(os.environ["LAUNCHED_NOTES"]).open("a") as notes:
        notes.write(f"0 {os.getpid()} {os.environ['MASTER_PORT']} {session.layout}\n")
    slow = Path(os.environ.get("HELD_SLOW", "no-such-file"))
    threading.Thread(target=hold_interpreter, args=(slow,), daemon=True).start()
    data = session.loader(Samples(100), global_batch_size=24, micro_batch_size=6, seed=3)
    for step in session.steps(data, until=1_000_000):
        for x, y in step:
            time.sleep(MICRO_BATCH_S)
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    main()
