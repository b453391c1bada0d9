"""The order of an adopted DataLoader, in blocks: a block has one batch for each rank of every replica."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader, Sampler

from fabric.client.data.orders import SamplerOrder, shuffles_all
from fabric.client.data.sample_plan import sample_indices
from fabric.client.process.rank_group import RankGroup
from fabric.errors import ConfigError
from fabric.integrations.training_data import TrainingData
from fabric.protocol.rules.assignment import cut


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The job's order in blocks: a block has one batch for each rank of every replica."""

    data: TrainingData
    order: SamplerOrder | None  # None: each pass is a permutation of the data set
    part: int  # number of this rank's part of a block
    parts: int  # number of ranks in the job

    @classmethod
    def of(cls, loader: DataLoader[Any], part: int, parts: int) -> "BlockOrder":
        """Return the order of a DataLoader. Raises ConfigError for one that cannot be kept."""
        group = RankGroup.find()
        data = TrainingData.of(loader, 1 if group is None else group.size)
        uniform = shuffles_all(data.sampler, data.dataset)
        order = None if uniform else SamplerOrder(data.sampler, 0, data.dataset, data.generator)
        made = cls(data, order, part, parts)
        if not made.blocks:
            raise ConfigError(
                f"the script's DataLoader has {data.size} samples, too few for a batch of {data.batch_size} "
                f"on each of {parts} ranks: choose a smaller batch size, or drop_last=False"
            )
        return made

    @property
    def width(self) -> int:
        """The number of positions of a block that is not short."""
        return self.data.batch_size * self.parts

    @property
    def left(self) -> int:
        """The number of positions of the short block of a pass; 0 without one."""
        return 0 if self.data.drop_last else self.data.size % self.width

    @property
    def blocks(self) -> int:
        """The number of blocks of a pass."""
        return self.data.size // self.width + (self.left > 0)

    def end(self, block: int) -> int:
        """Return the first block of the pass after that of ``block``."""
        return (block // self.blocks + 1) * self.blocks

    def positions(self, block: int) -> range:
        """Return the positions of this rank's part of ``block``, which count through all passes."""
        number, within = divmod(block, self.blocks)
        first = within * self.width
        part = cut(min(self.width, self.data.size - first), [1] * self.parts)[self.part]
        first += number * self.data.size
        return range(first + part.start, first + part.stop)

    def indices(self, block: int) -> list[int]:
        """Return the data set indices of this rank's part of ``block``."""
        positions = self.positions(block)
        return self._items(positions) if self.order is None else self.order.indices(positions)

    def weight(self, block: int) -> int:
        """Return the number of samples of this rank's part of ``block``."""
        positions = self.positions(block)
        return sum(map(len, self._items(positions))) if self.data.batched else len(positions)

    def reads(self, block: int) -> Any:
        """Return what a sampler yields for this rank's batch of ``block``; of weight 0: another's samples."""
        positions = self.positions(block)
        items = self._items(positions or range(positions.start - 1, positions.start))
        return items[0] if self.data.batched or self.data.single else items

    def same(self, other: "BlockOrder") -> bool:
        """Whether another order has the same samples in the same batches."""
        digests = [x.order and x.order.digest for x in (self, other)]
        sizes = [(x.size, x.batch_size, x.batched, x.drop_last) for x in (self.data, other.data)]
        return digests[0] == digests[1] and self.data.dataset is other.data.dataset and sizes[0] == sizes[1]

    def _items(self, positions: range) -> list[Any]:
        if self.order is not None:
            return self.order.items(positions)
        return sample_indices(self.data.size, 0, positions.start, len(positions))


class BlockReader(Sampler[Any]):
    """Yields what this rank reads for the blocks from ``first`` to before ``end``."""

    def __init__(self, order: BlockOrder) -> None:
        self.first = self.end = 0
        self._order = order

    def __iter__(self) -> Iterator[Any]:
        yield from map(self._order.reads, range(self.first, self.end))
