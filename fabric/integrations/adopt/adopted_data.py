"""The data of an adopted loop: the DataLoader that it trains on, or batches drawn from random generators.

The DataLoader that trains is read in the job's order, which is the order of its sampler: batch j of a pass is
cut into a part per rank of every replica, each of the DataLoader's own batch size. So the global batch is
what DDP would make of the script with as many processes. The samples that are left at the end of a pass make
a shorter batch, unless ``drop_last`` drops them. A rank without a sample there has a batch of weight 0.

The DataLoader that trains is known by its use: the script reads its batch with gradients on and its model in
train mode, and runs a backward pass. Until then it is the one that shuffles, or one in a fixed order where
none shuffles. All others are whole on each replica. A loop without such a DataLoader is seeded for each step,
with another seed on each replica. It is refused where all replicas draw the same data all the same.
"""

import ast
import gc
import itertools
import operator
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import FrameType, GeneratorType
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
import xxhash
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset

from fabric.client.data.loader import check_size
from fabric.client.data.sample_plan import SamplePlan, SamplerOrder, indices_of, sample_indices, shuffles_all
from fabric.client.data.sampler import StepSampler
from fabric.client.loop.data_content import content_digest
from fabric.client.loop.later_changes import made_each_pass, repeated
from fabric.client.loop.loop_flow import GROWS, dotted, names_read, stores, walked
from fabric.client.loop.loop_source import refuse_memory
from fabric.client.loop.user_functions import functions_in, search, value_of
from fabric.client.process.rank_group import RankGroup
from fabric.errors import ConfigError
from fabric.integrations.adopt.living_objects import OWN_WAY, is_in_order, outermost_modules, wrapped
from fabric.integrations.training_data import READING, TrainingData
from fabric.protocol.rules.assignment import cut
from fabric.runtime.living_objects import living

if TYPE_CHECKING:
    from fabric.integrations.adopt.adopted_loop import AdoptedLoop


@dataclass(slots=True)
class BlockOrder:
    """The job's order in blocks: a block has one batch for each rank of every replica."""

    data: TrainingData
    plan: SamplePlan  # a step of it is a block; its order is None where each pass is a permutation
    part: int  # number of this rank's part of a block
    parts: int  # number of ranks in the job
    _newest: tuple[int, range, list[Any]] = (-1, range(0), [])  # a block, its positions here, and their items

    @classmethod
    def of(cls, loader: DataLoader[Any], part: int, parts: int) -> "BlockOrder":
        """Return the order of a DataLoader. Raises ConfigError for one that cannot be kept."""
        group = RankGroup.find()
        data = TrainingData.of(loader, 1 if group is None else group.size)
        uniform = shuffles_all(data.sampler, data.dataset)
        order = None if uniform else SamplerOrder(data.sampler, 0, data.dataset, data.generator)
        width = data.batch_size * parts
        if not data.size or (data.drop_last and data.size < width):
            raise ConfigError(
                f"the script's DataLoader has {data.size} samples, too few for a batch of {data.batch_size} "
                f"on each of {parts} ranks: choose a smaller batch size, or drop_last=False"
            )
        end = "drop" if data.drop_last else "short"
        return cls(data, SamplePlan(data.size, width, width, 0, epoch_end=end, order=order), part, parts)

    @property
    def left(self) -> int:
        """The number of positions of the short block of a pass; 0 without one."""
        return 0 if self.data.drop_last else self.data.size % self.plan.global_batch_size

    def end(self, block: int) -> int:
        """Return the first block of the pass after that of ``block``."""
        return (block // self.plan.steps_per_pass + 1) * self.plan.steps_per_pass

    def part_of(self, block: int) -> tuple[range, list[Any]]:
        """Return the positions of this rank's part of ``block``, which count through all passes, and what
        they have."""
        if self._newest[0] != block:
            positions = self.plan.positions(block, 0)
            part = cut(len(positions), [1] * self.parts)[self.part]
            positions = positions[part.start : part.stop]
            self._newest = block, positions, self._items(positions)
        return self._newest[1:]

    def indices(self, block: int) -> list[int]:
        """Return the data set indices of this rank's part of ``block``."""
        positions, items = self.part_of(block)
        return items if self.plan.order is None else indices_of(items, positions)

    def weight(self, block: int) -> int:
        """Return the number of samples of this rank's part of ``block``."""
        _, items = self.part_of(block)
        return sum(map(len, items)) if self.data.batched else len(items)

    def reads(self, block: int) -> Any:
        """Return what a sampler yields for this rank's batch of ``block``; of weight 0: another's samples."""
        positions, items = self.part_of(block)
        items = items or self._items(range(positions.start - 1, positions.start))
        return items[0] if self.data.batched or self.data.single else items

    def same(self, other: "BlockOrder") -> bool:
        """Whether another order has the same samples in the same batches."""
        digests = [x.plan.order and x.plan.order.digest for x in (self, other)]
        sizes = [(x.size, x.batch_size, x.batched, x.drop_last) for x in (self.data, other.data)]
        is_same = _has_same_samples(self.data.dataset, other.data.dataset)
        return digests[0] == digests[1] and is_same and sizes[0] == sizes[1]

    def _items(self, positions: range) -> list[Any]:
        if self.plan.order is not None:
            return self.plan.order.items(positions)
        return sample_indices(self.data.size, 0, positions.start, len(positions))


class BlockReader(Sampler[Any]):
    """Yields what this rank reads for the blocks from ``first`` to before ``end``."""

    def __init__(self, order: BlockOrder) -> None:
        self.first = self.end = 0
        self._order = order

    def __iter__(self) -> Iterator[Any]:
        yield from map(self._order.reads, range(self.first, self.end))


Loader = DataLoader[Any]
_iterate, _length = DataLoader.__iter__, DataLoader.__len__
_ALIKE = 3  # steps in a row with equal inputs that show equal data: the numbers of one may be equal by chance
_SAME = (
    "all replicas train on the same data, because the script reads them in a fixed order: give the "
    "DataLoader shuffle=True, draw the batches from torch's random generator, let an IterableDataset yield "
    f"the part of FABRIC_REPLICA, or {OWN_WAY}"
)
_ONE_SET = f", and --adopt deals out one data set whose size does not change: {OWN_WAY}"
_WHOLE = "read the batches of an evaluation within torch.no_grad() or in eval mode"


class AdoptedSampler(StepSampler):
    """The sampler that an adopted loop's session asks; a step has ``batches`` blocks."""

    def __init__(self, data: "AdoptedData", order: BlockOrder, batches: int) -> None:
        total = order.plan.global_batch_size * batches
        # A pass may be shorter than a step: then it is one short block.
        super().__init__(max(order.data.size, total), global_batch_size=total)
        self._data, self._order, self._batches = data, order, batches

    def indices(self, step: int) -> list[int]:
        return [i for block in self._data.blocks_of(step) for i in self._order.indices(block)]

    def take(self, step: int) -> bool:
        return self._data.take(step)

    def describe(self) -> dict[str, Any]:
        """Describe the order, as far as the audit has a rule for it."""
        described, order = super().describe(), self._order
        more: dict[str, Any] = {} if order.plan.order is None else {"order": order.plan.order.digest}
        if content := content_digest(order.data.dataset):
            more |= {"content": content}
        if self._batches == 1 and order.parts == self._data.replicas and not order.left:
            return described | more
        return {name: described[name] for name in ("policy", "data_slots", "micro_batches", "seed")} | more


class OpenReads:
    """The DataLoaders whose batches the next backward pass uses.

    An iteration that has ended is an evaluation. One that the script leaves after one batch is a look at the
    data, and a batch read within ``torch.no_grad()`` is not trained on, unless two steps do the same.
    """

    def __init__(self) -> None:
        self._open: list[Loader] = []
        self._looks: list[Loader] = []
        self._looks_before: list[Loader] = []  # before the last backward pass
        self._without_gradients: list[Loader] = []

    def note(self, loader: Loader) -> None:
        """The script has a batch of the loader."""
        (self._open if torch.is_grad_enabled() else self._without_gradients).append(loader)

    def close(self, loader: Loader, *, is_look: bool) -> None:
        """The script has left an iteration, or ended it."""
        if is_look and loader in self._open:
            self._looks.append(loader)
        self._open = [x for x in self._open if x is not loader]
        self._without_gradients = [x for x in self._without_gradients if x is not loader]

    def __contains__(self, loader: Loader) -> bool:
        return loader in self._open or loader in self._without_gradients

    def take(self, has_batch: bool) -> list[Loader]:
        """Return the loaders that this backward pass uses, beside a batch of the job."""
        looks = self._looks + ([] if has_batch else self._without_gradients)
        trained = self._open + [x for x in looks if x in self._looks_before]
        self._open, self._looks, self._looks_before, self._without_gradients = [], [], looks, []
        return trained


class AdoptedData:
    """Counts the batches that a loop trains on, and gives it those of the job."""

    def __init__(self, loop: "AdoptedLoop", replicas: int, slot: int) -> None:
        self.replicas, self.slot = replicas, slot
        self.sampler: AdoptedSampler | None = None
        self._loop = loop
        self._loader: Loader | None = None  # that trains, or may do so while ``_trains`` is false
        self._trains = False
        self._was_whole = False  # the script's last iteration over that loader was an evaluation
        self._order: BlockOrder | None = None
        self._orders: WeakKeyDictionary[Loader, BlockOrder] = WeakKeyDictionary()
        self._asked: list[Loader] = []  # had the length of the job's pass before one has trained
        self._reads = OpenReads()
        self._reader: BlockReader | None = None
        self._feeder: Loader | None = None  # reads the batches of the script's loader in the job's order
        self.batches_per_step = 0  # batches of a step; 0 until the first step shows it
        self._first = 0  # the first block of the step that the loop is at
        self.skipped = 0  # blocks of passes that the loop has left
        self._newest = -1  # the block that the loop got last
        self._unused = False  # no backward pass has followed that block yet
        self._used: list[int] = []  # blocks of this step that a backward pass has used
        self._kept: Any = None  # the newest batch, which a loop that only counts gets again

    # --- the script's DataLoaders -------------------------------------------------------------------------

    def length(self, loader: Loader) -> int:
        """Return the number of batches of a pass on this rank."""
        # Many scripts divide the sum of an epoch's losses by the length when they have evaluated.
        trained = self._trains and loader is self._loader and torch.is_grad_enabled() and not self._was_whole
        if not trained and (self._evaluates() or not self._may_train(loader)):
            return _length(loader)
        if not self._trains:
            self._asked.append(loader)
        return self._order_of(loader).plan.steps_per_pass

    def iterate(self, loader: Loader) -> Iterator[Any]:
        """Return the job's batches for the loader that the loop trains on, else the loader's own."""
        is_whole = self._evaluates() or not self._may_train(loader)
        if not is_whole or loader is self._loader:
            self._was_whole = is_whole
        return self._whole(loader) if is_whole else self._pass(*self._adopt(loader))

    def _evaluates(self) -> bool:
        """Whether the script evaluates now: without gradients, or with its model in eval mode."""
        if not torch.is_grad_enabled():
            return True
        objects = self._loop.objects
        modules = outermost_modules() if objects is None else [objects.model]
        return bool(modules) and not any(wrapped(module).training for module in modules)

    def _may_train(self, loader: Loader) -> bool:
        """Whether the loop trains on this loader, as far as its use has shown."""
        if loader is self._loader:
            return True
        is_late = self._order is None and self._loop.session is not None
        if is_late or isinstance(loader.dataset, IterableDataset):
            return False
        if self._trains:
            return self._goes_on(loader)
        return not (is_in_order(loader) and _another_shuffles(loader))

    def _goes_on(self, loader: Loader) -> bool:
        """Whether the loader is that of the training, which the script has made again."""
        assert self._order is not None
        if not _has_same_samples(loader.dataset, self._order.data.dataset):
            return False
        try:
            return self._order.same(self._order_of(loader))
        except ConfigError:  # it cannot be that of a training
            return False

    def _adopt(self, loader: Loader) -> tuple[Loader, BlockReader]:
        """Return what reads the job's batches for the loader, and the sampler of that."""
        if loader is self._loader:
            assert self._feeder is not None and self._reader is not None
            return self._feeder, self._reader
        if not self._trains:
            self._order = self._order_of(loader)
        assert self._order is not None
        self._loader, self._reader = loader, BlockReader(self._order)
        names = (*READING, "num_workers", "collate_fn", "persistent_workers")
        same: Mapping[str, Any] = {name: getattr(loader, name) for name in names}
        if self._order.data.single:
            self._feeder = DataLoader(loader.dataset, batch_size=None, sampler=self._reader, **same)
        else:
            self._feeder = DataLoader(loader.dataset, batch_sampler=self._reader, **same)
        return self._feeder, self._reader

    def _order_of(self, loader: Loader) -> BlockOrder:
        """Return the order of a loader. Raises ConfigError for one that cannot be kept."""
        if loader is self._loader and self._order is not None:
            return self._order
        if loader not in self._orders:
            group = RankGroup.find()
            rank, ranks = (group.rank, group.size) if group is not None else (0, 1)
            part, parts = self.slot * ranks + rank, self.replicas * ranks
            self._orders[loader] = BlockOrder.of(loader, part, parts)
        return self._orders[loader]

    def _pass(self, feeder: Loader, reader: BlockReader) -> Iterator[Any]:
        """Yield the batches from the first that is not used to the end of the pass."""
        reading = None
        first, end = self._enter_pass()
        for block in range(first, end):
            self._loop.before_batch()
            if not self._loop.computes and self._kept is not None:
                batch, reading = self._kept, None
            else:
                if reading is None:
                    reader.first, reader.end = block, end
                    reading = _iterate(feeder)
                batch = self._kept = next(reading)
            self._newest, self._unused = block, True
            self._reads.note(feeder)
            try:
                yield batch
            except GeneratorExit:
                self._reads.close(feeder, is_look=block == first)
                raise
            if self._unused:
                raise ConfigError(
                    f"the script reads the DataLoader over {_name(self._loader)} with gradients on, and runs "
                    f"no backward pass before it reads the next batch: switch a prefetcher off, {_WHOLE}, or "
                    f"{OWN_WAY}"
                )

    def _enter_pass(self) -> tuple[int, int]:
        """Return the first block of an iteration, and the block after its last.

        After an iteration that the script has left, another sampler than plain shuffling begins its next
        pass. A shuffled pass goes on, and the iteration has as many batches as a pass.
        """
        assert self._order is not None
        check_size(_name(self._loader), len(self._order.data.sampler), self._order.data.size)
        block = self._first + len(self._used)
        end = self._order.end(block)
        if not self._trains or not block % self._order.plan.steps_per_pass:
            return block, end
        if self._order.plan.order is None:
            return block, block + self._order.plan.steps_per_pass
        if self._used:
            raise ConfigError(
                "the script leaves an iteration of its DataLoader between two batches of one step, and "
                f"--adopt deals out whole steps: make the step first, or {OWN_WAY}"
            )
        self.skipped += end - block
        self._first = end
        return end, self._order.end(end)

    def _whole(self, loader: Loader) -> Iterator[Any]:
        """Yield the loader's own batches, and note them until it has ended: none of them is for training."""
        count, ended = 0, False
        try:
            for batch in _iterate(loader):
                count += 1
                self._reads.note(loader)
                yield batch
                # An evaluation of a loop that only counts has results that nothing uses.
                if not self._loop.computes and loader in self._reads:
                    break
            ended = True
        finally:
            self._reads.close(loader, is_look=not ended and count == 1)

    # --- steps and blocks ---------------------------------------------------------------------------------

    def note_backward(self) -> None:
        """The loop computes the gradient of the batches that it has read."""
        for loader in self._reads.take(self._unused):
            if loader is not self._feeder:
                self._refuse_other(loader)
        if self._newest < 0 or self._order is None:
            self._check_lengths()
            return
        if not self._unused and self._newest not in self._used:
            raise ConfigError(
                f"the script runs a backward pass without a new batch of the DataLoader over "
                f"{_name(self._loader)} in this step, and --adopt deals out a batch once: {OWN_WAY}"
            )
        self._unused = False
        if self._newest not in self._used:
            self._used.append(self._newest)
        if not self._trains:
            self._trains = True
            self._check_lengths()

    def _refuse_other(self, loader: Loader) -> None:
        """Raise ConfigError for a loader that trains and is not dealt out, unless it is a stream."""
        if isinstance(loader.dataset, IterableDataset) and not self._trains:
            self._loader = self._order = None  # no other loader has trained
        elif self._order is not None or self._loop.session is not None:
            raise ConfigError(
                f"the script trains on batches of the DataLoader over {_name(loader)} that --adopt does not "
                "deal out, because it deals out one DataLoader, which is read with gradients on and with the "
                f"model in train mode: {_WHOLE}, or {OWN_WAY}"
            )
        else:
            raise ConfigError(
                f"the script trains on the DataLoader over {_name(loader)}, which has a fixed order, and "
                "--adopt took another one that shuffles for that of the training: give the training's "
                f"shuffle=True and the others shuffle=False, or {OWN_WAY}"
            )

    def _check_lengths(self) -> None:
        """Refuse a script that has the job's length for a loader that another's use has shown to be whole."""
        asked, self._asked = self._asked, []
        for loader in asked:
            trains = self._order is not None and self._may_train(loader)
            if not trains and self._order_of(loader).plan.steps_per_pass != _length(loader):
                raise ConfigError(
                    f"the script has asked for len() of the DataLoader over {_name(loader)} before the first "
                    "step, when --adopt could not know that it does not train: give the DataLoader of an "
                    f"evaluation shuffle=False and that of the training shuffle=True, or {OWN_WAY}"
                )

    def resume(self, step: int, batches: int, skipped: int) -> None:
        """The loop begins at ``step``, as a file says that the script has saved."""
        self.batches_per_step, self.skipped = batches, skipped
        self._first = step * batches + skipped

    def begin(self) -> None:
        """The loop is about to exchange its first step, so the batches of a step are known."""
        own = next((x for x in living(DataLoader) if type(x).__iter__ is not DataLoader.__iter__), None)
        if own is not None:
            raise ConfigError(
                f"the script has a {type(own).__name__}, which has its own way to give batches, and --adopt "
                f"sees those of torch.utils.data.DataLoader alone: use that, or {OWN_WAY}"
            )
        if self._order is None or self._loader is None:
            return
        cycled = [x for cycle in living(itertools.cycle) for x in gc.get_referents(cycle)]
        own_code = AdoptedData._pass.__code__
        if any(isinstance(x, GeneratorType) and x.gi_code is own_code for x in cycled):
            raise ConfigError(
                "the script repeats its DataLoader by itertools.cycle, which gives the batches of the first "
                f"pass again: loop over the DataLoader in each epoch, or {OWN_WAY}"
            )
        refuse_memory(self._loader.collate_fn, self._loader.dataset)
        refuse_other_data(sys._getframe(), self._loader)  # noqa: SLF001
        self.batches_per_step = self.batches_per_step or len(self._used) or 1
        left, parts = self._order.left, self._order.parts
        blocks = self._order.plan.steps_per_pass
        if blocks % self.batches_per_step:
            raise ConfigError(
                f"the script makes a step of {self.batches_per_step} batches, and a pass over the data "
                f"has {blocks}: choose a batch size or a number of replicas so that steps divide the pass, "
                f"give the DataLoader drop_last=True, or {OWN_WAY}"
            )
        if self.batches_per_step > 1 and left % parts:  # its samples would weigh more on one rank
            raise ConfigError(
                f"the last batch of a pass has {left} samples, which {parts} ranks cannot share evenly, and "
                "the script adds it to others in one step: give the DataLoader drop_last=True"
            )
        self.sampler = AdoptedSampler(self, self._order, self.batches_per_step)

    def blocks_of(self, step: int) -> range:
        """Return the numbers of the blocks of ``step``."""
        first = step * self.batches_per_step + self.skipped
        return range(first, first + self.batches_per_step)

    def take(self, step: int) -> bool:
        """Return whether the loop has computed the batches of ``step``. Raises ConfigError for another number
        of batches than in the first step."""
        used, own = self._used, self.blocks_of(self._loop.number)
        if len(used) != self.batches_per_step:
            raise ConfigError(
                f"the script makes a step of {len(used)} batches after steps of {self.batches_per_step}, and "
                f"--adopt cannot tell which batches the job's steps have: {OWN_WAY}"
            )
        return self._loop.computes and step == self._loop.number and used == list(own)

    def next_step(self) -> None:
        """The loop goes to its next step."""
        self._used = []
        self._first = self.blocks_of(self._loop.number).start

    @property
    def weight(self) -> float:
        """The number of samples of a step here; 1 where the loop has no DataLoader."""
        return 1.0 if self._order is None else float(sum(map(self._order.weight, self._used)))

    def describe(self) -> str:
        """Name the data for a sentence."""
        if self.sampler is None or self._order is None:
            return "the batches that the loop makes, with generators seeded for each step and replica"
        data = self._order.data
        unit = "batches" if data.batched else "samples"
        sampling = (
            "" if self._order.plan.order is None else f" in the order of its {self._order.plan.order.name}"
        )
        here = data.batch_size * self.batches_per_step
        return (
            f"the DataLoader over {_name(self._loader)}{sampling} ({here} {unit} a step here, "
            f"{self.sampler.global_batch_size} in the job)"
        )


class InputWatch:
    """Finds replicas that all compute the same data, by a number that each makes of its inputs.

    The sums of the numbers and of their squares are metrics of the step, so all members judge alike.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._steps = self._alike = 0
        self._number = 0
        self._sees_input = False
        self._hook = model.register_forward_pre_hook(self._look, with_kwargs=True)

    def _look(self, _: torch.nn.Module, arguments: Any, named: Any) -> None:
        if torch.is_grad_enabled():
            values = [x for x in torch.utils._pytree.tree_leaves((arguments, named)) if torch.is_tensor(x)]  # noqa: SLF001
            for value in values[:1]:
                self._sees_input = True
                content = value.detach().reshape(-1)[:4096].cpu().contiguous().view(torch.uint8).numpy()
                self._number = xxhash.xxh3_64_intdigest(content.tobytes(), self._number) >> 44

    def take(self) -> dict[str, float]:
        """Return this step's numbers for the metrics; none before the third step, see ``judge``."""
        number, self._number = self._number, 0
        self._steps += 1
        # The first step's forward is over. Loops draw one batch ahead, and the first before they have a seed.
        if self._steps < 4:
            return {}
        if not self._sees_input:
            raise ConfigError(
                f"the loop does not call its outermost module, so --adopt cannot see its data: {OWN_WAY}"
            )
        return {"fabric.inputs": 1.0, "fabric.sum": float(number), "fabric.squares": float(number * number)}

    def judge(self, metrics: Mapping[str, float]) -> None:
        """Raise ConfigError where two replicas or more had equal inputs in the last steps.

        ``metrics``: of a committed step.
        """
        count = metrics.get("fabric.inputs", 0.0)
        alike = count > 1 and count * metrics["fabric.squares"] == metrics["fabric.sum"] ** 2
        self._alike = self._alike + 1 if alike else 0
        if self._alike == _ALIKE:
            raise ConfigError(_SAME)


@search(None)
def refuse_other_data(frame: FrameType | None, loader: Loader) -> None:
    """Raise ConfigError where a loop around ``frame`` trains on other data in a later pass."""
    data = loader.dataset
    for sources in repeated(frame):
        for source in sources:
            for statement in (x for x, value in made_each_pass(source) if value is data):
                own, given = set(stores([source.node])), names_read(statement.value)
                if isinstance(data, TensorDataset) and not own & given:
                    continue  # each pass makes it of the same tensors
                raise ConfigError(
                    f"{source.place(statement)} makes new data in each pass of a loop{_ONE_SET}"
                )
            for line in _growing(source.node, source.values, data):
                raise ConfigError(f"{source.file}:{line} adds to the data in a loop{_ONE_SET}")


def _growing(node: ast.AST, values: Mapping[str, Any], data: Any, follows: bool = True) -> Iterator[int]:
    """Yield the lines that add to what the data set's length goes by, or call a method of it that does.

    ``follows``: also look into such a method.
    """
    methods = {x.name: x for x in functions_in(data)}
    length = methods.get("__len__")
    counted = {x.rpartition(".")[2] for x in names_read(length.node)} if length is not None else None
    for x in walked(node):
        name = ""
        if isinstance(x, ast.AugAssign) and isinstance(x.op, ast.Add):
            name = dotted(x.target) if isinstance(value_of(values, dotted(x.target)), list | deque) else ""
        elif isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute):
            name, method = dotted(x.func.value), methods.get(x.func.attr)
            if follows and method is not None and value_of(values, name) is data:
                if any(_growing(method.node, method.values, data, follows=False)):
                    yield x.lineno
                continue
            name = name if x.func.attr in GROWS else ""
        path = name.split(".")
        is_of_data = any(value_of(values, ".".join(path[: n + 1])) is data for n in range(len(path)))
        if is_of_data and (counted is None or path[-1] in counted):
            yield getattr(x, "lineno", 0)


def _another_shuffles(loader: Loader) -> bool:
    """Whether another DataLoader of the script has an order of its sampler."""

    def exist() -> bool:
        return any(
            x is not loader
            and not isinstance(x.dataset, IterableDataset)
            and BlockReader not in (type(x.sampler), type(x.batch_sampler))  # it reads for another one
            and not is_in_order(x)
            for x in living(DataLoader)
        )

    if not exist():
        return False
    gc.collect()  # it may be garbage that is not collected yet
    return exist()


def _has_same_samples(own: Any, other: Any) -> bool:
    """Whether two data sets are one, or were made of the same tensors."""
    if isinstance(own, TensorDataset) and isinstance(other, TensorDataset):
        return len(own.tensors) == len(other.tensors) and all(map(operator.is_, own.tensors, other.tensors))
    return own is other


def _name(loader: Loader | None) -> str:
    return "no data" if loader is None else type(loader.dataset).__name__
