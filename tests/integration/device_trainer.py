"""``tiny_trainer`` on the device path, with a simulated device of host memory in place of a GPU.

Copies and sums run on the device's thread, in the latest order that events allow; only the user's own torch
operations are immediate, as they are on any CPU.
"""

import sys
from functools import partial
from pathlib import Path

import tiny_trainer

from fabric.client.gradients.gradient_backend import device_backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ftar.simulated_device import SimulatedDevice


def simulate() -> None:
    """Let the client use a simulated device, where for parameters on a CUDA device it uses CudaDevice."""
    device = SimulatedDevice(immediate=True)
    choose = partial(device_backend, device)
    sys.modules["fabric.client.attach"].choose_backend = choose
    print("gradients on SimulatedDevice", flush=True)


def main() -> None:
    simulate()
    tiny_trainer.main()
