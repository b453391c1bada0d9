"""A host with a device, as accelerate sees it. The device is the processor in truth."""

import os
from typing import Any

import torch


class _WithDevice:
    """torch as it is, but for ``cuda``."""

    class cuda:  # noqa: N801  (torch's name)
        @staticmethod
        def is_available() -> bool:
            return True

        @staticmethod
        def device_count() -> int:
            return 1

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def pretend() -> None:
    """Let accelerate find a device from now on, in this process. accelerate joins others by gloo then."""
    import accelerate.state

    accelerate.state.torch = _WithDevice()
    # accelerate's own variable for the device that it uses, whatever it finds.
    os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
