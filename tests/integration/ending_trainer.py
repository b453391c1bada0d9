"""A loop with ``exchange`` that ends as the test says, and saves its state after ``close``.

END_STEP: the committed step at which the loop ends. END_OWN: the number of its own steps after which the loop
ends instead. END_GATE: before the step END_GATE_STEP it waits until this file exists. END_PACE_S: seconds of
a step until the file END_HURRY exists.
"""

import json
import os
import time
from pathlib import Path

import torch

import fabric.client


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(8, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    session = fabric.client.attach(model, optimizer)
    end, own = int(os.environ["END_STEP"]), int(os.environ.get("END_OWN", "-1"))
    made = 0
    while made != own if own >= 0 else session.committed_step < end:
        if session.committed_step == int(os.environ.get("END_GATE_STEP", "-1")):
            while not Path(os.environ["END_GATE"]).exists():
                time.sleep(0.01)
        if not Path(os.environ.get("END_HURRY", "/")).exists():
            time.sleep(float(os.environ["END_PACE_S"]))
        generator = torch.Generator().manual_seed(session.committed_step)
        torch.nn.functional.mse_loss(
            model(torch.randn(4, 8, generator=generator)), torch.ones(4, 2)
        ).backward()
        session.exchange(weight=4)
        optimizer.step()
        optimizer.zero_grad()
        made += 1
    session.close()
    saved = {"step": session.committed_step, "digest": session.digest()}
    Path(os.environ["END_SAVED"]).write_text(json.dumps(saved))
