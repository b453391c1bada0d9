"""What a step would cost if its votes came from another process: the stub of an agent per host.

    python benchmarks/agent_hop.py

Today the core that votes lives in the trainer. With an agent per host it would live in the agent. Each event
of the trainer's threads would cross a local socket, as would the order that follows. The stub adds this way
and nothing else: before each event a message of its size goes to another process and comes back, while the
thread that posts it waits. The core stays in the trainer, so what an agent would take off it is not counted.

Both sides are one session each of the same model, in the same processes, in turns of a few steps, beside the
same model under DDP on gloo, as in ``overhead.py``.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import ROUNDS, WARM_UP, begin, describe, finish, interleave, paired, table, verdict
from fleet import Fleet, free_port, need_gloo
from overhead import LIMIT_S, SIZES, OnGloo, Ours, begin_world, turn_of
from torch import distributed

from fabric.client.control.engine import Engine

WORLDS = (2, 4)
MESSAGE_BYTES = 512  # a vote or an order in the wire's JSON has 200 to 500
BOUND = 1.05  # of a whole step over DDP's, at 4 MB

ECHO = "import socket; s = socket.socket(fileno=0)\nwhile m := s.recv(4096): s.send(m)"


class Hop:
    """A way to another process and back; ``on`` says whether events take it."""

    def __init__(self) -> None:
        self.on, self.trips = False, 0
        self._lock = threading.Lock()
        self._near, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._echo = subprocess.Popen([sys.executable, "-c", ECHO], stdin=far.fileno())
        far.close()
        post = Engine.post

        def by_the_way(engine: Engine, event: Any, number: int = 0) -> None:
            if self.on:
                self._go()
            post(engine, event, number)

        Engine.post = by_the_way  # type: ignore

    def _go(self) -> None:
        with self._lock:
            self._near.send(bytes(MESSAGE_BYTES))
            self._near.recv(MESSAGE_BYTES)
            self.trips += 1

    def close(self) -> None:
        self._near.close()
        self._echo.wait()


def member() -> None:
    """One replica: a step with and without the way, and one of DDP, in turns."""
    world, rounds = int(os.environ["FABRIC_REPLICAS"]), int(os.environ["BENCHMARK_ROUNDS"])
    steps = SIZES["4MB"][-1]
    torch.set_num_threads(1)
    hop = Hop()
    ours = Ours("4MB", world, 2 * (rounds + WARM_UP) * steps + 1, None)
    begin_world(1, world)

    def by_the_way() -> None:
        hop.on = True
        ours()
        hop.on = False

    sides: dict[str, Callable[[], None]] = {"without": ours, "with": by_the_way}
    sides["ddp"] = OnGloo("4MB", None)
    measured = interleave({side: turn_of(step, steps, []) for side, step in sides.items()}, rounds)
    trips = hop.trips / ((rounds + WARM_UP) * steps)
    written = {"measured": measured, "trips": trips, "members": ours.close()}
    hop.close()
    Path(os.environ["BENCHMARK_OUT"]).write_text(json.dumps(written))
    distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description="a step whose events cross a socket to another process")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    arguments = parser.parse_args()
    need_gloo()
    begin()
    rows, met, result = [], [], {}
    for world in WORLDS:
        environment = {"BENCHMARK_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}
        environment["BENCHMARK_ROUNDS"] = str(arguments.rounds)
        with Fleet(__file__, world, environment) as fleet:
            for rank in range(world):
                fleet.start(f"r{rank}")
            written = fleet.results(LIMIT_S)["r0"]
            if written["members"] != world:
                fleet.fail(f"the job ran with {written['members']} of {world} replicas")
        measured = written["measured"]
        way = paired(measured["with"], measured["without"])
        ratio = paired(measured["with"], measured["ddp"])
        rows.append(
            [
                f"{world} processes",
                *(describe(measured[side]) for side in ("without", "with", "ddp")),
                *(f"{written['trips']:.1f}", f"{way:.3f}", f"{ratio:.3f}"),
            ]
        )
        met.append((f"a step with the way / DDP, {world} processes", ratio, BOUND))
        result[str(world)] = {"with / without": way, "with / DDP": ratio, "trips a step": written["trips"]}
    columns = ["", "without", "with the way", "DDP", "ways a step", "with / without", "with / DDP"]
    table("seconds per step of 4 MB: median (lowest-highest) of the turns", columns, rows)
    for what, ratio, bound in met:
        verdict(what, ratio, at_most=bound)
    finish(result)


if __name__ == "__main__":
    member() if "--member" in sys.argv else main()
