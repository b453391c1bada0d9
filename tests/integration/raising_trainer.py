"""A loop of its own whose exchanges follow an exception at step RAISE_AT, or that counts failed exchanges."""

import os
import sys

import torch

import fabric.client
from fabric.errors import CollectiveFailed, ConfigError, RoundsFailed

ERRORS = {"value": ValueError, "collective": CollectiveFailed, "config": ConfigError}


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch.nn.Linear(16, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    session = fabric.client.attach(model, optimizer)
    try:
        while session.committed_step < int(os.environ["TINY_STEPS"]):
            model(torch.ones(2, 16)).sum().backward()
            session.exchange()
            if str(session.committed_step) == os.environ.get("RAISE_AT"):
                raise ERRORS[os.environ.get("RAISE_KIND", "value")]("the user's own mistake")
            optimizer.step()
            optimizer.zero_grad()
    except RoundsFailed as error:
        print(f"caught: {error}", flush=True)
        session.close()
        sys.exit(3)
    session.close()
