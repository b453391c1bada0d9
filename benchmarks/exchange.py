"""All-reduce over a slow network in fewer bytes: FABRIC_EXCHANGE int8 and bfloat16 against float32.

Each member is a process in a network namespace of its own. A cable joins each namespace to a bridge in one
more namespace, and ``tc`` limits what a member sends to --mbit million bits per second. The machine's own
network stays unchanged. Needs root, ip and tc.

A measure is the slowest member's time for one exchange, after one that lines the members up. All members must
get equal bits. ``wire`` is what one member sends: 2 (N - 1) / N of the gradient. The ratio of the two is the
share of the network's rate that an exchange reaches.
"""

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import time
from typing import Self

import common

FORMS = ("float32", "bfloat16", "int8")
NETWORK = "10.89.0"
PORT = 29001
NEEDED = 3.0


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


class ShapedNetwork:
    """``world`` namespaces around a bridge, each of which sends at most ``mbit``; ``with`` makes and ends
    it."""

    def __init__(self, world: int, mbit: int) -> None:
        self._mbit = mbit
        self.hosts = [f"fabric-{os.getpid()}-{i}" for i in range(world)]
        self._middle = f"fabric-{os.getpid()}-middle"

    def __enter__(self) -> Self:
        try:
            for name in [self._middle, *self.hosts]:
                run("ip", "netns", "add", name)
            run("ip", "-n", self._middle, "link", "add", "bridge", "type", "bridge")
            run("ip", "-n", self._middle, "link", "set", "bridge", "up")
            for i, name in enumerate(self.hosts):
                self._join(name, i)
        except subprocess.CalledProcessError as error:
            self.__exit__()
            common.absent(f"a network cannot be made here: {error.stderr.strip()}")
        return self

    def _join(self, name: str, i: int) -> None:
        middle, cable = self._middle, f"cable{i}"
        run("ip", "link", "add", cable, "netns", middle, "type", "veth", "peer", "name", "eth", "netns", name)
        run("ip", "-n", middle, "link", "set", cable, "master", "bridge", "up")
        run("ip", "-n", name, "address", "add", f"{NETWORK}.{i + 1}/24", "dev", "eth")
        run("ip", "-n", name, "link", "set", "eth", "up")
        shaped = ("rate", f"{self._mbit}mbit", "burst", "256kb", "latency", "50ms")
        run("ip", "netns", "exec", name, "tc", "qdisc", "add", "dev", "eth", "root", "tbf", *shaped)

    def __exit__(self, *_: object) -> None:
        for name in [self._middle, *self.hosts]:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


class Members:
    """A process per namespace; each does what one line of JSON says."""

    def __init__(self, hosts: list[str], elements: int) -> None:
        self._processes = []
        for i, host in enumerate(hosts):
            command = [sys.executable, __file__, "--member", json.dumps([len(hosts), i, elements])]
            self._processes.append(
                subprocess.Popen(
                    ["ip", "netns", "exec", host, *command],
                    env={**os.environ, "OMP_NUM_THREADS": "1"},
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )

    def exchange(self, form: str) -> float:
        """Return the slowest member's seconds. End the benchmark if a member failed or has other bits."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.write(form + "\n")
            process.stdin.flush()
        answers = [process.stdout.readline() for process in self._processes if process.stdout is not None]
        if not all(answers):
            raise SystemExit("a member ended early: see its error above")
        seconds, digests = zip(*(json.loads(answer) for answer in answers), strict=True)
        if len(set(digests)) != 1:
            raise SystemExit(f"the members have different results as {form}")
        return max(seconds)

    def close(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            process.wait(timeout=30)


def dial(host: str) -> socket.socket:
    """Connect to a member that may not listen yet."""
    deadline = time.monotonic() + 60
    while True:
        try:
            sock = socket.create_connection((host, PORT), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
            continue
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return sock


def member(world: int, position: int, elements: int) -> None:
    """A worker: read a form, exchange as it says, and answer with seconds and the digest of the result."""
    import torch

    from fabric.ftar.host.cpu_ring import CpuRing
    from fabric.ftar.host.exchange_buffers import raw
    from fabric.ftar.host.piece_moves import digest
    from fabric.ftar.plane import Ring
    from fabric.ftar.reduce_ops import Reduction

    torch.set_num_threads(1)
    with socket.create_server((f"{NETWORK}.{position + 1}", PORT)) as server:
        following = dial(f"{NETWORK}.{(position + 1) % world + 1}")
        previous = server.accept()[0]
    plane = CpuRing()
    plane.install(Ring(1, position, tuple(f"m{i}" for i in range(world))), following, previous)
    source = torch.randn(elements, generator=torch.Generator().manual_seed(position))
    result = torch.zeros(elements)
    for step, line in enumerate(sys.stdin):
        plane.all_reduce(1, 2 * step, torch.ones(64), torch.zeros(64))
        began = time.perf_counter()
        plane.all_reduce(1, 2 * step + 1, source, result, Reduction(exchange=line.strip(), coarse=elements))
        print(json.dumps([time.perf_counter() - began, digest(raw(result)).hex()]), flush=True)
    plane.close()


def main() -> None:
    parser = argparse.ArgumentParser(description="all-reduce over a slow network in fewer bytes")
    parser.add_argument("--worlds", default="2,3", help="numbers of members")
    parser.add_argument("--mbit", type=int, default=1000, help="what a member may send, in million bits/s")
    parser.add_argument("--size", type=int, default=64, help="the gradient in MiB")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--member", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.member:
        member(*json.loads(arguments.member))
        return
    if os.geteuid() or not shutil.which("ip") or not shutil.which("tc"):
        common.absent("network namespaces need root, and iproute2 with ip and tc")
    common.begin()
    nbytes = arguments.size * common.MB
    rows, found = [], {}
    for world in map(int, arguments.worlds.split(",")):
        with (
            ShapedNetwork(world, arguments.mbit) as network,
            contextlib.closing(Members(network.hosts, nbytes // 4)) as members,
        ):
            sides = {form: (lambda form=form: members.exchange(form)) for form in FORMS}
            seconds = common.interleave(sides, arguments.rounds, warm_up=1)
        wire_s = 2 * (world - 1) / world * nbytes * 8 / (arguments.mbit * 1e6)
        rows.append([world, *(common.describe(seconds[form]) for form in FORMS), f"{wire_s * 1e3:.0f} ms"])
        for form in FORMS[1:]:
            found[f"{form}_{world}"] = common.paired(seconds["float32"], seconds[form])
        found[f"share_of_rate_{world}"] = round(wire_s / statistics.median(seconds["float32"]), 4)
    size = f"{arguments.size} MiB at {arguments.mbit} Mbit/s"
    common.table(f"Time of one exchange, {size}: median (lowest-highest)", ["members", *FORMS, "wire"], rows)
    common.say("")
    for name, value in found.items():
        if name.startswith("int8"):
            common.verdict(f"int8 / float32 with {name[5:]} members", value, at_least=NEEDED)
    common.finish(found)


if __name__ == "__main__":
    main()
