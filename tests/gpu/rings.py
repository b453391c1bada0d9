"""A ring of processes, for the GPU tests and for their check on host memory."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "gpu"))
from member import digest, values
from members import run_members

from fabric.ftar.ring_schedule import segment_bounds

__all__ = ["check_all_reduce", "check_kill", "digest", "run_members"]


def documented(world: int, numel: int, dtype: str, operation: str) -> torch.Tensor:
    """The documented sum: a left fold in ring order, with 16-bit types summed in float32."""
    inputs = [values(numel, dtype, seed) for seed in range(world)]
    wide = torch.float32 if inputs[0].dtype.itemsize == 2 else inputs[0].dtype
    kernel = {"min": torch.minimum, "max": torch.maximum}.get(operation, torch.add)
    result = torch.empty_like(inputs[0])
    for s, (start, stop) in enumerate(segment_bounds(numel, world)):
        total = inputs[s][start:stop].to(wide, copy=True)
        for k in range(1, world):
            total = kernel(total, inputs[(s + k) % world][start:stop].to(wide))
        result[start:stop] = total
    return result


def check_all_reduce(device: str, world: int, planes: list[str], chunk: int = 64 * 1024) -> None:
    """Check that every member has the documented bits, for sizes around a chunk, types and operations."""
    work = [
        {"plane": plane, "numel": numel, "dtype": dtype, "operation": operation}
        for plane in planes
        for numel in (1, chunk // 4 - 1, chunk * world + 1)
        for dtype, operation in (("float32", "sum"), ("bfloat16", "sum"), ("float32", "max"))
    ]
    options = {"chunk_bytes": chunk, "slots": 4, "group": 2}
    answers = run_members(world, planes, work, device, options)
    for number, item in enumerate(work):
        expected = digest(documented(world, item["numel"], item["dtype"], item["operation"]))
        assert [a[number].get("digest") for a in answers] == [expected] * world, (item, answers)


def check_kill(device: str, plane: str) -> None:
    """Check that two members abort and name the third, which kills itself during the exchange."""
    work = [
        {"plane": plane, "numel": 100_000},
        {"plane": plane, "numel": 1_000_000, "die_at": 40, "who": 1},
    ]
    options = {"chunk_bytes": 16 * 1024, "slots": 4, "group": 2}
    answers = run_members(3, [plane], work, device, options)
    assert answers[0][0]["digest"] == answers[2][0]["digest"]
    for position in (0, 2):
        assert answers[position][-1].get("about") == "m1", answers
