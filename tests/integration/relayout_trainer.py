"""One rank that `fabric launch` has started, in the layout that it is asked for: FSDP over two ranks, or one
process. ``Device`` stands for the device.

While the file RELAYOUT_SLOW exists, rank 1 takes RELAYOUT_FACTOR times as long.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

os.environ["SHARDED_RANK"] = os.environ["RANK"]  # read by the modules below
from layout_trainer import make
from sharded_trainer import example

import fabric.client
from fabric.client.process import step_clock

SAMPLE_S = 0.05  # seconds of the device
PAUSE_S = 0.005  # seconds of the host for each sample, in which a replica that returns can catch up


class Device:
    """A device with a time of its own: the only time that this process reports as computing.

    On a crowded host, autograd and collectives take many times as long as on an idle one, and no wait is long
    beside them. So the reported times are the device's, and the host's load is in none of them.
    """

    def __init__(self, session) -> None:
        self.seconds = 0.0
        self._clock = session._clock
        step_clock.time = self
        self._clock.lap()  # from here on the clock shows the device's time
        self._mean_s, step_clock._mean_s = step_clock._mean_s, self.measure

    def measure(self, *given) -> float:
        """Run a micro-benchmark of the host, on the host's own clock."""
        step_clock.time = time
        try:
            return self._mean_s(*given)
        finally:
            step_clock.time = self

    def monotonic(self) -> float:
        return self.seconds

    def compute(self, own_s: float, slowest_s: float) -> None:
        """Compute for ``own_s``, then wait for the slowest rank of the replica."""
        self.seconds += slowest_s
        self._clock.waits.seconds += slowest_s - own_s


def main() -> None:
    torch.set_num_threads(1)
    layout, rank = fabric.client.layout(), int(os.environ["RANK"])
    if layout.ranks > 1:
        dist.init_process_group("gloo")
    model, mesh = make("fsdp" if layout.ranks > 1 else "plain", layout.ranks, 30)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = fabric.client.attach(model, optimizer)
    device = Device(session)
    with Path(os.environ["LAUNCHED_NOTES"]).open("a") as notes:
        notes.write(f"{rank} {os.getpid()} {os.environ['MASTER_PORT']} {layout}\n")
    data = session.loader(
        example("fsdp2").samples(64), global_batch_size=16, micro_batch_size=2, seed=3, mesh=mesh
    )
    slow = Path(os.environ.get("RELAYOUT_SLOW", "no-such-file"))
    factor = float(os.environ.get("RELAYOUT_FACTOR", "8"))
    for step in session.steps(data, until=1_000_000):
        for x, y in step:
            slowest = factor if layout.ranks > 1 and slow.exists() else 1.0
            seconds = SAMPLE_S * len(x)
            device.compute(seconds * (slowest if rank == 1 else 1.0), seconds * slowest)
            time.sleep(PAUSE_S * len(x))
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    session.close()


if __name__ == "__main__":
    main()
