"""Starts the members of a ring as processes, linked by sockets that they inherit, and reads their answers."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from fabric.ftar.device.connections import connections_for

MEMBER = Path(__file__).with_name("member.py")
ANSWER_S = 300.0


def count_of(plane: str) -> int:
    """How many connections a link of ``plane`` has: tcp4 has four, and plain tcp as many as in a job here."""
    if not plane.startswith("tcp"):
        return 1
    return int(plane[3:] or connections_for(len(os.sched_getaffinity(0))))


def pair(plane: str) -> tuple[socket.socket, socket.socket]:
    """One link: a unix socket where device memory is to be shared, TCP elsewhere."""
    if plane == "ipc":
        return socket.socketpair()
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return one, server.accept()[0]


def run_members(
    world: int, planes: list[str], work: list[dict], device: str = "cuda", options: dict | None = None
) -> list[list[dict]]:
    """Return each member's answers to the items of ``work``; fewer for one that died or was aborted."""
    links = {p: [[pair(p) for _ in range(count_of(p))] for _ in range(world)] for p in planes}
    started = []
    try:
        for position in range(world):
            mine = {
                p: [[x[0].fileno() for x in to[position]], [x[1].fileno() for x in to[position - 1]]]
                for p, to in links.items()
            }
            config = {
                "device": device,
                "position": position,
                "world": world,
                "links": mine,
                "work": work,
                "options": options or {},
            }
            started.append(
                subprocess.Popen(
                    [sys.executable, str(MEMBER), json.dumps(config)],
                    pass_fds=[fd for sides in mine.values() for side in sides for fd in side],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for ends in links.values():
            for one, two in (x for link in ends for x in link):
                one.close()
                two.close()
        answers = [_read(process, len(work)) for process in started]
        for process in started:
            if process.stdin is not None:
                process.stdin.close()
            process.wait(ANSWER_S)
        return answers
    finally:
        for process in started:
            if process.poll() is None:
                process.kill()
                process.wait()


def _read(process: subprocess.Popen, count: int) -> list[dict]:
    assert process.stdout is not None
    found: list[dict] = []
    while len(found) < count and (line := process.stdout.readline()):
        found.append(json.loads(line))
        if "aborted" in found[-1]:
            break
    return found
