"""The cost of snapshots: the copy against memcpy, the time that training is blocked, serving them to a peer.

    python benchmarks/snapshot.py [--gb 0.25] [--rounds 3]

State is 1 GB of float32. First, alone in this process, turn by turn: fabric's copy into pre-faulted memory
with all of its digests; memcpy into the same memory, on one thread and on two, of which the faster counts;
and torch's ``DefaultStager`` and ``async_save`` with the stager kept and its memory reused, staging in the
call or in a thread, of which the better counts. Then a real job of one replica (``snapshot_trainer.py``),
all defaults but the policy: turns without snapshots, with one at every step, and without but with a peer
process that fetches the newest snapshot at 1 GB/s all the time.

*Blocked* is the time from the end of one optimizer step to the start of the next one in a step with a
snapshot, less the median of that in the same round's steps without: whatever exists because of the snapshot
is in it, hooks, joins and waits for the interpreter's lock too. The state's digest, which is due at every
tenth step and comes with the copy where there is one, is measured beside, in steps without a snapshot. The
same figure of steps with neither is the noise: no snapshot is to blame for that. Forward and backward are
longer than the copy, and a timer that stands for a device. Where they need all of the CPU's cores themselves,
the copy takes its time from them; that is printed beside, without a limit, for the state is then copied by
the cores that compute.
"""

import argparse
import mmap
import shutil
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import ROUNDS, begin, describe, finish, interleave, paired, quantile, say, table, verdict
from fleet import Fleet
from snapshot_trainer import make

from fabric.ckpt_server.state.snapshot import CpuCopier
from fabric.ckpt_server.state.training_state import StateView, capture

HERE = Path(__file__).resolve().parent
THEIR_COMPUTE_S = 0.3  # async_save's step, longer than staging on a quiet machine
LIMIT_S = 480.0
RATE = 0.9e9  # the peer must get at least this many bytes per second


class Copies:
    """The same state copied in different ways; every way returns seconds."""

    def __init__(self, view: StateView) -> None:
        self._view = view
        self._memory = memoryview(mmap.mmap(-1, view.nbytes))
        self._target = np.frombuffer(self._memory, np.uint8)
        self._target[:] = 1
        self._copier = CpuCopier()
        self._arrays = [tensor.numpy().reshape(-1).view(np.uint8) for _, tensor in view.tensors]
        self._ends = len(view.header) + np.cumsum([array.size for array in self._arrays])

    def ours(self) -> float:
        """Copy as fabric does while the trainer's thread waits and helps."""
        began = time.perf_counter()
        self._copier.start(self._view, self._memory)
        self._copier.fence()
        self._copier.join()
        return time.perf_counter() - began

    def memcpy(self, threads: int) -> float:
        """Plain copies of the tensors, as large as they are."""

        def work(first: int) -> None:
            for array, end in list(zip(self._arrays, self._ends, strict=True))[first::threads]:
                self._target[end - array.size : end] = array

        began = time.perf_counter()
        others = [threading.Thread(target=work, args=(i,)) for i in range(1, threads)]
        for thread in others:
            thread.start()
        work(0)
        for thread in others:
            thread.join()
        return time.perf_counter() - began

    def check(self) -> None:
        """Check that the timed operation copies the state."""
        self._target[:] = 0
        self.ours()
        if bytes(self._memory[: len(self._view.header)]) != self._view.header:
            raise SystemExit("snapshot.py: the snapshot has no header")
        for array, end in zip(self._arrays, self._ends, strict=True):
            if not np.array_equal(self._target[end - array.size : end], array):
                raise SystemExit("snapshot.py: the snapshot is not the state")

    def close(self) -> None:
        self._copier.close()


class AsyncSave:
    """``async_save`` with a stager of its own; ``in_thread``: whether it stages beside the caller."""

    def __init__(self, state: dict[str, Any], folder: Path, in_thread: bool) -> None:
        from torch.distributed.checkpoint import FileSystemWriter
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

        options = StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=in_thread,
            use_non_blocking_copy=False,
        )
        self._stager = DefaultStager(options)
        self._writer = FileSystemWriter(folder, sync_files=False, overwrite=True)
        self._state = state

    def blocked(self) -> float:
        """Return the seconds that the save adds to a step, without writing the file."""
        from torch.distributed.checkpoint.state_dict_saver import async_save

        began = time.perf_counter()
        answer = async_save(self._state, storage_writer=self._writer, async_stager=self._stager, no_dist=True)
        time.sleep(THEIR_COMPUTE_S)
        if hasattr(answer, "staging_completion"):
            answer.staging_completion.result()
        seconds = time.perf_counter() - began - THEIR_COMPUTE_S
        (answer.upload_completion if hasattr(answer, "upload_completion") else answer).result()
        return seconds

    def stage(self) -> float:
        """Seconds of the stager alone."""
        began = time.perf_counter()
        staged = self._stager.stage(self._state)
        if hasattr(staged, "result"):
            staged.result()
        return time.perf_counter() - began

    def close(self) -> None:
        self._stager.close()


def alone(gb: float, rounds: int) -> tuple[dict[str, list[float]], float]:
    """Measure the copies alone: seconds by way, and GB of state."""
    warnings.filterwarnings("ignore", module="torch.distributed")
    torch.set_num_threads(1)
    model, optimizer = make(gb)
    model(torch.ones(1)).backward()
    optimizer.step()
    view = capture({"model": model, "optimizer": optimizer}, 0)
    copies = Copies(view)
    copies.check()
    folder = Path(tempfile.mkdtemp(prefix="fabric-benchmark-"))
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    in_call = AsyncSave(state, folder / "in-call", False)
    beside = AsyncSave(state, folder / "beside", True)
    sides: dict[str, Callable[[], float]] = {
        "fabric's copy": copies.ours,
        "memcpy, 1 thread": lambda: copies.memcpy(1),
        "memcpy, 2 threads": lambda: copies.memcpy(2),
        "DefaultStager.stage": in_call.stage,
        "async_save, staged in the call": in_call.blocked,
        "async_save, staged beside": beside.blocked,
    }
    try:
        measured = interleave(sides, rounds, warm_up=1)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for side in (in_call, beside, copies):
            side.close()
    return measured, view.nbytes / 1e9


def job(gb: float, rounds: int) -> dict[str, Any]:
    """Return the measurements of a real job's trainer."""
    environment = {"FABRIC_JOB": "snapshot", "SNAPSHOT_GB": str(gb), "SNAPSHOT_ROUNDS": str(rounds)}
    with Fleet(str(HERE / "snapshot_trainer.py"), 1, environment) as fleet:
        fleet.start("r0")
        found = fleet.results(LIMIT_S)["r0"]
    assert isinstance(found, dict)
    return found


def tell_copies(measured: dict[str, list[float]], gb: float) -> None:
    rows = [
        [name, describe(times, ""), f"{statistics.median(times) / gb * 1e3:.1f}"]
        for name, times in measured.items()
    ]
    title = f"{gb:.2f} GB, alone: milliseconds, median (lowest-highest) of the rounds"
    table(title, ["", "ms (async_save: that a step is longer by)", "ms per GB"], rows)


def tell_job(found: dict[str, Any]) -> None:
    compute_s = found["compute_s"]
    copy_s, rate = statistics.median(found["costs"]), statistics.median(found["rates"])
    say(
        f"\nforward and backward take {compute_s:.2f} s, the copy beside them {copy_s:.2f} s"
        + ("" if copy_s < compute_s else " (THE COPY TAKES LONGER: not what was meant)")
    )
    say(f"the peer got {rate / 1e9:.2f} GB/s" + ("" if rate > RATE else " (NOT what was meant)"))
    rows: list[list[object]] = []
    for name, sides in (("device (a timer)", found["measured"]), ("all cores compute", found["cpu"])):
        ratios = [
            f"{paired(sides[side], sides['plain']):.3f}" for side in ("snapshot", "serving") if side in sides
        ]
        rows.append([name, *(describe(times, "s", 1.0) for times in sides.values()), *ratios])
    rows[1][3:3] = [""]
    columns = ["plain", "snapshot at every step", "served at 1 GB/s", "snapshot / plain", "served / plain"]
    table("seconds per step of a job of one replica", ["", *columns], [[*row, ""][:6] for row in rows])
    shares = (0.5, 0.9, 0.99, 1.0)
    rows = [
        [what, len(times), *(f"{quantile(times, share) * 1e3:.2f} ms" for share in shares)]
        for what, times in (
            ("a snapshot", found["blocked"]),
            ("a digest alone", found["digest"]),
            ("neither: noise", found["noise"]),
        )
    ]
    table("blocked between two optimizer steps by", ["", "steps", "median", "p90", "p99", "most"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description="what snapshots cost")
    parser.add_argument("--gb", type=float, default=1.0, help="size of the state (default 1)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"rounds that count (default {ROUNDS})")
    wanted = parser.parse_args()
    begin()
    measured, gb = alone(wanted.gb, wanted.rounds)
    tell_copies(measured, gb)
    found = job(gb, wanted.rounds)
    tell_job(found)
    timed, cpu = found["measured"], found["cpu"]
    memcpys = zip(measured["memcpy, 1 thread"], measured["memcpy, 2 threads"], strict=True)
    saves = [statistics.median(times) for name, times in measured.items() if name.startswith("async_save")]
    result = {
        "ms_per_gb": statistics.median(measured["fabric's copy"]) / gb * 1e3,
        "vs_memcpy": paired(measured["fabric's copy"], [min(pair) for pair in memcpys]),
        "blocked_p99_ms": quantile(found["blocked"], 0.99) * 1e3,
        "step_ratio_snapshot": paired(timed["snapshot"], timed["plain"]),
        "step_ratio_serving": paired(timed["serving"], timed["plain"]),
        "async_save_blocked_ms": min(saves) * 1e3,
        "stager_ms_per_gb": statistics.median(measured["DefaultStager.stage"]) / gb * 1e3,
        "cpu_step_ratio_snapshot": paired(cpu["snapshot"], cpu["plain"]),
        "noise_p99_ms": quantile(found["noise"], 0.99) * 1e3,
        "digest_blocked_ms": statistics.median(found["digest"]) * 1e3,
    }
    say("")
    verdict("copy over the faster memcpy", result["vs_memcpy"], at_most=1.3)
    verdict("blocked, p99, ms", result["blocked_p99_ms"], at_most=5)
    verdict("step with a snapshot over one without", result["step_ratio_snapshot"], at_most=1.05)
    verdict("step while a peer fetches 1 GB/s over one without", result["step_ratio_serving"], at_most=1.03)
    finish({key: round(value, 4) for key, value in result.items()})


if __name__ == "__main__":
    main()
