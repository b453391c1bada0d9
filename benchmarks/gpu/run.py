"""Everything that needs a GPU, in one call: the ``gpu`` tests, then what a snapshot costs.

Prints a table and, as the last line, one JSON object. Exit 2 without a CUDA device.
"""

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
STATE_BYTES = 2**30
ROUNDS = 9


def timed(work) -> float:
    """Milliseconds of device time of ``work``."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device: run this on a machine with a GPU")
        return 2
    tests = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests"]
    passed = subprocess.run(tests, cwd=ROOT, check=False).returncode == 0
    sys.path.insert(0, str(ROOT))
    from fabric.ckpt_server.snapshot import CudaCopier
    from fabric.ckpt_server.state import capture

    layer = torch.nn.Linear(8192, STATE_BYTES // 4 // 8192, bias=False, device="cuda")
    view = capture({"model": layer}, 0)
    target = memoryview(bytearray(view.nbytes))
    copier = CudaCopier()
    pinned = torch.empty(STATE_BYTES, dtype=torch.uint8, pin_memory=True)
    flat = torch.empty(STATE_BYTES, dtype=torch.uint8, device="cuda").random_()
    work = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        for _ in range(40):
            torch.mm(work, work)

    rows = {"plain_copy_ms": [], "snapshot_ms": [], "step_ms": [], "step_with_snapshot_ms": []}
    for _ in range(ROUNDS + 1):
        rows["plain_copy_ms"].append(timed(lambda: pinned.copy_(flat, non_blocking=True)))
        started = time.perf_counter()
        copier.start(view, target)
        copier.join()
        rows["snapshot_ms"].append((time.perf_counter() - started) * 1e3)
        rows["step_ms"].append(timed(step))

        def both() -> None:
            copier.start(view, target)
            step()
            copier.fence()

        rows["step_with_snapshot_ms"].append(timed(both))
        copier.join()
    medians = {name: statistics.median(values[1:]) for name, values in rows.items()}
    summary = {
        "gpu_tests_passed": float(passed),
        **medians,
        "snapshot_gb_per_s": STATE_BYTES / medians["snapshot_ms"] / 1e6,
        "vs_plain_copy": medians["snapshot_ms"] / medians["plain_copy_ms"],
        "step_ratio_snapshot": medians["step_with_snapshot_ms"] / medians["step_ms"],
    }
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, 1 GiB of state, {ROUNDS} rounds")
    for name, value in summary.items():
        print(f"{name:28s} {value:12.3f}")
    print(json.dumps(summary))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
