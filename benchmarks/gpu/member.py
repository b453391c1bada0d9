"""One member of a device ring in a process of its own: what the GPU tests and the GPU benchmark start.

    member.py '{"device": "cuda", "position": 0, "world": 2, "links": {"ipc": [[3], [4]]}, "work": [...]}'

``links`` are inherited sockets (to the next, from the previous) by the name of their plane: ``ipc`` shares
device memory, ``tcp`` goes through page-locked memory (``tcp4`` on four connections), ``nccl`` uses NCCL.
Every item of ``work`` is done by all members:

    {"plane": "ipc", "numel": 1000, "dtype": "float32", "operation": "sum", "compute": 0, "die_at": 0}

``compute`` is a number of matrix products that member 0 has on its main stream meanwhile, ``die_at`` a piece
after which this member kills itself. The answer is one JSON object per item, one a line: seconds, a digest of
the result, and the milliseconds of the products with and without the exchange beside them.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path

import torch
import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
from ftar.simulated_device import SimulatedDevice

from fabric.errors import RoundAborted
from fabric.ftar.device.cuda import CudaDevice
from fabric.ftar.device.device_ring import DeviceRing
from fabric.ftar.plane import Ring
from fabric.ftar.process_group_plane import GroupPlane, NcclFactory
from fabric.ftar.reduce_ops import Reduction

PRODUCT = 4096


def values(numel: int, dtype: str, seed: int) -> torch.Tensor:
    """The gradient of the member with this seed: of very different sizes, so that the order shows."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.randint(-6, 7, (numel,), generator=generator).float()
    return (torch.randn(numel, generator=generator) * 2.0**scale).to(getattr(torch, dtype))


def digest(tensor: torch.Tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.cpu().view(torch.uint8).numpy().data)


class RingProcess:
    """The planes of this process, and one exchange after another on them."""

    def __init__(self, config: dict) -> None:
        self.position = config["position"]
        self.cuda = config["device"] != "host"
        self.pieces, self.die_at = 0, 0
        self.sources: dict[tuple[int, str], torch.Tensor] = {}
        name = config["device"].replace("position", str(self.position))
        self.device = CudaDevice(name) if self.cuda else SimulatedDevice(immediate=True)
        ring = Ring(1, self.position, tuple(f"m{i}" for i in range(config["world"])))
        self.planes = {}
        for name, ends in config["links"].items():
            self.planes[name] = self._plane(name, config.get("options", {}))
            (next_, *further_next), (previous, *further_previous) = (
                [socket.socket(fileno=fd) for fd in end] for end in ends
            )
            self.planes[name].install(ring, next_, previous, further_next, further_previous)

    def _plane(self, name: str, options: dict) -> DeviceRing | GroupPlane:
        if name == "nccl":
            return GroupPlane(NcclFactory(self.device.device), self.device.owns)
        return DeviceRing(self.device, shares=name == "ipc", on_piece=self._on_piece, **options)

    def _on_piece(self, _step: int) -> None:
        self.pieces += 1
        if self.die_at and self.pieces >= self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def run(self, step: int, item: dict) -> dict:
        """One item of work."""
        dtype = item.get("dtype", "float32")
        source = self._source(item["numel"], dtype)
        result = torch.zeros_like(source)
        plane, reduction = self.planes[item["plane"]], Reduction(item.get("operation", "sum"))
        if item.get("die_at") and item.get("who") == self.position:
            self.die_at = item["die_at"]
        answer: dict = {}
        # This small exchange makes sure that all members are ready before the clock starts.
        small = torch.zeros(64, device=source.device)
        plane.all_reduce(1, 2 * step, small, torch.zeros_like(small))
        products = item.get("compute", 0) if self.position == 0 else 0
        if products:
            answer["alone_ms"] = self._products(products)
        self._settle()
        started = time.perf_counter()

        def exchange() -> None:
            with self.device.on(self.device.stream()):
                plane.all_reduce(1, 2 * step + 1, source, result, reduction)
            answer["seconds"] = time.perf_counter() - started

        beside = threading.Thread(target=exchange)
        if products:
            beside.start()
            answer["beside_ms"] = self._products(products)
            beside.join()
        else:
            exchange()
        self._settle()
        return {**answer, "digest": digest(result)} if item.get("digest", True) else answer

    def _source(self, numel: int, dtype: str) -> torch.Tensor:
        if (numel, dtype) not in self.sources:
            made = values(numel, dtype, self.position)
            self.sources[numel, dtype] = made.to(self.device.device) if self.cuda else made
        return self.sources[numel, dtype]

    def _settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def _products(self, count: int) -> float:
        """Milliseconds of the main stream for so many matrix products."""
        if not self.cuda:
            return 0.0
        matrix = torch.ones(PRODUCT, PRODUCT, device="cuda", dtype=torch.bfloat16)
        out = torch.empty_like(matrix)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            torch.mm(matrix, matrix, out=out)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)


def main() -> None:
    config = json.loads(sys.argv[1])
    member = RingProcess(config)
    for step, item in enumerate(config["work"]):
        try:
            answer = member.run(step, item)
        except RoundAborted as error:
            answer = {"aborted": str(error), "about": error.about}
        print(json.dumps(answer), flush=True)
        if "aborted" in answer:
            break
    # Other members may still read this process's memory, so it stays until the parent closes standard input.
    sys.stdin.read()
    os._exit(0)  # an aborted communicator may hold threads that never end


if __name__ == "__main__":
    main()
