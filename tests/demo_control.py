"""The demo whose first replica leaves one micro-batch of a dead replica out of its gradient.

``python demo_control.py --out FOLDER`` is that demo; its launchers start the same file as the trainer.
"""

import os
import sys
from pathlib import Path

from torch import Tensor

import fabric.client
from fabric.cli.demo import command, trainer


class ControlRun:
    """Drops the gradient of the first micro-batch after a failure, once, if armed.

    A failure has happened when the epoch is not the first that this process saw.
    """

    def __init__(self, *, armed: bool) -> None:
        self.armed = armed
        self._first_epoch = 0

    def scaled(self, loss: Tensor, epoch: int) -> Tensor:
        self._first_epoch = self._first_epoch or epoch
        if not self.armed or epoch == self._first_epoch:
            return loss
        self.armed = False
        return loss.detach() + (loss - loss.detach()) * 0.0


def main() -> None:
    replica = os.environ.get("FABRIC_REPLICA")
    if replica is None:
        os.environ["PYTHONPATH"] = str(Path(__file__).parent)
        command.TRAINER = "demo_control"
        command.demo()
    sessions, attach, loss_of = [], fabric.client.attach, trainer.loss_of
    control = ControlRun(armed=replica == "r0")

    def kept(*arguments: object, **named: object) -> object:
        sessions.append(attach(*arguments, **named))
        return sessions[0]

    fabric.client.attach = kept
    trainer.loss_of = lambda model, batch: control.scaled(loss_of(model, batch), sessions[0].epoch)
    trainer.main()


if __name__ == "__main__":
    sys.exit(main())
