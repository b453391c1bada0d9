"""One rank's file of a state, read block by block as needed: from checkpoint servers or a durable checkpoint.

It reads whole blocks, because a block has a digest.
"""

import mmap
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from typing import Any

from fabric.ckpt_server.durable.reader import DurableCheckpoint, RankShardFile
from fabric.ckpt_server.fetch.fetcher import StateFetcher
from fabric.ckpt_server.fetch.multi_source import runs_of
from fabric.ckpt_server.format.safetensors_file import FileHeader, read_preamble
from fabric.errors import StateError
from fabric.model import SnapshotRef

Allocate = Callable[[int], memoryview]


class LayoutChanged(StateError):
    """The parts of a state are of different layouts: a replica has stored the state in its new layout."""


class RankFile:
    """The file of ``rank``.

    ``file``: memory of the file's size, in which only the blocks read so far are valid; they are verified.
    ``manifest``: known after the first read. ``sources``: bytes read by URL. ``compression``: whether the
    bytes came compressed, and why.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.file = memoryview(b"")
        self.manifest: dict[str, Any] = {}
        self.sources: dict[str, int] = {}
        self.compression = ""
        self._there: set[int] = set()

    @property
    def ranks(self) -> int:
        """The number of ranks of the replica that wrote the state."""
        return len(self.manifest.get("ranks", ("",)))

    def header(self) -> FileHeader:
        """Return the header, with the places of the tensors. Raises StateError."""
        self.have({0})
        end = 8 + int.from_bytes(self.file[:8], "little")
        self.have(range(min(end // self.manifest["block_bytes"] + 1, len(self.manifest["blocks"]))))
        return read_preamble(self.file, len(self.file))

    def have(self, blocks: Collection[int]) -> None:
        """Read and verify those of ``blocks`` that ``file`` does not hold yet. Raises StateError."""
        missing = set(blocks) - self._there
        if missing:
            self._read(missing)
            self._there |= missing

    def complete(self, allocate: Allocate) -> memoryview:
        """Return the full file, in ``allocate(nbytes)``. Raises StateError."""
        self.have({0})
        size, nbytes = self.manifest["block_bytes"], self.manifest["nbytes"]
        memory = allocate(nbytes)[:nbytes]
        for block in self._there:
            memory[block * size : (block + 1) * size] = self.file[block * size : (block + 1) * size]
        self.file = memory
        self.have(range(len(self.manifest["blocks"])))
        return memory

    def let_go(self) -> None:
        """Release the memory."""
        self.file = memoryview(b"")

    def _read(self, blocks: Collection[int]) -> None:
        raise NotImplementedError

    def _memory(self, nbytes: int) -> memoryview:
        if len(self.file) != nbytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self.file = memoryview(mmap.mmap(-1, nbytes, flags))
        return self.file


class ServedRankFile(RankFile):
    """A rank's file from the servers at ``urls``, read by a fetcher of that rank."""

    def __init__(self, rank: int, urls: Sequence[str], state: SnapshotRef, fetcher: StateFetcher) -> None:
        super().__init__(rank)
        self._urls = urls
        self._state = state
        self._fetcher = fetcher

    def _read(self, blocks: Collection[int]) -> None:
        fetched = self._fetcher.fetch_state(self._urls, self._state, self._memory, blocks)
        if self.manifest and fetched.manifest["digest"] != self.manifest["digest"]:
            raise LayoutChanged(f"A server replaced step {self._state.step} by another layout of ranks.")
        self.manifest, self.compression = fetched.manifest, fetched.compression
        for url, nbytes in fetched.sources.items():
            self.sources[url] = self.sources.get(url, 0) + nbytes

    def let_go(self) -> None:
        """Release the memory and the connections."""
        self._fetcher.close()
        super().let_go()


class StoredRankFile(RankFile):
    """A rank's file from a durable checkpoint, whose files ``stack`` closes."""

    def __init__(self, rank: int, checkpoint: DurableCheckpoint, stack: ExitStack) -> None:
        super().__init__(rank)
        self._checkpoint = checkpoint
        self._stack = stack
        self._shard_file: RankShardFile | None = None

    def _read(self, blocks: Collection[int]) -> None:
        if self._shard_file is None:
            self._shard_file = RankShardFile(self._checkpoint, self.rank, self._stack)
            self.manifest = self._shard_file.manifest
        shard, size = self._shard_file, self.manifest["block_bytes"]
        file = self._memory(shard.nbytes)
        for run in runs_of(sorted(blocks)):
            target = file[run.first * size : (run.first + run.count) * size]
            shard.fill(target, run.first * size)
            self.sources[shard.storage.url] = self.sources.get(shard.storage.url, 0) + len(target)
