"""The peer of ``snapshot.py``: fetches a checkpoint server's newest snapshot again and again, at 1 GB/s.

Told ``go`` and ``stop`` on standard input; answers ``stop`` with the bytes it got and the seconds it took.
It verifies every block, as a joining replica does.
"""

import http.client
import json
import queue
import sys
import threading
import time
from pathlib import Path
from urllib.parse import urlsplit

import xxhash

BYTES_PER_S = 1e9
BLOCKS = 2  # number of blocks in one request


class PeerConnection:
    """One connection, kept."""

    def __init__(self, url: str, token: str) -> None:
        address = urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=60)
        self._headers = {"Authorization": f"Bearer {token}"}

    def get(self, path: str, **headers: str) -> http.client.HTTPResponse:
        self._connection.request("GET", path, headers={**self._headers, **headers})
        answer = self._connection.getresponse()
        if answer.status not in (200, 206):
            raise SystemExit(
                f"snapshot_peer.py: {path} was answered {answer.status}: {answer.read()[:300]!r}"
            )
        return answer

    def fetch(self, wanted: threading.Event) -> int:
        """The newest snapshot, in ranges whose pace is given by the clock; returns the bytes that came."""
        manifest = json.loads(self.get("/v1/snapshots/latest/manifest").read())
        path = f"/v1/snapshots/{manifest['step']}/data?generation={manifest['generation']}"
        size, nbytes, blocks = manifest["block_bytes"], manifest["nbytes"], manifest["blocks"]
        into = bytearray(BLOCKS * size)
        begin, began = 0, time.monotonic()
        while begin < nbytes and wanted.is_set():
            time.sleep(max(0.0, began + begin / BYTES_PER_S - time.monotonic()))
            part = memoryview(into)[: min(len(into), nbytes - begin)]
            answer = self.get(path, Range=f"bytes={begin}-{begin + len(part) - 1}")
            at = 0
            while at < len(part):
                at += answer.readinto(part[at:])
            answer.read()
            for offset in range(0, len(part), size):
                if xxhash.xxh3_64_hexdigest(part[offset : offset + size]) != blocks[(begin + offset) // size]:
                    raise SystemExit("snapshot_peer.py: a block is not what its manifest says")
            begin += len(part)
        return begin


def main() -> None:
    url, token_file = sys.argv[1:]
    peer = PeerConnection(url, Path(token_file).read_text().strip())
    commands: queue.SimpleQueue[str] = queue.SimpleQueue()
    wanted = threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "stop":
                wanted.clear()
            commands.put(line.strip())
        commands.put("")

    threading.Thread(target=listen, daemon=True).start()
    while commands.get() == "go":
        wanted.set()
        print("going", flush=True)
        fetched, began = 0, time.monotonic()
        while wanted.is_set():
            fetched += peer.fetch(wanted)
        seconds = time.monotonic() - began
        commands.get()
        print(json.dumps({"bytes": fetched, "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
