"""One rank that a launcher has started: the layout trainer's model, in the layout that it is asked for.

Each rank writes down its rendezvous and its process. ``LAUNCHED_DEVICE`` names the rank whose device fails,
and the step: ``1@6``. Before the failure the rank waits for the file ``LAUNCHED_GATE``. ``LAYOUT_WIDTH``
changes the model's width.
"""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist

# the samples need this variable: one rank's samples pause to give an absent replica time
os.environ["SHARDED_RANK"] = os.environ["RANK"]
from layout_trainer import GLOBAL_BATCH, make
from sharded_trainer import MICRO_BATCH, Paced, example

import fabric.client


class Samples(Paced):
    """The samples of a rank; reading one of them may make the rank's device fail."""

    def __init__(self) -> None:
        super().__init__(example("fsdp2").samples(64))
        rank, _, step = os.environ.get("LAUNCHED_DEVICE", "").partition("@")
        # Die at another micro-batch each time: two deaths at one micro-batch would be poison.
        later = 2 * int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        self.fails_at = int(step) + later if rank == os.environ["RANK"] else None

    def __getitem__(self, index: int):
        if self.fails_at is not None and self.sessions[0].committed_step >= self.fails_at:
            while not Path(os.environ["LAUNCHED_GATE"]).exists():
                time.sleep(0.01)
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return super().__getitem__(index)


def main() -> None:
    torch.set_num_threads(1)
    layout = fabric.client.layout()
    with Path(os.environ["LAUNCHED_NOTES"]).open("a") as notes:
        notes.write(f"{os.environ['RANK']} {os.getpid()} {os.environ['MASTER_PORT']} {layout}\n")
    if layout.ranks > 1:
        dist.init_process_group("gloo")
    sharded = os.environ.get("SHARDED", "fsdp") if layout.ranks > 1 else "plain"
    model, mesh = make(sharded, layout.ranks, int(os.environ.get("LAYOUT_WIDTH", "30")))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    samples = Samples()
    session = fabric.client.attach(model, optimizer)
    assert session.layout == layout
    data = session.loader(
        samples, global_batch_size=GLOBAL_BATCH, micro_batch_size=MICRO_BATCH, seed=3, mesh=mesh
    )
    for step in session.steps(data, until=int(os.environ["TINY_STEPS"])):
        for x, y in step:
            loss = torch.nn.functional.mse_loss(model(x), y)
            step.backward(loss)
            session.metrics(loss=loss.item() * len(x))
        if os.environ["RANK"] == "0":
            print(f"loss {step.number} {step.metrics['loss'] / GLOBAL_BATCH:.9g}", flush=True)
        optimizer.step()
        optimizer.zero_grad()
    session.close()
    if layout.ranks > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
