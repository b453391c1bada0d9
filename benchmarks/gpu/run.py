"""Everything that needs a GPU, in one call: the ``gpu`` tests, the data plane, and what a snapshot costs.

    python benchmarks/gpu/run.py
    python benchmarks/gpu/run.py --connections 1,2,4,8 --chunks 4,8,16 --slots 4,8    # TCP alone

Needs torch with CUDA, one GPU, pytest and this project's own dependencies; no network and no etcd. Takes some
minutes. Prints a table and, as the last line, one JSON object. Exit 2 without a CUDA device, 1 where a test
failed. All times are medians over rounds in which everything takes its turn.

The data plane is measured between 2 and 4 processes on one GPU: through memory that they share (``ipc``) and
through page-locked memory and TCP on this host (``tcp``). The copy limit of ``ipc`` is a plain copy within
the GPU, that of ``tcp`` a plain copy to page-locked memory, both measured here. A ring moves 2 (n - 1) / n of
the buffer over each link; that over the time is its bandwidth. On one GPU all links share its memory and the
host's, so shares of the limit are what one member sees and not what the GPU does in sum.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))

GIB = 2**30
ROUNDS = 9
WORLDS = (2, 4)
NUMEL = 64 * 2**20  # 256 MiB of float32
PLANES = ("ipc", "tcp", "tcp1")
PRODUCTS = 200


def timed(work) -> float:
    """Milliseconds of device time of ``work``."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def copy_limits() -> dict[str, float]:
    """GB/s of plain copies: within the GPU, and to and from page-locked memory."""
    here = torch.empty(GIB, dtype=torch.uint8, device="cuda").random_()
    there, pinned = torch.empty_like(here), torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    copies = {
        "copy_on_gpu_gb_s": lambda: there.copy_(here),
        "copy_to_host_gb_s": lambda: pinned.copy_(here, non_blocking=True),
        "copy_to_gpu_gb_s": lambda: there.copy_(pinned, non_blocking=True),
    }
    rows = {name: [timed(copy) for copy in [copies[name]] for _ in range(ROUNDS + 1)] for name in copies}
    return {name: GIB / statistics.median(times[1:]) / 1e6 for name, times in rows.items()}


def data_plane(
    world: int,
    device: str,
    numel: int,
    rounds: int,
    planes: Sequence[str] = PLANES,
    options: dict | None = None,
    products: Sequence[int] = (0, PRODUCTS),
) -> dict[str, float]:
    """Bandwidth of each plane, and how much longer member 0's matrix products take beside an exchange."""
    from members import run_members

    work = [
        {"plane": plane, "numel": numel, "compute": compute, "digest": False}
        for _ in range(rounds + 1)
        for compute in products
        for plane in planes
    ]
    answers = run_members(world, list(planes), work, device, options)
    broken = [a[-1]["aborted"] for a in answers if a and "aborted" in a[-1]]
    if broken or any(len(a) < len(work) for a in answers):
        raise RuntimeError(f"the ring of {world} did not end its work: {broken}")
    found: dict[str, float] = {}
    for plane in planes:
        mine = [(w, a) for w, a in zip(work, answers[0], strict=True) if w["plane"] == plane]
        seconds = statistics.median([a["seconds"] for w, a in mine if not w["compute"]][1:])
        beside = [(a["beside_ms"], a["alone_ms"]) for w, a in mine if w["compute"]][1:]
        found[f"{plane}_{world}_gb_s"] = numel * 4 * 2 * (world - 1) / world / seconds / 1e9
        if beside and all(alone for _, alone in beside):
            ratio = statistics.median([with_ / alone for with_, alone in beside])
            found[f"{plane}_{world}_compute_ratio"] = ratio
    return found


def choices(connections: str, chunks: str, slots: str, device: str = "cuda", numel: int = NUMEL) -> None:
    """Print GB/s over TCP between two members for every choice; ``chunks`` are MiB."""
    planes = [f"tcp{count}" for count in connections.split(",")]
    for chunk in chunks.split(","):
        for slot in slots.split(","):
            options = {"chunk_bytes": int(chunk) << 20, "slots": int(slot)}
            found = data_plane(2, device, numel, ROUNDS, planes, options, products=(0,))
            said = "  ".join(f"{plane} {found[f'{plane}_2_gb_s']:.2f}" for plane in planes)
            print(f"chunks of {chunk} MiB, {slot} slots: {said} GB/s", flush=True)


def snapshots() -> dict[str, float]:
    """A snapshot of 1 GiB: alone against a plain copy, and beside a step's matrix products; what the host's
    thread spends on it there."""
    from fabric.ckpt_server.state.snapshot import CudaCopier
    from fabric.ckpt_server.state.training_state import StateDescriber

    layer = torch.nn.Linear(8192, GIB // 4 // 8192, bias=False, device="cuda")
    describer = StateDescriber({"model": layer})
    view = describer.capture(0)
    target = memoryview(bytearray(view.nbytes))
    copier = CudaCopier()
    pinned = torch.empty(GIB, dtype=torch.uint8, pin_memory=True)
    flat = torch.empty(GIB, dtype=torch.uint8, device="cuda").random_()
    matrix = torch.ones(8192, 8192, device="cuda", dtype=torch.bfloat16)
    out = torch.empty_like(matrix)

    def step() -> None:
        for _ in range(40):
            torch.mm(matrix, matrix, out=out)

    def both() -> None:
        began = time.perf_counter()
        copier.start(describer.capture(0), target)
        started = time.perf_counter()
        step()
        enqueued = time.perf_counter()
        copier.fence()
        rows["host_blocked_ms"].append((started - began + time.perf_counter() - enqueued) * 1e3)

    rows: dict[str, list[float]] = {
        "plain_copy_ms": [], "snapshot_ms": [], "step_ms": [], "step_with_snapshot_ms": [],
        "host_blocked_ms": [],
    }  # fmt: skip
    for _ in range(ROUNDS + 1):
        rows["plain_copy_ms"].append(timed(lambda: pinned.copy_(flat, non_blocking=True)))
        started = time.perf_counter()
        copier.start(view, target)
        copier.join()
        rows["snapshot_ms"].append((time.perf_counter() - started) * 1e3)
        step()  # a GPU that was idle runs the next step at a higher clock
        rows["step_ms"].append(timed(step))
        step()
        rows["step_with_snapshot_ms"].append(timed(both))
        copier.join()
    copier.close()
    kept = {name: values[1:] for name, values in rows.items()}
    medians = {name: statistics.median(values) for name, values in kept.items()}

    def ratio(one: str, two: str) -> float:
        return statistics.median(a / b for a, b in zip(kept[one], kept[two], strict=True))

    return {
        **medians,
        "host_blocked_most_ms": max(kept["host_blocked_ms"]),
        "snapshot_gb_s": GIB / medians["snapshot_ms"] / 1e6,
        "snapshot_vs_plain_copy": ratio("snapshot_ms", "plain_copy_ms"),
        "step_ratio_snapshot": ratio("step_with_snapshot_ms", "step_ms"),
    }


def lanes(device: str = "cuda", matrices: int = 16, size: int = 2048) -> dict[str, float]:
    """GB/s of the copies between a flat gradient and its lanes, beside a replica that cuts each matrix in two
    by rows (long pieces) or by columns (short ones)."""
    from fabric.ftar.lanes import FlatPlaces, RankLanes
    from fabric.protocol.rules.lanes import HeldParameter, ReplicaLayout, TensorRegion, lanes_of

    shape = (size, size)
    halves = {
        "rows": [((0, 0), (size // 2, size)), ((size // 2, 0), (size // 2, size))],
        "columns": [((0, 0), (size, size // 2)), ((0, size // 2), (size, size // 2))],
    }

    def row(region: TensorRegion) -> tuple[HeldParameter, ...]:
        return tuple(HeldParameter(f"m{n}", "float32", shape, region) for n in range(matrices))

    whole = row(TensorRegion.whole(shape))
    flat = torch.zeros(FlatPlaces(whole).nbytes, dtype=torch.uint8, device=device)
    found: dict[str, float] = {}
    for name, regions in halves.items():
        cut = ReplicaLayout(tuple(row(TensorRegion(*region)) for region in regions))
        own = RankLanes(lanes_of({"r0": ReplicaLayout((whole,)), "r1": cut}), 0, 0, whole)
        parts = [(x, torch.zeros(x.size, dtype=x.dtype, device=device)) for x in own.sections]
        copies = {
            "gather": lambda own=own, parts=parts: [own.gather(x, flat, part) for x, part in parts],
            "scatter": lambda own=own, parts=parts: [own.scatter(x, part, flat) for x, part in parts],
        }
        for copy, work in copies.items():
            times = [timed(work) for _ in range(ROUNDS + 1)][1:]
            found[f"lanes_{copy}_{name}_gb_s"] = flat.numel() / statistics.median(times) / 1e6
    return found


def transfers() -> dict[str, float]:
    """A state of 1 GiB from a checkpoint server into tensors on the GPU."""
    from state import state_transfer

    return state_transfer("cuda", GIB, ROUNDS)


def training() -> dict[str, float]:
    """A whole step with fabric over the same step without it."""
    from step import steps

    return steps()


def main() -> int:
    options = argparse.ArgumentParser(description="what a GPU is needed for")
    for name in ("connections", "chunks", "slots"):
        options.add_argument(f"--{name}", default="")
    given = options.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: run this on a machine with a GPU and a torch that can use it")
        return 2
    if given.connections:
        choices(given.connections, given.chunks or "16", given.slots or "4")
        return 0
    from benchmarks.common import leave_nothing

    leave_nothing()
    tests = [sys.executable, "-m", "pytest", "-q", "-rA", "-m", "gpu", "tests/gpu"]
    passed = subprocess.run(tests, cwd=ROOT, check=False).returncode == 0
    found: dict[str, float] = {
        "gpu_tests_passed": float(passed),
        **copy_limits(),
        **lanes(),
        **snapshots(),
        **transfers(),
    }
    torch.cuda.empty_cache()
    found.update(training())
    for world in WORLDS:
        found.update(data_plane(world, "cuda", NUMEL, ROUNDS))
        found[f"ipc_{world}_share_of_copy"] = found[f"ipc_{world}_gb_s"] / found["copy_on_gpu_gb_s"]
        found[f"tcp_{world}_share_of_copy"] = found[f"tcp_{world}_gb_s"] / found["copy_to_host_gb_s"]
    print(
        f"{torch.cuda.get_device_name()}, {time.strftime('%Y-%m-%d')}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}; {NUMEL * 4 >> 20} MiB exchanged, 1 GiB of state, {ROUNDS} rounds"
    )
    for name, value in found.items():
        print(f"{name:28s} {value:12.3f}")
    print(json.dumps(found))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
