"""The data of an adopted loop: the DataLoader that it trains on, or batches that it draws from generators.

A DataLoader that is read with gradients on, while the model is in train mode, is the one that trains. It is
read in the job's order, which is that of its sampler: batch j of a pass is cut into a part per rank of every
replica, each of the DataLoader's own batch size. So the global batch is what DDP would make of the script
with as many processes. A loop without such a DataLoader is seeded for each step, with another seed on each
replica. It is refused where all replicas draw the same data all the same.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch.utils.data import DataLoader, DistributedSampler, SequentialSampler

from fabric.client.data.loader import is_stream
from fabric.client.data.orders import SamplerOrder, shuffles_all
from fabric.client.data.sample_plan import sample_indices
from fabric.client.data.sampler import StepSampler
from fabric.client.process.rank_group import RankGroup
from fabric.errors import ConfigError
from fabric.integrations.adopt.living_objects import OWN_WAY, outermost_modules
from fabric.integrations.training_data import TrainingData

if TYPE_CHECKING:
    from fabric.integrations.adopt.adopted_loop import AdoptedLoop

Loader = DataLoader[Any]
_iterate, _length = DataLoader.__iter__, DataLoader.__len__
# Arguments that the reading DataLoader has from the script's.
_ARGUMENTS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "prefetch_factor",
    "persistent_workers",
)


@dataclass(frozen=True, slots=True)
class BlockOrder:
    """The job's order in blocks: a block has one batch for each rank of every replica.

    A pass has ``size`` positions, which are samples, or batches where ``batched``. ``sampler`` says what is
    at a position; without it a pass is a permutation of the data set.
    """

    size: int
    batch_size: int  # positions of a batch
    part: int  # number of this rank's part of a block
    parts: int  # number of ranks in the job
    batched: bool = False
    sampler: SamplerOrder | None = None

    @property
    def blocks(self) -> int:
        """The number of blocks of a pass."""
        return self.size // (self.batch_size * self.parts)

    def end(self, block: int) -> int:
        """Return the first block of the pass after that of ``block``."""
        return (block // self.blocks + 1) * self.blocks

    def items(self, block: int) -> list[Any]:
        """Return what the sampler gives to this rank in ``block``: indices, or lists of them."""
        number, within = divmod(block, self.blocks)
        start = number * self.size + (within * self.parts + self.part) * self.batch_size
        if self.sampler is not None:
            return self.sampler.items(range(start, start + self.batch_size))
        return sample_indices(self.size, 0, start, self.batch_size)

    def indices(self, block: int) -> list[int]:
        """Return the indices of this rank's part of ``block``."""
        return [i for x in self.items(block) for i in (x if isinstance(x, list | tuple) else (x,))]

    def is_like(self, other: "BlockOrder") -> bool:
        """Whether both give the same items in the same blocks."""
        digests = [x.sampler.digest if x.sampler is not None else None for x in (self, other)]
        sizes = [(x.size, x.batch_size, x.part, x.parts, x.batched) for x in (self, other)]
        return digests[0] == digests[1] and sizes[0] == sizes[1]


class BlockReader(torch.utils.data.Sampler[Any]):
    """The batches of this rank from block ``first`` to the end of the pass."""

    def __init__(self, order: BlockOrder) -> None:
        self.first = 0
        self._order = order

    def __iter__(self) -> Iterator[Any]:
        for block in range(self.first, self._order.end(self.first)):
            yield self._order.indices(block)


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
        order = self._order
        if order.sampler is None and self._batches == 1 and order.parts == self._data.replicas:
            return described
        agreed = {name: described[name] for name in ("policy", "data_slots", "micro_batches", "seed")}
        return agreed | ({} if order.sampler is None else {"order": order.sampler.digest})


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
        self._is_used = True  # whether a backward pass has run since the loop got its last batch
        self._has_read = False  # with gradients on, a batch of a DataLoader that is not adopted
        # What len() gave before a DataLoader was adopted.
        self._lengths: WeakKeyDictionary[Loader, int] = WeakKeyDictionary()

    # --- the script's DataLoader --------------------------------------------------------------------------

    def length(self, loader: Loader) -> int:
        """Return the number of batches of a pass on this rank."""
        if is_stream(loader.dataset) or (self._evaluates() and loader is not self._loader):
            return _length(loader)
        if self._loader is None:
            # The loop reads none yet: a fixed order is usually that of an evaluation.
            trains = type(loader.sampler) is not SequentialSampler
        else:
            trains = self._is_adopted(loader)
        length = self._shape_of(loader).blocks if trains else _length(loader)
        if self._loader is None:
            self._lengths[loader] = length
        return length

    def iterate(self, loader: Loader) -> Iterator[Any]:
        """Return the job's batches for the loader that the loop trains on, else the loader's own."""
        if is_stream(loader.dataset):
            return _iterate(loader)
        if self._evaluates():
            # An evaluation of a loop that only counts has results that nothing uses.
            return self._own(_iterate(loader) if self._loop.computes else islice(_iterate(loader), 1))
        self._adopt(loader)
        return self._pass()

    def _evaluates(self) -> bool:
        """Whether the script evaluates now: without gradients, or with its model in eval mode."""
        if not torch.is_grad_enabled():
            return True
        objects = self._loop.objects
        modules = outermost_modules() if objects is None else [objects.model]
        return bool(modules) and not any(module.training for module in modules)

    def _own(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._has_read = self._has_read or torch.is_grad_enabled()
            yield batch

    def _adopt(self, loader: Loader) -> None:
        if self._is_adopted(loader):
            return
        if self._loader is not None:
            raise ConfigError(
                f"the script reads the DataLoader over {_name(loader)} for training, and trains on the one "
                f"over {_name(self._loader)} already: read a DataLoader that does not train under "
                f"torch.no_grad() or in eval mode, or {OWN_WAY}"
            )
        order = self._order_of(loader)
        if self._loop.session is not None:
            raise ConfigError(
                "the script takes its first batch of a DataLoader after its first optimizer step, when "
                f"--adopt has declared the job's data already: {OWN_WAY}"
            )
        if self._lengths.get(loader, order.blocks) != order.blocks:
            raise ConfigError(
                f"the script has asked for the length of the DataLoader over {_name(loader)}, which is in a "
                f"fixed order, before it trains on it: it got {self._lengths[loader]}, and a pass has "
                f"{order.blocks} batches on each replica: give it shuffle=True, or {OWN_WAY}"
            )
        reader = BlockReader(order)
        same: Mapping[str, Any] = {name: getattr(loader, name) for name in _ARGUMENTS}
        self._loader, self._order, self._reader = loader, order, reader
        self._feeder = DataLoader(loader.dataset, batch_sampler=reader, **same)

    def _is_adopted(self, loader: Loader) -> bool:
        """Whether ``loader`` is the adopted one, or gives the same batches, as one made for each pass."""
        adopted = self._loader
        if adopted is None or loader is adopted:
            return loader is adopted
        if loader.dataset is not adopted.dataset:
            return False
        if loader.sampler is adopted.sampler and not self._shape_of(loader).batched:
            return loader.batch_size == adopted.batch_size
        return self._order is not None and self._order_of(loader).is_like(self._order)

    def _shape_of(self, loader: Loader) -> BlockOrder:
        """Return the order of a loader without what is in it. Raises ConfigError for what cannot be kept."""
        group = RankGroup.find()
        rank, ranks = (group.rank, group.size) if group is not None else (0, 1)
        if isinstance(loader.sampler, DistributedSampler):
            size, batch_size, batched = len(loader.dataset), loader.batch_size, False  # type: ignore[arg-type]
        else:
            data = TrainingData.of(loader)
            size, batch_size, batched = data.size, data.batch_size, data.batched
        if loader.batch_sampler is None or batch_size is None:
            raise ConfigError(
                f"the DataLoader over {_name(loader)} has batch_size=None, and --adopt cuts batches into a "
                f"part per replica: give it a batch size, or {OWN_WAY}"
            )
        order = BlockOrder(size, batch_size, self.slot * ranks + rank, self.replicas * ranks, batched)
        if not order.blocks:
            raise ConfigError(
                f"the script's DataLoader has {size} {'batches' if batched else 'samples'}, too few for a "
                f"batch{'' if batched else f' of {batch_size}'} on each of {order.parts} ranks: choose a "
                "smaller batch size"
            )
        return order

    def _order_of(self, loader: Loader) -> BlockOrder:
        """Return the order of a loader that trains. Raises ConfigError for one that cannot be kept."""
        order, sampler = self._shape_of(loader), loader.sampler
        is_distributed = isinstance(sampler, DistributedSampler)
        if not order.batched and (
            sampler.shuffle if is_distributed else shuffles_all(sampler, loader.dataset)  # type: ignore[attr-defined]
        ):
            return order
        given: Any = loader.batch_sampler if order.batched else sampler
        if is_distributed:
            given = range(order.size)
        order = replace(order, sampler=SamplerOrder(given, 0, loader.dataset, loader.generator))
        _refuse_lost_positions(order, loader)
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
            self._newest, self._is_used = block, False
            yield batch
            if not self._is_used:
                raise ConfigError(
                    f"the script has read two batches of the DataLoader over {_name(self._feeder)} without a "
                    "backward pass between them, and --adopt gives each replica a part of every batch: read "
                    f"what does not train under torch.no_grad() or in eval mode, or {OWN_WAY}"
                )
            block += 1

    # --- steps and blocks ---------------------------------------------------------------------------------

    def note_backward(self) -> None:
        """The loop computes the gradient of the batch that it got last.

        Raises ConfigError where that is a batch of an evaluation's DataLoader.
        """
        self._is_used = True
        if self._loader is None and self._has_read and self._evaluates():
            raise ConfigError(
                "the script trains on a DataLoader while its model is in eval mode, and --adopt takes such a "
                "DataLoader for that of an evaluation: call the model's train() before the loop reads the "
                f"DataLoader, and eval() on the frozen modules after it, or {OWN_WAY}"
            )
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
        if self._order is None:
            return 1.0
        return float(sum(len(self._order.indices(block)) for block in self.blocks_of(self._loop.number)))

    def describe(self) -> str:
        """Name the data for a sentence."""
        if self.sampler is None or self._loader is None or self._order is None:
            return "the batches that the loop makes, with generators seeded for each step and replica"
        unit = "batches" if self._order.batched else "samples"
        return (
            f"the DataLoader over {_name(self._loader)} ({self._order.batch_size * self._batches} {unit} a "
            f"step here, {self.sampler.global_batch_size} in the job)"
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


def _refuse_lost_positions(order: BlockOrder, loader: Loader) -> None:
    """Refuse a fixed order whose pass has positions that fill no block: they would never be trained on."""
    assert order.sampler is not None
    lost = order.size - order.blocks * order.batch_size * order.parts
    if lost and not loader.drop_last and order.sampler.is_fixed:
        raise ConfigError(
            f"a pass of the DataLoader over {_name(loader)} has {order.size} positions in a fixed order, and "
            f"the last {lost} fill no batch of {order.batch_size} on each of {order.parts} ranks, so they "
            f"would never be trained on: give it shuffle=True or drop_last=True, or {OWN_WAY}"
        )


def _name(loader: Loader) -> str:
    return type(loader.dataset).__name__
