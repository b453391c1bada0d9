"""A state from a checkpoint server into a newcomer's tensors on the GPU: fetched, verified, loaded."""

import mmap
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.format.manifest import state_digest
from fabric.ckpt_server.state.snapshot import CpuCopier, CudaCopier, build_manifest
from fabric.ckpt_server.state.training_state import capture, restore, verify
from fabric.ckpt_server.wire.server_settings import ServerSettings
from fabric.model import SnapshotRef


def state_transfer(device: str, nbytes: int, rounds: int) -> dict[str, float]:
    """GB/s of the fetch into host memory that is present, of loading from there, and of both together."""
    layer = torch.nn.Linear(4096, nbytes // 4 // 4096, bias=False, device=device)
    newcomer = torch.nn.Linear(4096, nbytes // 4 // 4096, bias=False, device=device)
    seconds: dict[str, list[float]] = {"state_fetch": [], "state_load": [], "state_usable": []}
    with tempfile.TemporaryDirectory(prefix="gpu-state-") as folder:
        handle = ServerHandle(ServerSettings("job", "r0", Path(folder) / "run", orphan_s=1.0), 1)
        try:
            manifest = _publish(handle, layer)
            ref = SnapshotRef(1, 1, state_digest(manifest))
            target = memoryview(
                mmap.mmap(-1, 2 * nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE)
            )
            fetcher = StateFetcher()
            for _ in range(rounds + 1):
                began = time.perf_counter()
                size = fetcher.fetch_state([handle.url], ref, lambda n: target[:n]).nbytes
                fetched = time.perf_counter()
                restore(target[:size], {"model": newcomer})
                if device == "cuda":
                    torch.cuda.synchronize()
                ended = time.perf_counter()
                for name, value in zip(
                    seconds, (fetched - began, ended - fetched, ended - began), strict=True
                ):
                    seconds[name].append(value)
                verify({"model": newcomer}, 1, manifest["digest"])
                with torch.no_grad():
                    newcomer.weight.zero_()
        finally:
            handle.finish(0.0)
            handle.close()
    return {f"{name}_gb_s": nbytes / statistics.median(times[1:]) / 1e9 for name, times in seconds.items()}


def _publish(handle: ServerHandle, layer: torch.nn.Module) -> dict[str, Any]:
    view = capture({"model": layer}, 1)
    make: Callable[[], CpuCopier | CudaCopier] = CudaCopier if next(layer.parameters()).is_cuda else CpuCopier
    copier = make()
    handle.begin("snapshot", 0)
    copier.start(view, handle.allocate("snapshot", 0, view.nbytes))
    manifest = build_manifest(view, copier.join(), job="job", replica="r0", generation=1, created=time.time())
    copier.close()
    handle.publish_snapshot(0, manifest)
    return manifest
