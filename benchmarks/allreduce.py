"""All-reduce on the CPU compared with gloo: the ratio of speeds by data plane, members and size.

Every side ends with the reduced gradient in memory of its own while the local gradient survives. gloo reduces
in place, so it gets the copy that this takes; our planes reduce from one buffer into another. Sides:

- tcp: our ring over TCP on loopback, payloads digested, as between hosts;
- shm: our ring over shared memory, both buffers in memory from the plane;
- shm_copy: the same with both buffers in private memory, as when somebody else owns them (DDP);
- gloo: torch.distributed on loopback, one flat tensor per call, as by default;
- gloo_halves: the same in two halves at once, for its two threads; the better of the two is the peer.

Members are processes with one torch thread each. A measure is the slowest member's time for a few exchanges
in a row, after one that lines the members up. Also printed, not part of the result: the ring without digests.
"""

import argparse
import contextlib
import functools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import common

SIZES = {"64KB": 2**16, "1MB": 2**20, "16MB": 2**24, "64MB": 2**26, "256MB": 2**28}
WORLDS = (2, 3, 4)
OURS = ("tcp", "tcp_bare", "shm", "shm_copy")
PEERS = ("gloo", "gloo_halves")
SIDES = OURS + PEERS
# A measurement reduces about MEASURE_BYTES in total, in 1 to MOST_REPEATS exchanges.
MEASURE_BYTES, MOST_REPEATS = 2**25, 40
NEEDED = {
    ("tcp", 2): {"1MB": 2.0, "16MB": 1.25, "64MB": 1.25, "256MB": 1.25},
    ("tcp", 3): {"1MB": 2.0, "16MB": 1.0, "64MB": 1.0, "256MB": 1.0},
    ("tcp", 4): {"1MB": 2.0, "16MB": 1.05, "64MB": 1.05, "256MB": 1.05},
    **{("shm", n): {"16MB": 3.0, "64MB": 3.0, "256MB": 3.0} for n in WORLDS},
    **{("shm_copy", n): {"16MB": 1.8, "64MB": 1.8, "256MB": 1.8} for n in WORLDS},
}


class WorkerProcesses:
    """``world`` worker processes, told what to do by one line each."""

    def __init__(self, world: int, folder: str) -> None:
        rings = [tcp_ring(world), tcp_ring(world), unix_ring(world)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self._processes = []
        for i in range(world):
            fds = [s.fileno() for ring in rings for s in ring[i]]
            command = [sys.executable, __file__, "--member", json.dumps([world, i, folder, fds])]
            self._processes.append(
                subprocess.Popen(
                    command,
                    pass_fds=fds,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for ring in rings:
            for pair in ring:
                for s in pair:
                    s.close()

    def ask(self, *request: object) -> tuple[float, float]:
        """Let all workers run it; return the slowest worker's seconds and the processor seconds of all.

        End the benchmark if a worker failed.
        """
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(answers):
            raise SystemExit("a member ended early: see its error above")
        seconds, processor = zip(*(json.loads(answer) for answer in answers), strict=True)
        return max(seconds), sum(processor)

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(timeout=30)


def tcp_ring(world: int) -> list[tuple[socket.socket, socket.socket]]:
    links = []
    for _ in range(world):
        with socket.create_server(("127.0.0.1", 0)) as server:
            one = socket.create_connection(server.getsockname())
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            links.append((one, server.accept()[0]))
    return [(links[i][0], links[i - 1][1]) for i in range(world)]


def unix_ring(world: int) -> list[tuple[socket.socket, socket.socket]]:
    links = [socket.socketpair() for _ in range(world)]
    return [(links[i][0], links[i - 1][1]) for i in range(world)]


def member(world: int, position: int, folder: str, fds: list[int]) -> None:
    """A worker: read requests, answer with seconds."""
    import torch
    import torch.distributed as dist

    from fabric.ftar.host.cpu_ring import CpuRing
    from fabric.ftar.plane import Ring

    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "gloo"), world)
    dist.init_process_group("gloo", store=store, rank=position, world_size=world)
    planes = {"tcp": CpuRing(), "tcp_bare": CpuRing(checksum=False), "shm": CpuRing()}
    ring = Ring(1, position, tuple(f"m{i}" for i in range(world)))
    for plane, (one, two) in zip(planes.values(), zip(fds[::2], fds[1::2], strict=True), strict=True):
        plane.install(ring, socket.socket(fileno=one), socket.socket(fileno=two))
    planes["shm_copy"] = planes["shm"]
    shared = [planes["shm"].allocate(0)] * 2
    private = [torch.zeros(0)] * 2
    step = 0

    def prepare(nbytes: int) -> Callable[[str], Callable[[], None]]:
        nonlocal shared, private
        for memory in shared:
            planes["shm"].unregister(memory)
        shared = [planes["shm"].allocate(nbytes).view(torch.float32) for _ in range(2)]
        private = [torch.ones(nbytes // 4) for _ in range(2)]
        shared[0].fill_(1)

        def exchange(side: str) -> None:
            nonlocal step
            step += 1
            if side == "gloo":
                private[1].copy_(private[0])
                dist.all_reduce(private[1])
                return
            if side == "gloo_halves":
                private[1].copy_(private[0])
                for work in [dist.all_reduce(half, async_op=True) for half in private[1].chunk(2)]:
                    work.wait()
                return
            source, result = shared if side == "shm" else private
            planes[side].all_reduce(1, step, source, result)

        return lambda side: lambda: exchange(side)

    make = prepare(4)
    for line in sys.stdin:
        action, *arguments = json.loads(line)
        seconds = processor = 0.0
        if action == "size":
            make = prepare(arguments[0])
        else:
            exchange, repeats = make(arguments[0]), arguments[1]
            exchange()
            began, spent = time.perf_counter(), time.process_time()
            for _ in range(repeats):
                exchange()
            seconds = (time.perf_counter() - began) / repeats
            processor = (time.process_time() - spent) / repeats
            result = (shared if arguments[0] == "shm" else private)[1]
            assert float(result[0]) == float(result[-1]) == world, "the sum is wrong"
        print(json.dumps([seconds, processor]), flush=True)
    for plane in planes.values():
        plane.close()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="all-reduce against gloo")
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="for a quick look")
    parser.add_argument("--sizes", default=",".join(SIZES), help="for a quick look")
    parser.add_argument("--rounds", type=int, default=common.ROUNDS)
    parser.add_argument("--member", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.member:
        member(*json.loads(arguments.member))
        return
    dist = common.need("torch.distributed", "the comparison with gloo")
    if not dist.is_gloo_available():
        common.absent("this torch was built without gloo, the peer of this comparison")
    common.begin()
    worlds, sizes = [int(x) for x in arguments.worlds.split(",")], arguments.sizes.split(",")
    measured = {world: measure(world, sizes, arguments.rounds) for world in worlds}
    seconds = {world: {size: measured[world][size][0] for size in sizes} for world in worlds}
    rows = [
        [f"{world} x {size}", *(common.describe(seconds[world][size][side]) for side in SIDES)]
        for world in worlds
        for size in sizes
    ]
    common.table("Time of one exchange: median (lowest-highest)", ["members x gradient", *SIDES], rows)
    ratios, processor = (
        {
            side: {w: {size: ratio(measured[w][size][kind], side) for size in sizes} for w in worlds}
            for side in OURS
        }
        for kind in (0, 1)
    )
    rows = [
        [f"{world} x {size}", *(f"{ratios[side][world][size]:.2f}" for side in OURS)]
        for world in worlds
        for size in sizes
    ]
    common.table("Times as fast as the better gloo", ["members x gradient", *OURS], rows)
    rows = [
        [f"{world} x {size}", *(f"{processor[side][world][size]:.2f}" for side in OURS)]
        for world in worlds
        for size in sizes
    ]
    common.table("Processor time of the better gloo over ours", ["members x gradient", *OURS], rows)
    common.say("")
    for (side, world), least in NEEDED.items():
        for size, needed in least.items():
            if world in worlds and size in sizes:
                value = ratios[side][world][size]
                common.verdict(f"{side} with {world} members, {size}", value, at_least=needed)
    common.finish(
        {
            f"{side}_{what}": {str(w): found[side][w] for w in worlds}
            for what, found in (("vs_gloo", ratios), ("processor_vs_gloo", processor))
            for side in ("tcp", "shm", "shm_copy")
        }
    )


Measures = dict[str, list[float]]


def measure(world: int, sizes: list[str], rounds: int) -> dict[str, tuple[Measures, Measures]]:
    """Return by size and side, per round, the slowest member's seconds and all members' processor time."""
    found = {}
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.closing(WorkerProcesses(world, folder)) as members,
    ):
        for size in sizes:
            nbytes = SIZES[size]
            members.ask("size", nbytes)
            repeats = max(1, min(MOST_REPEATS, MEASURE_BYTES // nbytes))
            processor: Measures = {side: [] for side in SIDES}

            def run(side: str, repeats: int, processor: Measures) -> float:
                seconds, spent = members.ask("run", side, repeats)
                processor[side].append(spent)
                return seconds

            sides = {side: functools.partial(run, side, repeats, processor) for side in SIDES}
            seconds = common.interleave(sides, rounds)
            found[size] = seconds, {side: spent[-rounds:] for side, spent in processor.items()}
    return found


def ratio(measures: Measures, side: str) -> float:
    """Return the time of gloo's better side divided by the time of ``side``."""
    peer = min(PEERS, key=lambda name: statistics.median(measures[name]))
    return common.paired(measures[peer], measures[side])


if __name__ == "__main__":
    main()
