"""Digests a state on a device without a copy of the whole state: block by block, through page-locked memory.

Any thread takes a block, brings it to the host over the side stream and digests it there. Several threads
overlap the copies with the digests.
"""

import bisect
import queue
from typing import Protocol

import numpy as np
import torch
import xxhash

from fabric.ckpt_server.format.digest import BLOCK_BYTES
from fabric.ckpt_server.state.block_copy import (
    BlockPass,
    Bytes,
    SnapshotDigests,
    TensorExtent,
    tensor_extents,
)
from fabric.ckpt_server.state.training_state import StateView


class BlockCopies(Protocol):
    """The operations of a device that bring a block to the host; ``CudaCopyStream`` implements them."""

    def owns(self, tensor: torch.Tensor) -> bool:
        """Whether this tensor is in the device's memory."""

    def bring(self, tensors: list[torch.Tensor], memory: Bytes) -> None:
        """Copy flat ``tensors``, one behind the other, into ``memory``; return when they are there."""


class StagedDigestPass(BlockPass):
    """Digests ``view``. ``staging`` holds free buffers of BLOCK_BYTES, one for each thread that may help."""

    def __init__(self, view: StateView, device: BlockCopies, staging: "queue.SimpleQueue[Bytes]") -> None:
        super().__init__(view.nbytes, ())
        self._header = np.frombuffer(view.header, np.uint8)
        self._extents = tensor_extents(view)
        self._begins = [part.begin for part in self._extents]
        self._device, self._staging = device, staging

    def digests(self) -> SnapshotDigests:
        try:
            return super().digests()
        finally:
            self._extents = []

    def _take(self, block: int) -> None:
        begin, end = block * BLOCK_BYTES, min((block + 1) * BLOCK_BYTES, self._nbytes)
        memory = self._staging.get()
        try:
            target = memory[: end - begin]
            if begin < self._header.size:
                head = self._header[begin:end]
                target[: head.size] = head
            self._bring(begin, end, target)
            self._digests[block] = xxhash.xxh3_64_hexdigest(target.data)
        finally:
            self._staging.put(memory)

    def _bring(self, begin: int, end: int, target: Bytes) -> None:
        """Bring the bytes [begin, end) of the tensors; neighbours on the device go in one copy."""
        together: list[TensorExtent] = []
        first = max(0, bisect.bisect_right(self._begins, begin) - 1)
        for extent in self._extents[first : bisect.bisect_left(self._begins, end)]:
            low, high = max(begin, extent.begin), min(end, extent.end)
            if low >= high:
                continue
            part = TensorExtent(extent.tensor[low - extent.begin : high - extent.begin], low, high)
            if self._device.owns(part.tensor):
                together.append(part)
            else:
                target[low - begin : high - begin] = part.tensor.numpy()
                self._flush(together, begin, target)
        self._flush(together, begin, target)

    def _flush(self, together: list[TensorExtent], begin: int, target: Bytes) -> None:
        if together:
            memory = target[together[0].begin - begin : together[-1].end - begin]
            self._device.bring([part.tensor for part in together], memory)
            together.clear()
