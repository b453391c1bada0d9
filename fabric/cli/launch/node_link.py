"""The launcher's line to the other hosts of its replica, over the lighthouse (``protocol.nodes``).

The launcher must keep one thread and must not wait, so a process of its own carries what it says and hears.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import aiohttp
import msgspec

from fabric.errors import FabricError
from fabric.protocol.nodes import NodeOrder, NodeSays
from fabric.runtime.config import settings
from fabric.runtime.http.lighthouse_client import Lighthouses
from fabric.runtime.http.token_file import TokenFile
from fabric.runtime.process_environment import LAUNCH_MARK, own_program, process_environment
from fabric.runtime.system_calls import die_with

_ANSWER_S = 20.0  # more than a lighthouse holds a request
_PAUSE_S = 0.5
_LAST_S = 3.0  # a launcher that ends waits at most this long until the others know
_MAX_LINE_BYTES = 1 << 20


class NodeLink:
    """The launcher's end; ``order`` is the newest order that was ``read`` from ``descriptor``."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        hidden = (LAUNCH_MARK, "FABRIC_LAYOUT")
        own = {name: value for name, value in environment.items() if name not in hidden}
        self._process = subprocess.Popen(
            own_program("fabric.cli.launch.node_link"),
            env=own,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509  (this process has one thread)
        )
        assert self._process.stdout is not None
        self.descriptor = self._process.stdout.fileno()
        os.set_blocking(self.descriptor, False)
        self._pending = b""
        self._replica = environment.get("FABRIC_REPLICA", "")
        self.order = NodeOrder("wait")

    def say(self, says: NodeSays, replica: str = "") -> None:
        """Replace what the others hear of this host; ``replica``: the one that it belongs to from now on."""
        self.order, self._replica = NodeOrder("wait"), replica or self._replica
        assert self._process.stdin is not None
        line = {"replica": self._replica, "says": asdict(says)}
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(line).encode() + b"\n")
            self._process.stdin.flush()

    def read(self) -> None:
        """Take the orders that have arrived. Raises FabricError if the process that carries them has died."""
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self.descriptor, _MAX_LINE_BYTES):
                *lines, self._pending = (self._pending + data).split(b"\n")
                for line in lines:
                    self.order = msgspec.json.decode(line, type=NodeOrder)
            raise FabricError(
                "the process that speaks with the replica's other hosts has died: start the launcher again"
            )

    def close(self) -> None:
        """Wait a moment until the last words have arrived, and end the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_LAST_S)
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()


async def _carry() -> None:
    """Send each line of standard input; write each new order to standard output."""
    chosen = settings({"FABRIC_REPLICA": "spare-node", **process_environment()})
    token = TokenFile(chosen.token_file)
    lighthouses = Lighthouses(chosen.lighthouse, chosen.job, token, chosen.tls)
    reader = asyncio.StreamReader(limit=_MAX_LINE_BYTES)
    protocol = asyncio.StreamReaderProtocol(reader)
    await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, sys.stdin)
    body: dict[str, Any] = json.loads(await reader.readline() or "null")
    following = asyncio.ensure_future(reader.readline())
    knows: list[str] | None = None
    while body:
        asking = asyncio.ensure_future(_ask(lighthouses, body | {"knows": knows}))
        is_last = bool(body["says"]["gone"])
        await asyncio.wait({asking} if is_last else {asking, following}, return_when=asyncio.FIRST_COMPLETED)
        if is_last:
            return
        if following.done():
            asking.cancel()
            body, knows = json.loads(following.result() or "null"), None
            following = asyncio.ensure_future(reader.readline())
            continue
        order = await asking
        key = [order["do"], order["run"], order["why"]]
        if key != knows:
            sys.stdout.write(json.dumps(order) + "\n")
            sys.stdout.flush()
        knows = key


async def _ask(lighthouses: Lighthouses, body: dict[str, Any]) -> dict[str, Any]:
    """Return the next order; while no lighthouse answers, ask again."""
    reported = ""
    while True:
        try:
            async with lighthouses.open(lighthouses.path("nodes"), body, total_s=_ANSWER_S) as answer:
                order: dict[str, Any] = json.loads(await answer.read())
                return order
        except (FabricError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if isinstance(error, FabricError) and str(error) != reported:
                reported = str(error)
                sys.stderr.write(f"fabric: this replica's hosts cannot meet: {reported}\n")
            await asyncio.sleep(_PAUSE_S)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(_carry())
