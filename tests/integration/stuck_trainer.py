"""A replica that gets stuck on the way: in C code that keeps the interpreter's lock, or its ranks in
collectives that one of them does not come to, or that do not match. ``STUCK`` says how; step 6 is where."""

import ctypes
import os
import time

import sharded_trainer
import tiny_trainer
import torch
import torch.distributed as dist

STEP = 6


def stuck_in_c() -> None:
    """A lock that is taken twice: no signal ends that wait, and PyDLL keeps the interpreter's lock."""
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
    """Samples that get stuck at the first one of some step."""

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
