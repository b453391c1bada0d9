"""Finds the GPUs of this host that the ranks may use, without torch.

``python -m fabric.cli.launch.devices`` prints a line for each GPU that the driver can open: index, memory in
bytes, and kind. The launcher runs it in a process of its own, because a call into the driver may
hang where a device has failed.
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
    return select_devices(environment.get("CUDA_VISIBLE_DEVICES"), [index for index, _, _ in _present()])


def device_kind(environment: Mapping[str, str]) -> tuple[str, int, float]:
    """Return the kind and the number of the GPUs that ``environment`` leaves visible, and the memory of the
    smallest one in GB; nothing for the CPU. Raises FabricError where the driver does not answer."""
    visible = visible_devices(environment)
    rows = _present() if visible else []
    seen = [row for row in rows if row[0] in visible] or rows
    if not seen:
        return "", 0, 0.0
    return seen[0][2][:64], len(visible), min(size for _, size, _ in seen) / 1e9


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


def _present() -> list[tuple[str, int, str]]:
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
    rows = [line.split(maxsplit=2) for line in answer.stdout.decode().splitlines()]
    return [(index, int(size), kind) for index, size, kind in rows]


def _openable() -> list[str]:
    """Return a line for each GPU that the driver can open, in the order of their PCI addresses."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count, handle = ctypes.c_uint(), ctypes.c_void_p()
    sizes, name = (ctypes.c_ulonglong * 3)(), ctypes.create_string_buffer(96)  # total, free and used memory
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
        return []
    lines = []
    for number in range(count.value):
        if not nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle)):
            nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(sizes))
            nvml.nvmlDeviceGetName(handle, name, len(name))
            lines.append(f"{number} {sizes[0]} {name.value.decode(errors='replace') or 'GPU'}")
    nvml.nvmlShutdown()
    return lines


if __name__ == "__main__":
    print("\n".join(_openable()))
