"""The launcher's line to the other hosts of its replica, over the lighthouse (``protocol.nodes``).

The launcher must keep one thread and must not wait, so a process of its own carries what it says and hears.
"""

import asyncio
import contextlib
import json
import logging
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import aiohttp
import msgspec

from fabric.errors import FabricError
from fabric.model import printable
from fabric.protocol.messages.wire import decode_value
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
# One that dies within the first time starts again after a pause, of the second time at most.
_HEALTHY_S, _LONGEST_PAUSE_S = 60.0, 30.0

log = logging.getLogger(__name__)


class NodeLink:
    """The launcher's end; ``order`` is the newest order, which ``read`` takes when ``selector`` says so."""

    def __init__(self, environment: Mapping[str, str], selector: selectors.BaseSelector) -> None:
        hidden = (LAUNCH_MARK, "FABRIC_LAYOUT")
        self._environment = {name: value for name, value in environment.items() if name not in hidden}
        self._selector = selector
        self._replica = environment.get("FABRIC_REPLICA", "")
        self._line = b""  # what the others shall hear now
        self.order = NodeOrder("wait")
        self._pause_s = 0.0
        self._start()

    def _start(self) -> None:
        """Start the process that carries the words."""
        self._began = time.monotonic()
        self._process = subprocess.Popen(
            own_program("fabric.cli.launch.node_link", f"{self._pause_s:g}"),
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=die_with(os.getpid(), signal.SIGKILL),  # noqa: PLW1509  (this process has one thread)
        )
        assert self._process.stdout is not None
        self._pending = b""
        os.set_blocking(self._process.stdout.fileno(), False)
        self._selector.register(self._process.stdout, selectors.EVENT_READ, self)

    def say(self, says: NodeSays, replica: str = "") -> None:
        """Replace what the others hear of this host; ``replica``: the one that it belongs to from now on."""
        self.order, self._replica = NodeOrder("wait"), replica or self._replica
        self._line = json.dumps({"replica": self._replica, "says": asdict(says)}).encode() + b"\n"
        self._write()

    def _write(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # ``read`` learns of the death, and says it again
            self._process.stdin.write(self._line)
            self._process.stdin.flush()

    def read(self) -> None:
        """Take the orders that have arrived. Where the process that carries them has died, start it again."""
        assert self._process.stdout is not None
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._process.stdout.fileno(), _MAX_LINE_BYTES):
                *lines, self._pending = (self._pending + data).split(b"\n")
                for line in lines:
                    self.order = msgspec.json.decode(line, type=NodeOrder)
            self.close(0.0)
            # A process that ends again and again must not take this host's time.
            is_quick = time.monotonic() - self._began < _HEALTHY_S
            self._pause_s = min(max(1.0, 2 * self._pause_s), _LONGEST_PAUSE_S) if is_quick else 0.0
            log.warning("the process that speaks with the replica's other hosts has died: it starts again")
            self._start()
            self._write()

    def close(self, wait_s: float = _LAST_S) -> None:
        """Wait a moment until the last words have arrived, and end the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        self._process.kill()
        self._process.wait()
        self._selector.unregister(self._process.stdout)
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
        key = [order.do, order.run, order.why]
        if key != knows:
            sys.stdout.write(json.dumps(asdict(replace(order, why=printable(order.why)))) + "\n")
            sys.stdout.flush()
        knows = key


async def _ask(lighthouses: Lighthouses, body: dict[str, Any]) -> NodeOrder:
    """Return the next order; while no lighthouse answers, ask again."""
    reported = ""
    while True:
        try:
            async with lighthouses.open(lighthouses.path("nodes"), body, total_s=_ANSWER_S) as answer:
                return decode_value(NodeOrder, await answer.read(), "the order")
        except (FabricError, aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            if isinstance(error, FabricError) and str(error) != reported:
                reported = str(error)
                sys.stderr.write(f"fabric: this replica's hosts cannot meet: {reported}\n")
            await asyncio.sleep(_PAUSE_S)


if __name__ == "__main__":
    time.sleep(float(sys.argv[1]))
    with contextlib.suppress(BrokenPipeError):
        asyncio.run(_carry())
