"""``tiny_trainer`` on the device path, with a simulated device of host memory in place of a GPU.

Copies and sums run on the device's thread, in the latest order that events allow; only the user's own torch
operations are immediate, as they are on any CPU.
"""

import sys
from pathlib import Path

import tiny_trainer

from fabric.client.gradients.gradient_backend import device_backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ftar.simulated_device import SimulatedDevice


def main() -> None:
    device = SimulatedDevice(immediate=True)
    # The client chooses its backend here; for parameters on a CUDA device it chooses CudaDevice.
    sys.modules["fabric.client.attach"].choose_backend = lambda found, gradients, on_piece: device_backend(
        device, found, gradients, on_piece
    )
    print("gradients on SimulatedDevice", flush=True)
    tiny_trainer.main()
