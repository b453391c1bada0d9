"""The digest of bytes in a device's memory, computed there: of a gradient, or of a state.

Members compare it before they commit a step, so it lies on the step's path. The host would need 70 ms
per 0.5 GB to read and digest the same bytes.

The bytes are words of 32 bits, filled up with zeros and cut into blocks. Each block has two sums of word
times key, modulo 2**64, with the same odd random keys for every block. A changed word always changes both
sums. Other changes go unnoticed with a probability of at most 2**-64 (multilinear hashing, Lemire and Kaser
2014). The digest is xxh3_128 of the sums in order. That of a state has its file's header before the sums.

Any device makes the same sums of the same bytes. So a file's reader without a GPU can check them too.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import numpy as np
import torch
import xxhash

BLOCK_WORDS = 2 * 2**20
_WORD_BYTES = 4
_ALIGNMENT_BYTES = 64  # then a thread of the device reads several words at once
BLOCK_BYTES = BLOCK_WORDS * _WORD_BYTES
SUMS_BYTES = 16  # of one block
_PIECE_BLOCKS = 4  # so many blocks of small tensors are gathered, or brought from the host, at once
_SEED = 20261123
_log = logging.getLogger(__name__)


class DeviceDigest:
    """Computes digests of bytes on ``device``; all members of a job use the same keys."""

    def __init__(self, device: torch.device) -> None:
        # PCG64's raw values are the same in all versions of numpy.
        raw: Any = np.random.PCG64(_SEED).random_raw(2 * BLOCK_WORDS)
        keys = torch.from_numpy(raw.view(np.int64)).view(2, BLOCK_WORDS) | 1
        self._keys = keys.to(device)
        self._piece_bytes = _PIECE_BLOCKS * BLOCK_WORDS * _WORD_BYTES
        self._sums = _fastest_sums(self._keys)

    def sums(self, parts: Iterable[torch.Tensor]) -> torch.Tensor:
        """Return the sums of ``parts`` (1-D uint8), one behind the other: int64 of shape (blocks, 2).

        They are on the device, and bytes in host memory are brought there. Runs on the current stream and
        does not wait for it.
        """
        sums = [self._sums(piece.view(torch.int32), self._keys) for piece in self._pieces(parts)]
        return torch.cat(sums) if sums else self._keys[:, :0].T

    def _pieces(self, parts: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
        """Yield whole and aligned words: of a large tensor where they are, and of other tensors gathered."""
        gathered: list[torch.Tensor] = []
        room = self._piece_bytes
        for part in parts:
            left = part
            while left.numel() >= room:
                size = left.numel() // room * room if not gathered and self._is_readable(left) else room
                yield self._whole([*gathered, left[:size]])
                gathered, left, room = [], left[size:], self._piece_bytes
            if left.numel():
                gathered.append(left)
                room -= left.numel()
        if gathered:
            yield self._whole(gathered)

    def _is_readable(self, part: torch.Tensor) -> bool:
        return part.device == self._keys.device and part.data_ptr() % _ALIGNMENT_BYTES == 0

    def _whole(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return ``parts`` as one readable tensor, filled up with zeros, which change no sum."""
        parts = [part.to(self._keys.device, non_blocking=True) for part in parts]
        if rest := sum(part.numel() for part in parts) % _ALIGNMENT_BYTES:
            parts.append(torch.zeros(_ALIGNMENT_BYTES - rest, dtype=torch.uint8, device=self._keys.device))
        if len(parts) > 1:
            return torch.cat(parts)
        return parts[0] if self._is_readable(parts[0]) else parts[0].clone()

    @staticmethod
    def name(sums: "torch.Tensor | np.ndarray[Any, Any]", nbytes: int, header: bytes = b"") -> str:
        """Return the digest of ``nbytes`` bytes with these sums: 32 hex digits. Waits for the device."""
        values = sums.cpu().numpy() if isinstance(sums, torch.Tensor) else sums
        return xxhash.xxh3_128_hexdigest(nbytes.to_bytes(8, "little") + header + values.tobytes())


@cache
def device_digest(device: torch.device) -> DeviceDigest:
    """Return the digest of ``device``, whose keys this process has once."""
    return DeviceDigest(device)


def digest_of_file(file: memoryview) -> str:
    """Return the digest of the state in ``file``, as any member with a device makes it, without a device."""
    header = 8 + int.from_bytes(file[:8], "little")
    body = torch.frombuffer(file, dtype=torch.uint8)[header:]
    return DeviceDigest.name(device_digest(body.device).sums([body]), body.numel(), bytes(file[:header]))


_Sums = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def torch_sums(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the sums of the blocks of ``words`` by torch's own operations."""
    blocks = torch.split(words, keys.shape[1])
    return torch.stack([(block.to(torch.int64) * keys[:, : block.numel()]).sum(dim=1) for block in blocks])


def _fastest_sums(keys: torch.Tensor) -> _Sums:
    """Return the kernel of Triton, eight times as fast, where it works; else ``torch_sums``.

    Triton comes with torch for CUDA, and needs a C compiler when it is first used.
    """
    if not keys.is_cuda:
        return torch_sums
    try:
        with torch.cuda.device(keys.device):
            from fabric.ckpt_server.state.triton_sums import triton_sums

            words = torch.arange(BLOCK_WORDS + 16, dtype=torch.int32, device=keys.device) * 2**10 - 7
            if torch.equal(triton_sums(words, keys), torch_sums(words, keys)):
                return triton_sums
            why: object = "its sums are wrong"
    except Exception as error:  # noqa: BLE001  (whatever fails in a compiler, torch's operations do the work)
        why = error
    _log.warning("fabric: digests on %s are computed without Triton: %s", keys.device, why)
    return torch_sums
