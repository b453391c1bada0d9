"""The orders with which a replica's ranks come back in another layout, between `fabric launch` and its ranks.

The launcher writes an offer into memory that its ranks inherit. Before it ends, rank 0 may add an order.
"""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from fabric.errors import ConfigError
from fabric.runtime.rank_layout import MAX_RANKS, RankLayout, parse_layout
from fabric.runtime.system_calls import create_memfd

_NAME = "fabric-layouts"
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class LayoutOffer:
    """The layouts that a launcher can start."""

    allowed: tuple[str, ...] = ()  # the preferred layout first; empty: no launcher takes orders
    refused: tuple[str, ...] = ()  # layouts that the script has refused


@dataclass(frozen=True, slots=True)
class LayoutOrder:
    """The layout in which a replica comes back."""

    layout: RankLayout
    without: tuple[int, ...] = ()  # ranks of the layout before whose devices stay unused

    def __str__(self) -> str:
        return (
            f"{self.layout} without {'+'.join(map(str, self.without))}" if self.without else f"{self.layout}"
        )


def parse_order(text: str) -> LayoutOrder:
    """Return the order of ``text``, such as ``ranks=1 without 1``. Raises ConfigError."""
    layout, _, without = text.partition(" without ")
    ranks = without.split("+") if without else []
    if not all(rank.isascii() and rank.isdecimal() and int(rank) < MAX_RANKS for rank in ranks):
        raise ConfigError(f'the order of a layout is "{text[:80]}": its ranks must be numbers')
    return LayoutOrder(parse_layout(layout), tuple(map(int, ranks)))


class LayoutMemory:
    """The launcher's end. ``descriptor`` must stay open in the ranks."""

    def __init__(self) -> None:
        self.descriptor = create_memfd(_NAME)

    def offer(self, offer: LayoutOffer) -> None:
        """Replace what the memory holds by ``offer``."""
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"{' '.join(offer.allowed)}\n{' '.join(offer.refused)}\n".encode(), 0)

    def take(self) -> LayoutOrder | None:
        """Return the order that rank 0 has added since the offer; None without one that can be read."""
        lines = _lines(self.descriptor)
        with contextlib.suppress(ConfigError):
            return parse_order(lines[2]) if len(lines) > 2 and lines[2] else None
        return None

    def close(self) -> None:
        os.close(self.descriptor)


def read_offer(descriptor: int) -> LayoutOffer:
    """Return the launcher's offer; an empty one if ``descriptor`` is not its memory."""
    lines = _lines(descriptor) if _is_ours(descriptor) else []
    return LayoutOffer(tuple(lines[0].split()), tuple(lines[1].split())) if len(lines) > 1 else LayoutOffer()


def write_order(descriptor: int, order: str) -> None:
    """Order from the launcher that the replica comes back in this layout."""
    if _is_ours(descriptor):
        os.pwrite(descriptor, f"{order}\n".encode(), os.fstat(descriptor).st_size)


def _is_ours(descriptor: int) -> bool:
    """Whether ``descriptor`` is a launcher's memory; a process without it may have another file there."""
    if descriptor < 0:
        return False
    with contextlib.suppress(OSError):
        return str(Path(f"/proc/self/fd/{descriptor}").readlink()).startswith(f"/memfd:{_NAME}")
    return False


def _lines(descriptor: int) -> list[str]:
    return os.pread(descriptor, _MOST_BYTES, 0).decode(errors="replace").split("\n")
