"""Entry of the process that writes one durable checkpoint: ``python -m fabric.ckpt_server.durable --fd N``.

The checkpoint server starts it with the snapshot's memory as descriptor N. Standard input has the job and the
manifest as one line of JSON, and stays open: when it closes, the server has ended, and this process ends at
once. This process writes the outcome to standard output as one line of JSON. Exit code 0: the checkpoint (or
this rank's part) is written; 1: it is not."""

import argparse
import json
import mmap
import os
import signal
import sys
import threading

from msgspec.structs import asdict

from fabric.ckpt_server.durable.storage import StorageAway, StorageGone
from fabric.ckpt_server.durable.writer import write
from fabric.ckpt_server.format.manifest import check_manifest
from fabric.ckpt_server.wire.channel_protocol import DurableJob
from fabric.errors import FabricError, StateError
from fabric.protocol.messages.wire import decode_as
from fabric.runtime.config import armed_points
from fabric.runtime.failpoints import Failpoints
from fabric.runtime.priority import lower_priority

_NICENESS = 10


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m fabric.ckpt_server.durable", description="Durable writer"
    )
    parser.add_argument("--fd", type=int, required=True, help="descriptor of the snapshot's memory")
    descriptor = parser.parse_args().fd
    # A batch job that ends sends SIGTERM to all its processes. The server decides when this process ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        body = json.loads(sys.stdin.buffer.readline())
        order, snapshot = decode_as(DurableJob, body["order"], "order"), check_manifest(body["manifest"])
        if not order.urgent:
            lower_priority(_NICENESS)
        _end_with(sys.stdin.fileno())
        nbytes = snapshot["nbytes"]
        if nbytes > os.fstat(descriptor).st_size:
            raise StateError("the snapshot's memory is smaller than its manifest says")
        # Map the snapshot private and writable, because torch takes no read-only memory.
        mapped = mmap.mmap(descriptor, nbytes, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)
        outcome = write(order, snapshot, memoryview(mapped), Failpoints(armed_points()))
    except (FabricError, OSError, ValueError, KeyError, TypeError) as error:
        why = {"away": isinstance(error, StorageAway), "gone": isinstance(error, StorageGone)}
        text = " ".join(str(error).split())[:2000]
        sys.stdout.write(json.dumps({"ok": False, "error": text, **why}) + "\n")
        return 1
    sys.stdout.write(json.dumps({"ok": True, **asdict(outcome)}) + "\n")
    return 0


def _end_with(descriptor: int) -> None:
    """End this process when the server's end of the pipe is closed: no process waits for the outcome then."""

    def wait() -> None:
        while os.read(descriptor, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # do not wait for torch's own threads
