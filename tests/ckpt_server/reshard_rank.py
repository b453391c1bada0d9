"""Starts the ranks of a layout: real processes with a gloo group, forked from a process with torch imported.

A request on standard input is a JSON list with an order for each rank; the answer is a list of the ranks'
results. A rank builds the model in its layout. Then the rank either trains, publishes its part at its own
checkpoint server and dies, or it takes over a state of another layout from such servers.
"""

import json
import mmap
import os
import sys
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # imported early: this import takes a second at a rank's first optimizer
import torch.distributed as dist
from server_support import start_server
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fabric.ckpt_server.durable.reader import find_checkpoint
from fabric.ckpt_server.durable.storage import Storage
from fabric.ckpt_server.durable.writer import write
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.format.manifest import of_rank
from fabric.ckpt_server.reshard import Layout, RankFile, ServedRankFile, StoredRankFile, reshard
from fabric.ckpt_server.state.snapshot import CpuCopier, build_manifest
from fabric.ckpt_server.state.training_state import capture, restore, verify
from fabric.ckpt_server.wire.channel_protocol import DurableJob
from fabric.errors import StateError
from fabric.model import SnapshotRef
from fabric.runtime.failpoints import Failpoints

STEP = 3


def build(layout: str, width: int, seed: int) -> dict[str, Any]:
    """``whole``, ``fsdp``, ``tp`` or ``fsdp*tp`` (2 of tp) over all ranks of the group; trained by AdamW."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(24, width),
        torch.nn.ReLU(),
        torch.nn.Linear(width, 7, bias=False),
        torch.nn.LayerNorm(7),
    )
    world = dist.get_world_size()
    if "tp" in layout:
        shape = (world // 2, 2) if layout == "fsdp*tp" else (world,)
        names = ("dp", "tp") if layout == "fsdp*tp" else ("tp",)
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        if layout == "fsdp*tp":
            fully_shard(model, mesh=mesh["dp"])
    elif layout == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,), mesh_dim_names=("dp",)))
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2)}


def train(objects: dict[str, Any], steps: int) -> None:
    for step in range(steps):
        inputs = torch.linspace(-1, 1, 48).reshape(2, 24) + step
        objects["model"](inputs).square().sum().backward()
        objects["optimizer"].step()
        objects["optimizer"].zero_grad()


def whole_sums(objects: dict[str, Any]) -> dict[str, list[float]]:
    """Gather every tensor of model and optimizer: return its sum, and its sum weighted by position."""
    found = {}
    tensors = dict(objects["model"].state_dict())
    for index, state in objects["optimizer"].state_dict()["state"].items():
        tensors |= {f"{index}.{key}": value for key, value in state.items()}
    for name, tensor in tensors.items():
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        flat = full.double().reshape(-1)
        found[name] = [float(flat.sum()), float((flat * torch.arange(1, flat.numel() + 1)).sum())]
    return found


def give(objects: dict[str, Any], run_dir: str, durable: str) -> dict[str, Any]:
    """Publish this rank's part of the trained state, and write it to storage."""
    train(objects, STEP)
    view = capture(objects, STEP)
    handle = start_server(Path(run_dir), orphan_s=600.0)
    copier = CpuCopier()
    handle.begin("snapshot", 0)
    memory = handle.allocate("snapshot", 0, view.nbytes)
    copier.start(view, memory)
    manifest = build_manifest(view, copier.join(), job="job", replica="r0", generation=1, created=1.0)
    copier.close()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, manifest["digest"])
    if len(digests) > 1:
        manifest = of_rank(manifest, dist.get_rank(), digests)
    handle.publish_snapshot(0, manifest)
    write(DurableJob(durable, "job", "r0", 7), manifest, memory[: view.nbytes], Failpoints(""))
    return {"url": handle.url, "digests": digests, "nbytes": view.nbytes, "sums": whole_sums(objects)}


def take(objects: dict[str, Any], sources: list[list[str]], digest: str, durable: str) -> dict[str, Any]:
    """Take over the state from servers, or from the named storage; return the new state's digest and the
    bytes read.
    """
    before = capture(objects, 0).digest()
    state = SnapshotRef(1, STEP, digest)
    parts: list[RankFile] = []
    files = ExitStack()
    for rank, urls in enumerate(sources):
        if durable:
            checkpoint = find_checkpoint(Storage(durable).at("job"), "job", state)
            parts.append(StoredRankFile(rank, checkpoint, files))
        else:
            parts.append(ServedRankFile(rank, urls, state, StateFetcher(rank=rank)))
    found: list[memoryview] = []

    def allocate(nbytes: int) -> memoryview:
        found.append(memoryview(mmap.mmap(-1, nbytes)))
        return found[0]

    try:
        manifest = reshard(parts, state, Layout(objects), allocate, rank=dist.get_rank())
        restore(found[0], objects)
        verify(objects, STEP, manifest["digest"])
    except StateError as error:
        return {"error": str(error), "untouched": capture(objects, 0).digest() == before}
    sums = whole_sums(objects)
    train(objects, 1)  # one step, so that the optimizer has state
    fetched = sum(sum(part.sources.values()) for part in parts)
    return {"fetched": fetched, "nbytes": manifest["nbytes"], "digest": manifest["digest"], "sums": sums}


def be(told: dict[str, Any]) -> dict[str, Any]:
    """One rank's life."""
    torch.set_num_threads(1)
    store = f"file://{told['store']}"
    dist.init_process_group("gloo", init_method=store, rank=told["rank"], world_size=told["world"])
    objects = build(told["layout"], told["width"], told["seed"])
    if "run_dir" in told:
        return give(objects, told["run_dir"], told["durable"])
    return take(objects, told["sources"], told["digest"], told.get("durable", ""))


def fork(told: dict[str, Any]) -> tuple[int, int]:
    """Fork a process for a rank; return its process id and the pipe with its result."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writer)
        return pid, reader
    try:
        os.close(reader)
        answer = json.dumps(be(told)).encode()
        with os.fdopen(writer, "wb") as pipe:
            pipe.write(answer)
    except BaseException:  # noqa: BLE001  (the child must never return into the parent's loop)
        traceback.print_exc()
    finally:
        os._exit(0)  # end as a killed trainer: close nothing, send nothing


def main() -> None:
    print("ready", flush=True)
    for line in sys.stdin:
        ranks = [fork(told) for told in json.loads(line)]
        answers = []
        for pid, reader in ranks:
            with os.fdopen(reader, "rb") as pipe:
                data = pipe.read()
            os.waitpid(pid, 0)
            answers.append(json.loads(data) if data else {"error": "this rank crashed"})
        print(json.dumps(answers), flush=True)


if __name__ == "__main__":
    main()
