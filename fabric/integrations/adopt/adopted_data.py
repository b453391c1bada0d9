"""The data of an adopted loop: its shuffling DataLoader, or batches that it draws from random generators.

A DataLoader that shuffles is read in the job's order: batch j of a pass is cut into a part per rank of every
replica, each of the DataLoader's own batch size. So the global batch is what DDP would make of the script
with as many processes. A loop without such a DataLoader is seeded for each step, with another seed on each
replica. It is refused where all replicas draw the same data all the same.
"""

import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from fabric.client.data.sample_plan import sample_indices
from fabric.client.data.sampler import StepSampler
from fabric.client.process.rank_group import RankGroup
from fabric.errors import ConfigError
from fabric.integrations.adopt.living_objects import OWN_WAY, living

if TYPE_CHECKING:
    from fabric.integrations.adopt.adopted_loop import AdoptedLoop

Loader = DataLoader[Any]
_iterate, _length = DataLoader.__iter__, DataLoader.__len__
# Arguments that the reading DataLoader has from the script's.
_ARGUMENTS = (
    "batch_size",
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


def shuffles(loader: Loader) -> bool:
    """Whether the loader gives each sample of a pass once, in random order: so it is a training loader."""
    sampler = loader.sampler
    if type(loader) is not DataLoader or loader.batch_size is None:
        return False
    if isinstance(sampler, DistributedSampler):
        return sampler.shuffle
    size = len(sampler) if type(sampler) is RandomSampler and not sampler.replacement else -1
    return size == len(loader.dataset)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The job's order in blocks: a block has one batch for each rank of every replica."""

    size: int  # number of samples of the data set
    batch_size: int
    part: int  # number of this rank's part of a block
    parts: int  # number of ranks in the job

    @property
    def blocks(self) -> int:
        """The number of blocks of a pass."""
        return self.size // (self.batch_size * self.parts)

    def end(self, block: int) -> int:
        """Return the first block of the pass after that of ``block``."""
        return (block // self.blocks + 1) * self.blocks

    def indices(self, block: int) -> list[int]:
        """Return the indices of this rank's part of ``block``."""
        number, within = divmod(block, self.blocks)
        start = number * self.size + (within * self.parts + self.part) * self.batch_size
        return sample_indices(self.size, 0, start, self.batch_size)


class BlockReader(torch.utils.data.Sampler[int]):
    """The indices of this rank from ``first`` to the end of the pass."""

    def __init__(self, order: BlockOrder) -> None:
        self.first = 0
        self._order = order

    def __iter__(self) -> Iterator[int]:
        for block in range(self.first, self._order.end(self.first)):
            yield from self._order.indices(block)


class AdoptedSampler(StepSampler):
    """The sampler that an adopted loop's session asks; a step has ``batches`` blocks."""

    def __init__(self, data: "AdoptedData", order: BlockOrder, batches: int) -> None:
        super().__init__(order.size, global_batch_size=order.batch_size * order.parts * batches)
        self._data, self._order, self._batches = data, order, batches

    def indices(self, step: int) -> list[int]:
        """Return the indices of this rank's part of ``step``."""
        return [i for block in self._data.blocks_of(step) for i in self._order.indices(block)]

    def take(self, step: int) -> bool:
        """Return whether the loop has computed the batches of ``step``."""
        return self._data.take(step)

    def describe(self) -> dict[str, Any]:
        """Describe the order, as far as the audit has a rule for it."""
        described = super().describe()
        if self._batches == 1 and self._order.parts == self._data.replicas:
            return described
        return {name: described[name] for name in ("policy", "data_slots", "micro_batches", "seed")}


class AdoptedData:
    """Counts the batches that a loop trains on, and gives it those of the job."""

    def __init__(self, loop: "AdoptedLoop", replicas: int, slot: int) -> None:
        self.replicas, self.slot = replicas, slot
        self.sampler: AdoptedSampler | None = None
        self._loop = loop
        self._loader: Loader | None = None
        self._order: BlockOrder | None = None
        self._reader: BlockReader | None = None
        self._feeder: Loader | None = None  # reads the batches of the script's loader in the job's order
        self._batches = 0  # batches of a step; 0 until the first step shows it
        self._first = 0  # the first block of the step that the loop is at
        self._newest = -1  # the block that the loop got last
        self._used: list[int] = []  # blocks of this step that a backward pass has used
        self._kept: Any = None  # the newest batch, which a loop that only counts gets again

    # --- the script's DataLoader --------------------------------------------------------------------------

    def length(self, loader: Loader) -> int:
        """Return the number of batches of a pass on this rank."""
        return self._order_of(loader).blocks if shuffles(loader) else _length(loader)

    def iterate(self, loader: Loader) -> Iterator[Any]:
        """Return the job's batches for the loader that the loop trains on, else the loader's own."""
        if not shuffles(loader) or not torch.is_grad_enabled():
            batches = _iterate(loader)
            # An evaluation of a loop that only counts has results that nothing uses.
            return batches if self._loop.computes else islice(batches, 1)
        self._adopt(loader)
        return self._pass()

    def _adopt(self, loader: Loader) -> None:
        if loader is self._loader:
            return
        if _others(loader) or (self._loader is not None and not _same(self._loader, loader)):
            raise ConfigError(
                "the script has several DataLoaders that shuffle, and --adopt cannot know which one trains: "
                f"give those of an evaluation shuffle=False, or {OWN_WAY}"
            )
        order = self._order_of(loader)
        same: Mapping[str, Any] = {name: getattr(loader, name) for name in _ARGUMENTS}
        if self._loader is None and self._loop.session is not None:
            raise ConfigError(
                "the script takes its first batch of a DataLoader after its first optimizer step, when "
                f"--adopt has declared the job's data already: {OWN_WAY}"
            )
        self._loader, self._order, self._reader = loader, order, BlockReader(order)
        self._feeder = DataLoader(loader.dataset, sampler=self._reader, **same)

    def _order_of(self, loader: Loader) -> BlockOrder:
        """Return the order of a loader that shuffles. Raises ConfigError where a pass has no whole block."""
        group = RankGroup.find()
        rank, ranks = (group.rank, group.size) if group is not None else (0, 1)
        size, batch_size = len(loader.dataset), loader.batch_size  # type: ignore[arg-type]
        assert batch_size is not None
        order = BlockOrder(size, batch_size, self.slot * ranks + rank, self.replicas * ranks)
        if not order.blocks:
            raise ConfigError(
                f"the script's DataLoader has {size} samples, too few for a batch of {batch_size} on each of "
                f"{order.parts} ranks: choose a smaller batch size"
            )
        return order

    def _pass(self) -> Iterator[Any]:
        """Yield the batches from the first that is not used to the end of the pass."""
        assert self._feeder is not None and self._order is not None and self._reader is not None
        reader, reading = self._reader, None
        block = self._first + len(self._used)
        end = self._order.end(block)
        while block < end:
            if not self._loop.computes and self._kept is not None:
                batch, reading = self._kept, None
            else:
                if reading is None:
                    reader.first = block
                    reading = _iterate(self._feeder)
                batch = self._kept = next(reading)
            self._newest = block
            yield batch
            block += 1

    # --- steps and blocks ---------------------------------------------------------------------------------

    def note_backward(self) -> None:
        """The loop computes the gradient of the batch that it got last."""
        if self._newest >= 0 and self._newest not in self._used:
            self._used.append(self._newest)

    def resume(self, step: int, batches: int) -> None:
        """The loop begins at ``step``, as a file says that the script has saved."""
        self._batches, self._first = batches, step * batches

    @property
    def batches_per_step(self) -> int:
        return self._batches

    def begin(self) -> None:
        """The loop is about to exchange its first step, so the batches of a step are known."""
        if self._order is None:
            return
        self._batches = self._batches or len(self._used) or 1
        blocks = self._order.blocks
        if blocks % self._batches:
            raise ConfigError(
                f"the script makes a step of {self._batches} batches, and a pass over the data has {blocks}: "
                f"choose a batch size or a number of replicas so that steps divide the pass, or {OWN_WAY}"
            )
        self.sampler = AdoptedSampler(self, self._order, self._batches)

    def blocks_of(self, step: int) -> range:
        """Return the numbers of the blocks of ``step``."""
        return range(step * self._batches, (step + 1) * self._batches)

    def take(self, step: int) -> bool:
        """Return whether the loop has computed the batches of ``step``. Raises ConfigError for another number
        of batches than in the first step."""
        used, own = self._used, self.blocks_of(self._loop.number)
        if len(used) != self._batches:
            raise ConfigError(
                f"the script makes a step of {len(used)} batches after steps of {self._batches}, and --adopt "
                f"cannot tell which batches the job's steps have: {OWN_WAY}"
            )
        return self._loop.computes and step == self._loop.number and used == list(own)

    def next_step(self) -> None:
        """The loop goes to its next step."""
        self._used = []
        self._first = (self._loop.number) * self._batches

    @property
    def weight(self) -> float:
        """The number of samples of a step here; 1 where the loop has no DataLoader."""
        assert self._loader is None or self._loader.batch_size is not None
        return 1.0 if self._loader is None else float(self._loader.batch_size or 1) * self._batches

    def describe(self) -> str:
        """Name the data for a sentence."""
        if self.sampler is None or self._loader is None:
            return "the batches that the loop makes, with generators seeded for each step and replica"
        parts = f" in {self._batches} batches" if self._batches > 1 else ""
        dataset = type(self._loader.dataset).__name__
        return (
            f"the DataLoader over {dataset} ({self.weight:.0f} samples a step here{parts}, "
            f"{self.sampler.global_batch_size} in the job)"
        )


class InputWatch:
    """Finds replicas that all compute the same data, by a number that each makes of its inputs.

    The sums of the numbers and of their squares are metrics of the step, so all members judge alike.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._steps = 0
        self._number = 0
        self._hook = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _: torch.nn.Module, arguments: Any, named: Any) -> None:
        if torch.is_grad_enabled():
            values = [x for x in torch.utils._pytree.tree_leaves((arguments, named)) if torch.is_tensor(x)]  # noqa: SLF001
            for value in values[:1]:
                content = value.detach().reshape(-1)[:4096].cpu().contiguous().view(torch.uint8).numpy()
                self._number = xxhash.xxh3_64_intdigest(content.tobytes(), self._number) >> 44

    def take(self) -> dict[str, float]:
        """Return this step's numbers for the metrics; none before the third step, see ``judge``."""
        number, self._number = self._number, 0
        self._steps += 1
        # Loops draw one batch ahead, and draw the first before they have a seed of their own.
        if self._steps < 4:
            return {}
        if not number:
            raise ConfigError(
                f"the loop does not call its outermost module, so --adopt cannot see its data: {OWN_WAY}"
            )
        return {"fabric.inputs": 1.0, "fabric.sum": float(number), "fabric.squares": float(number * number)}

    def judge(self, metrics: Mapping[str, float]) -> None:
        """Raise ConfigError where two replicas or more had equal inputs in the step of these metrics."""
        count = metrics.get("fabric.inputs", 0.0)
        if count > 1 and count * metrics["fabric.squares"] == metrics["fabric.sum"] ** 2:
            raise ConfigError(
                "all replicas train on the same data, because the script reads them in a fixed order: give "
                f"the DataLoader shuffle=True, draw the batches from torch's random generator, or {OWN_WAY}"
            )


def _others(loader: Loader) -> bool:
    """Whether another DataLoader shuffles, over other data or in other batches."""

    def exist() -> bool:
        return any(shuffles(x) and not _same(x, loader) for x in living(DataLoader))

    if not exist():
        return False
    gc.collect()  # it may be garbage that is not collected yet
    return exist()


def _same(one_loader: Loader, other: Loader) -> bool:
    return one_loader.dataset is other.dataset and one_loader.batch_size == other.batch_size
