"""``layout_trainer`` on the device path, with a simulated device in place of each rank's GPU."""

import device_trainer
import layout_trainer


def main() -> None:
    device_trainer.simulate()
    layout_trainer.main()
