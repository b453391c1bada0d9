"""The sums of a device's digest as one kernel of Triton (see ``device_digest``)."""

import torch
import triton
import triton.language as tl

_TILE = 4096  # words that one program of the kernel sums; blocks are whole tiles


@triton.jit  # type: ignore[untyped-decorator]
def _sum_tiles(words, keys, sums, count, block: tl.constexpr, tile: tl.constexpr):  # type: ignore[no-untyped-def]
    number = tl.program_id(0).to(tl.int64)
    place = number * tile + tl.arange(0, tile)
    word = tl.load(words + place, mask=place < count, other=0).to(tl.int64)
    first = tl.load(keys + place % block)
    second = tl.load(keys + block + place % block)
    tl.store(sums + 2 * number, tl.sum(word * first, axis=0))
    tl.store(sums + 2 * number + 1, tl.sum(word * second, axis=0))


def triton_sums(words: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return what ``device_digest.torch_sums`` returns.

    The number of words is a multiple of 16, and so is their address, so Triton makes one kernel.
    """
    block = keys.shape[1]
    blocks, tiles = -(-words.numel() // block), -(-words.numel() // _TILE)
    sums = torch.zeros(blocks * (block // _TILE), 2, dtype=torch.int64, device=words.device)
    _sum_tiles[(tiles,)](words, keys, sums, words.numel(), block, _TILE)
    return sums.view(blocks, -1, 2).sum(dim=1)
