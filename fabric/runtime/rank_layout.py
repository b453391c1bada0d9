"""The layout of one replica's ranks, as ``FABRIC_LAYOUT`` says it: ``ranks=8,tp=2,layers=5+2+5+4``."""

import contextlib
import os
from pathlib import Path

from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.model import Value
from fabric.runtime.system_calls import create_memfd

MAX_RANKS = 4096
_MAX_LAYERS = 100_000
_FORM = "give words such as ranks=8,tp=2,layers=5+2+5+4"


class RankLayout(Value):
    """How one replica's model is spread over its ranks."""

    ranks: int = 0  # processes of the replica; 0: as many as the launcher starts
    tensor_parallel: int = 1  # ranks that share each tensor
    layers: tuple[int, ...] = ()  # layers of each pipeline stage; empty without a pipeline

    @property
    def stages(self) -> int:
        """How many pipeline stages there are; 1 without a pipeline."""
        return max(1, len(self.layers))

    @property
    def data_parallel(self) -> int:
        """How many ranks share the samples of a micro-batch, as FSDP does."""
        return self.ranks // (self.tensor_parallel * self.stages)

    def fits(self, ranks: int) -> bool:
        return self.ranks in (0, ranks) and ranks % (self.tensor_parallel * self.stages) == 0

    def over(self, ranks: int) -> "RankLayout":
        """Return this layout for ``ranks`` ranks. Raises ConfigError."""
        if self.ranks not in (0, ranks):
            raise ConfigError(
                f'FABRIC_LAYOUT is "{self}" and this replica has {ranks} ranks: start {self.ranks}, or leave '
                "`ranks=` away"
            )
        if not self.fits(ranks):
            raise ConfigError(
                f'FABRIC_LAYOUT is "{self}" and this replica has {ranks} ranks: give it a multiple of '
                f"{self.tensor_parallel * self.stages} ranks, or another layout"
            )
        return replace(self, ranks=ranks)

    def __str__(self) -> str:
        words = [f"ranks={self.ranks}"] if self.ranks else []
        words += [f"tp={self.tensor_parallel}"] if self.tensor_parallel > 1 else []
        words += [f"layers={'+'.join(map(str, self.layers))}"] if self.layers else []
        return ",".join(words)


def parse_layout(text: str) -> RankLayout:
    """Return the layout of ``text``, such as ``4``, ``tp=2`` or ``ranks=4,layers=5+7``.

    Raises ConfigError.
    """
    values: dict[str, str] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        key, mark, value = word.partition("=")
        key, value = (key, value) if mark else ("ranks", key)
        if key not in ("ranks", "tp", "layers") or key in values:
            raise ConfigError(f'FABRIC_LAYOUT is "{text[:80]}", with "{word[:40]}": {_FORM}')
        values[key] = value
    layers = tuple(
        _count(text, part, _MAX_LAYERS)
        for part in values.get("layers", "").split("+")
        if values.get("layers")
    )
    layout = RankLayout(
        ranks=_count(text, values["ranks"], MAX_RANKS) if "ranks" in values else 0,
        tensor_parallel=_count(text, values.get("tp", "1"), MAX_RANKS),
        layers=layers,
    )
    if layout.ranks:
        layout.over(layout.ranks)
    return layout


def _count(text: str, word: str, most: int) -> int:
    if not is_count(word, most):
        raise ConfigError(f'FABRIC_LAYOUT is "{text[:80]}", with "{word[:40]}": {_FORM}')
    return int(word)


def is_count(text: str, most: int = 1_000_000) -> bool:
    """Whether ``text`` is a number from 1 to ``most``; Python refuses to convert thousands of digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 7 and 0 < int(text) <= most


# The launcher writes an offer into memory that its ranks inherit. Before it ends, rank 0 may add an order:
# the replica's ranks then come back in another layout.
_NAME = "fabric-layouts"
_MOST_BYTES = 1 << 20


class LayoutOffer(Value):
    """The layouts that a launcher can start."""

    allowed: tuple[str, ...] = ()  # the preferred layout first; empty: no launcher takes orders
    refused: tuple[str, ...] = ()  # layouts that the script has refused


class LayoutOrder(Value):
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
        os.ftruncate(self.descriptor, 0)
        os.pwrite(self.descriptor, f"{' '.join(offer.allowed)}\n{' '.join(offer.refused)}\n".encode(), 0)

    def take(self) -> LayoutOrder | None:
        """Return the order that rank 0 has added since the offer; None without one that can be read."""
        lines = _lines(self.descriptor)
        with contextlib.suppress(ConfigError):
            return parse_order(lines[2]) if len(lines) > 2 and lines[2] else None
        return None


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
