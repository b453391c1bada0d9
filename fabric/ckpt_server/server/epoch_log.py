"""Logs the job's epochs, so that log lines about the trainer carry an incident id.

No decision depends on it: a server without notices (an older lighthouse, or none) serves as well.
"""

import logging

from fabric.ckpt_server.server.trainer_watch import TrainerWatch
from fabric.model import Fence, incident_id_of
from fabric.protocol.messages.network import EpochNotice
from fabric.runtime import logs
from fabric.runtime.logs import fields

log = logging.getLogger(__name__)


class EpochLog:
    """``epoch`` and ``incident_id`` are those of the newest epoch notice (at first 0 and empty)."""

    def __init__(self, trainer: TrainerWatch) -> None:
        self._trainer = trainer
        self._fence = Fence("", 0, 0)
        self.incident_id = ""
        trainer.on_change = self._on_change

    @property
    def epoch(self) -> int:
        return self._fence.epoch

    def record(self, notice: EpochNotice) -> None:
        """Log an epoch once, even if several lighthouses send its notice."""
        if (notice.fence, notice.incident_id) == (self._fence, self.incident_id):
            return
        self._fence, self.incident_id = notice.fence, notice.incident_id
        logs.describe(epoch=self.epoch, incident_id=self.incident_id, incarnation=self._trainer.incarnation)
        log.info("epoch: %s", notice.why)

    def _on_change(self, state: str) -> None:
        trainer = self._trainer
        # The next epoch may answer this change; the lighthouse then gives it the incident id of this change.
        incident_id = (
            incident_id_of(self.epoch + 1) if state != "running" and self.epoch else self.incident_id
        )
        log.info(
            "the trainer, process %d, is %s",
            trainer.pid,
            state,
            extra=fields(incident_id=incident_id, incarnation=trainer.incarnation),
        )
