"""Starts the members of a ring as processes, linked by sockets that they inherit, and reads their answers."""

import json
import socket
import subprocess
import sys
from pathlib import Path

MEMBER = Path(__file__).with_name("member.py")
ANSWER_S = 300.0


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
    links = {plane: [pair(plane) for _ in range(world)] for plane in planes}
    started = []
    try:
        for position in range(world):
            mine = {p: (links[p][position][0].fileno(), links[p][position - 1][1].fileno()) for p in planes}
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
                    pass_fds=[fd for fds in mine.values() for fd in fds],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
        for ends in links.values():
            for one, two in ends:
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
