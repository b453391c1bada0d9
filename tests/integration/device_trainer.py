"""``tiny_trainer`` on the device path, with a simulated device of host memory in place of a GPU.

Copies, sums and digests run on the device's thread, in the latest order that events allow; only the user's
own torch operations are immediate, as they are on any CPU.
"""

import sys
from functools import partial
from pathlib import Path

import tiny_trainer

from fabric.ckpt_server.state.snapshot import CudaCopier
from fabric.client.gradients.gradient_backend import device_backend

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from ftar.simulated_device import SimulatedCopyStream, SimulatedDevice


def simulate() -> None:
    """Let the client use a simulated device, where for parameters on a CUDA device it uses a GPU."""
    device = SimulatedDevice(immediate=True)
    attach = sys.modules["fabric.client.attach"]
    attach.choose_backend = partial(device_backend, device)
    attach.make_copier = lambda _: CudaCopier(SimulatedCopyStream(device))
    print("gradients on SimulatedDevice", flush=True)


def main() -> None:
    simulate()
    tiny_trainer.main()
