"""The digest of a gradient in a device's memory, computed there.

Members compare it before they commit a step, so it lies on the step's path. The host would need 70 ms per
0.5 GB to read and digest the same bytes.

The words of 32 bits are cut into blocks. Each block has two sums of word times key, modulo 2**64, with the
same odd random keys for every block. A changed word always changes both sums. Other changes go unnoticed with
a probability of at most 2**-64 (multilinear hashing, Lemire and Kaser 2014). The digest is xxh3_128 of the
sums in order.
"""

from typing import Any

import numpy as np
import torch
import xxhash

BLOCK_WORDS = 2 * 2**20
_WORD_BYTES = 4
_SEED = 20261123


class DeviceDigest:
    """Computes digests of buffers on ``device``; all members of a job use the same keys."""

    def __init__(self, device: torch.device) -> None:
        # PCG64's raw values are the same in all versions of numpy.
        raw: Any = np.random.PCG64(_SEED).random_raw(2 * BLOCK_WORDS)
        keys = torch.from_numpy(raw.view(np.int64)).view(2, BLOCK_WORDS) | 1
        self._keys = keys.to(device)

    def sums(self, data: torch.Tensor) -> torch.Tensor:
        """Return the sums of ``data`` (1-D uint8), int64 of shape (blocks, 2), on the device.

        Data in host memory is brought to the device block by block. Runs on the current stream and does not
        wait for it. The last word is filled up with zeros.
        """
        complete = data.numel() // _WORD_BYTES * _WORD_BYTES
        words = data[:complete].view(torch.int32)
        parts = [words[at : at + BLOCK_WORDS] for at in range(0, words.numel(), BLOCK_WORDS)]
        if complete < data.numel():
            last = torch.zeros(_WORD_BYTES, dtype=torch.uint8, device=data.device)
            last[: data.numel() - complete] = data[complete:]
            parts.append(last.view(torch.int32))
        sums = [self._sums(part.to(self._keys.device)) for part in parts]
        return torch.stack(sums) if sums else self._keys[:, :0].T

    def _sums(self, words: torch.Tensor) -> torch.Tensor:
        return (words.to(torch.int64) * self._keys[:, : words.numel()]).sum(dim=1)

    @staticmethod
    def name(sums: torch.Tensor, nbytes: int) -> str:
        """Return the digest of ``nbytes`` bytes with these sums: 32 hex digits. Waits for the device."""
        return xxhash.xxh3_128_hexdigest(nbytes.to_bytes(8, "little") + sums.cpu().numpy().tobytes())
