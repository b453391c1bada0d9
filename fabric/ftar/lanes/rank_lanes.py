"""The lanes of one rank in one epoch: its pieces go from its flat gradient to each lane, and back.

With each piece travels the presence of its parameter, as in a bucket of replicas of equal layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from fabric.ftar.lanes.held_parameters import FlatPlaces, dtype_of
from fabric.protocol.rules.lanes import HeldParameter, Lane, Piece, lanes_of_rank
from fabric.protocol.rules.tensor_region import TensorRegion


@dataclass(frozen=True, slots=True)
class LaneSection:
    """The pieces of one data type and group in a lane, which one exchange reduces as one buffer."""

    lane: int
    dtype: torch.dtype
    pieces: tuple[Piece, ...]
    group: int = 0

    @property
    def elements(self) -> int:
        return sum(piece.region.elements for piece in self.pieces)

    @property
    def size(self) -> int:
        """Elements of its memory: those of the pieces, then each piece's presence."""
        return self.elements + len(self.pieces)


def _by_kind(lane: Lane) -> dict[tuple[str, int], list[Piece]]:
    """Return the lane's pieces by data type and group."""
    kinds: dict[tuple[str, int], list[Piece]] = {}
    for piece in lane.pieces:
        kinds.setdefault((piece.dtype, piece.group), []).append(piece)
    return kinds


class RankLanes:
    """The sections of all lanes in which ``rank`` takes part, in the order in which all ranks reduce them.

    ``place``: the index of its replica in the layouts. ``row``: what the rank holds. A piece lies in several
    of its lanes where other replicas have more copies; the rank takes the result of the lowest copy.
    """

    def __init__(self, lanes: Sequence[Lane], place: int, rank: int, row: Sequence[HeldParameter]) -> None:
        self.lanes = tuple(lanes)
        self.numbers = lanes_of_rank(lanes, place, rank)
        self._places = FlatPlaces(row)
        dtypes = {held.dtype: dtype_of(held) for held in row}
        self.sections = tuple(
            LaneSection(number, dtypes[word], tuple(pieces), group)
            for number in self.numbers
            for (word, group), pieces in sorted(_by_kind(lanes[number]).items())
        )
        self._lowest: dict[tuple[str, TensorRegion], int] = {}  # piece -> the copy whose result is taken
        for piece in (piece for section in self.sections for piece in section.pieces):
            key = piece.name, piece.region
            self._lowest[key] = min(piece.copy, self._lowest.get(key, piece.copy))
        self._indices: dict[tuple[int, torch.dtype, int], torch.Tensor] = {}  # of each section's presence

    @torch.no_grad()
    def gather(self, section: LaneSection, flat: torch.Tensor, into: torch.Tensor) -> None:
        """Copy the section's pieces and their presence out of the flat gradient."""
        for piece, part in self._parts(section, into):
            part.copy_(self._places.view(flat, piece.name, piece.region))
        words, index = self._presence(section, flat)
        into[section.elements :].copy_(words[index])

    @torch.no_grad()
    def scatter(self, section: LaneSection, reduced: torch.Tensor, flat: torch.Tensor) -> None:
        """Copy the section's reduced pieces and their presence to their places in the flat gradient."""
        for piece, part in self._parts(section, reduced):
            if self._lowest[piece.name, piece.region] == piece.copy:
                self._places.view(flat, piece.name, piece.region).copy_(part)
        words, index = self._presence(section, flat)
        # The pieces of one parameter may come by several lanes, in any order: one that is present suffices.
        present = reduced[section.elements :].clamp(max=1).to(words.dtype)
        words[index] = torch.maximum(words[index], present)

    def _presence(self, section: LaneSection, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``flat`` in the section's type, and the index of each piece's presence there."""
        key, itemsize = (section.lane, section.dtype, section.group), section.dtype.itemsize
        if key not in self._indices:
            begins = [self._places.presence_begins[piece.name] // itemsize for piece in section.pieces]
            self._indices[key] = torch.tensor(begins, device=flat.device)
        return flat[: flat.numel() // itemsize * itemsize].view(section.dtype), self._indices[key]

    def _parts(self, section: LaneSection, memory: torch.Tensor) -> list[tuple[Piece, torch.Tensor]]:
        parts, begin = [], 0
        for piece in section.pieces:
            end = begin + piece.region.elements
            parts.append((piece, memory[begin:end].view(piece.region.sizes)))
            begin = end
        return parts
