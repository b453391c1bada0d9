"""Finds the GPUs of this host that the ranks may use, without torch.

``python -m fabric.cli.launch.devices`` prints the indices of the GPUs that the driver can open. The launcher
runs it in a process of its own, because a call into the driver may hang where a device has failed.
"""

import ctypes
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import fabric
from fabric.errors import FabricError

_DRIVER = Path("/dev/nvidiactl")
_LOOK_S = 30.0


def visible_devices(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the GPUs that ``environment`` leaves visible, as CUDA_VISIBLE_DEVICES names them; empty: the
    CPU. Raises FabricError where the driver does not answer."""
    if not _DRIVER.exists():
        return ()
    return select_devices(environment.get("CUDA_VISIBLE_DEVICES"), _present())


def select_devices(listed: str | None, present: Sequence[str]) -> tuple[str, ...]:
    """Return the devices of ``listed`` (CUDA_VISIBLE_DEVICES, None: not set) that are ``present``."""
    if listed is None:
        return tuple(present)
    devices: list[str] = []
    for word in (part.strip() for part in listed.split(",")):
        if word.isdecimal():
            devices += [word] if word in present and word not in devices else []
        elif word.startswith(("GPU-", "MIG-")):
            devices.append(word)
        else:
            break  # like CUDA, end the list at a word that names no device
    return tuple(devices)


def _present() -> tuple[str, ...]:
    command = [sys.executable, "-m", "fabric.cli.launch.devices"]
    try:
        answer = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_LOOK_S,
            check=True,
            cwd=Path(fabric.__file__).resolve().parent.parent,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise FabricError(
            f"the GPU driver of this host does not say which GPUs there are ({error}): look at `nvidia-smi`, "
            "or set CUDA_VISIBLE_DEVICES= for the CPU"
        ) from error
    return tuple(answer.stdout.decode().split())


def _openable() -> list[str]:
    """Return the indices of the GPUs that the driver can open, in the order of their PCI addresses."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count, handle = ctypes.c_uint(), ctypes.c_void_p()
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    numbers = [
        n for n in range(count.value) if not nvml.nvmlDeviceGetHandleByIndex_v2(n, ctypes.byref(handle))
    ]
    nvml.nvmlShutdown()
    return [str(number) for number in numbers]


if __name__ == "__main__":
    print(" ".join(_openable()))
