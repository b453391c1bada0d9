"""The tiny trainer with a TensorBoard log of its job: every replica in a folder of its own."""

import os

import tiny_trainer
from torch.utils.tensorboard import SummaryWriter

import fabric.client
from fabric.integrations.loggers import JobLog, tensorboard


def main() -> None:
    attach = fabric.client.attach

    def logged(*arguments, **named):
        session = attach(*arguments, **named)
        writer = SummaryWriter(os.environ["TEST_LOG_DIR"])
        log = JobLog(session, tensorboard(writer), every_s=0.2)
        close = session.close

        def close_both() -> None:
            log.close()
            writer.close()
            close()

        session.close = close_both
        return session

    fabric.client.attach = logged
    tiny_trainer.main()
