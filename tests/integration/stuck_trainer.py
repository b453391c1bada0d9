"""A replica that hangs: in C code that keeps the interpreter's lock, in a collective that a rank does not
enter, or in collectives that do not match. ``STUCK`` names the kind of hang, which comes at step 6.
"""

import ctypes
import os
import time

import sharded_trainer
import tiny_trainer
import torch
import torch.distributed as dist

STEP = 6


def stuck_in_c() -> None:
    """Take a lock twice in C: no signal ends this wait, and PyDLL keeps the interpreter's lock."""
    lock, mutex = ctypes.PyDLL(None), ctypes.create_string_buffer(64)
    for _ in range(2):
        lock.pthread_mutex_lock(mutex)


def stay_away() -> None:
    time.sleep(600)


def get_stuck() -> None:
    how = os.environ["STUCK"]
    if how == "c":
        stuck_in_c()
    elif how == "absent":
        stay_away() if dist.get_rank() else dist.all_reduce(torch.ones(3))
    elif dist.get_rank():
        dist.all_reduce(torch.ones(5))
    else:
        dist.broadcast(torch.ones(3), src=0)


class Stuck:
    """Samples of which the first of a given step hangs."""

    def __init__(self, samples) -> None:
        self.samples = samples
        self.seen = 0

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int):
        self.seen += 1
        if self.seen == int(os.environ.get("STUCK_AT", "60")):
            get_stuck()
        return self.samples[index]


def main() -> None:
    if os.environ["STUCK"] == "c":
        samples = tiny_trainer.Samples
        tiny_trainer.Samples = lambda size: Stuck(samples(size))
        tiny_trainer.main()
    else:
        paced = sharded_trainer.Paced
        sharded_trainer.Paced = lambda samples: Stuck(paced(samples))
        sharded_trainer.main()


if __name__ == "__main__":
    main()
