"""``sharded_trainer`` on the device path, with a simulated device in place of each rank's GPU."""

import device_trainer
import sharded_trainer


def main() -> None:
    device_trainer.simulate()
    sharded_trainer.main()
