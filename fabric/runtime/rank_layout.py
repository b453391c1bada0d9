"""The layout of one replica's ranks, as ``FABRIC_LAYOUT`` says it: ``ranks=8,tp=2,layers=5+2+5+4``."""

import math
from dataclasses import dataclass, replace

from fabric.errors import ConfigError

MAX_RANKS = 4096
_MAX_LAYERS = 100_000
_FORM = "give words such as ranks=8,tp=2,layers=5+2+5+4"


@dataclass(frozen=True, slots=True)
class RankLayout:
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
        """Whether ``ranks`` ranks can have this layout."""
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


def parse_ranks(text: str) -> tuple[int, int]:
    """Return (least, most) of "4" or "1:4". Raises ConfigError."""
    parts = text.split(":")
    counts = [int(part) for part in parts if is_count(part, MAX_RANKS)]
    if len(parts) not in (1, 2) or len(counts) != len(parts) or counts[0] > counts[-1]:
        raise ConfigError(
            f'the number of ranks is "{text[:80]}": give a count up to {MAX_RANKS} such as 4, or a range '
            "such as 1:4"
        )
    return counts[0], counts[-1]


def candidates(layouts: tuple[RankLayout, ...], ranks: str) -> tuple[RankLayout, ...]:
    """Return every layout that a replica of ``ranks`` ("4" or "1:4", empty: not said) may have, the preferred
    one first: ``layouts`` in their order, each with as many ranks as possible. Raises ConfigError."""
    stated = [layout.ranks for layout in layouts if layout.ranks]
    least, most = parse_ranks(ranks) if ranks else (min(stated, default=1), max(stated, default=1))
    wanted = layouts or (RankLayout(),)
    options = [
        layout.over(count) for layout in wanted for count in range(most, least - 1, -1) if layout.fits(count)
    ]
    if not options:
        unit = math.gcd(*(layout.tensor_parallel * layout.stages for layout in wanted))
        raise ConfigError(
            f'no layout of "{" ".join(map(str, wanted))}" fits {ranks or most} ranks: give --ranks a '
            f"multiple of {unit}, or another --layout"
        )
    return tuple(dict.fromkeys(options))


def _count(text: str, word: str, most: int) -> int:
    if not is_count(word, most):
        raise ConfigError(f'FABRIC_LAYOUT is "{text[:80]}", with "{word[:40]}": {_FORM}')
    return int(word)


def is_count(text: str, most: int = 1_000_000) -> bool:
    """Whether ``text`` is a number from 1 to ``most``; Python refuses to convert thousands of digits."""
    return text.isascii() and text.isdecimal() and len(text) <= 7 and 0 < int(text) <= most
