"""Values that travel with the gradients: tensors that forward changes, and states of each replica's own.

All members begin a step with equal buffers; forward passes then change each member's copy. Every such buffer
has a stand-in parameter, whose "gradient" is published, replayed and digested like any gradient. When a
gradient is dropped, the buffers go back to their values before its forward passes.

``average`` (BatchNorm's running statistics): the stand-in has the buffer times the member's weight. The sum,
divided by the total weight, is the weighted average. An integer buffer (``num_batches_tracked``) becomes the
value before the step plus the increments of all members, as in a single process.

``first`` (queues, the vectors of a spectral norm): the first member of the roster by name puts its values in,
and the sum is these values, bit by bit. If that member has no part in a step, all buffers stay as they were.

Each rank of a replica has such buffers. Where replicas may have unequal layouts, the ranks of a replica first
take the mean of their contributions. So all ranks of all replicas get the same average, in any layout.
"""

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import torch

from fabric.ckpt_server.state.training_state import capture, restore
from fabric.client.data.loader import data_slot_of
from fabric.client.gradients.carried_attributes import CarriedAttributes, read_attributes
from fabric.client.process.rank_group import RankGroup
from fabric.errors import ConfigError
from fabric.model import Record, Value, first_of
from fabric.protocol.rules.lanes import ReplicaLayout
from fabric.runtime.config import Settings, parse_replicas

_DIRECT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SMALL = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16)
_HALF_BITS = 32


def has_exact_values(tensor: torch.Tensor) -> bool:
    """Whether ``exact_values`` knows the type of ``tensor``."""
    types = (*_DIRECT, *_SMALL, torch.int32, torch.int64, torch.complex64, torch.complex128)
    return (tensor.dtype in types or tensor.dtype.itemsize == 1) and tensor.layout == torch.strided


def exact_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of ``tensor`` as floating numbers, from which ``write_exact`` restores each bit."""
    if tensor.dtype in _DIRECT:
        return tensor.clone()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).clone()
    if tensor.dtype == torch.int64:
        high = tensor >> _HALF_BITS
        return torch.stack([high, tensor - (high << _HALF_BITS)]).double()
    if tensor.dtype in _SMALL or tensor.dtype == torch.int32:
        return tensor.to(torch.float64 if tensor.dtype == torch.int32 else torch.float32)
    return tensor.contiguous().view(torch.uint8).float()  # the bits of floating types of 8 bits


def write_exact(values: torch.Tensor, into: torch.Tensor) -> None:
    """Write what ``exact_values`` has returned into a tensor of the type that it came from."""
    if into.dtype == torch.int64:
        halves = values.long()
        into.copy_((halves[0] << _HALF_BITS) + halves[1])
    elif into.is_complex():
        into.copy_(torch.view_as_complex(values.contiguous()))
    elif into.dtype in (*_DIRECT, *_SMALL, torch.int32):
        into.copy_(values)
    else:
        into.copy_(values.to(torch.uint8).view(into.dtype))


CHOICES = ("average", "first", "ignore")
Buffers = str | Mapping[str, str]  # a choice for all statistics, or choices by pattern of a name

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
_OBSERVERS = ("ObserverBase", "FakeQuantizeBase")  # of torch.ao.quantization, which is slow to import
_NEVER_AVERAGED = (torch.float16, torch.bfloat16, torch.bool)


class BufferChoices(Value):
    """The choice for each tensor that forward changes, by its name in the model's state.

    Such a tensor is a buffer, or a frozen parameter such as MoCo's second encoder. ``average`` is right for
    running means and counters. ``first`` takes the value of one member, as DistributedDataParallel does: it
    is right for queues, their pointers, codebooks, and the vectors of a power iteration. ``ignore`` keeps a
    value on each replica.

    The modules of torch whose buffers forward changes are known here. Where one choice is plainly right, that
    is the default. Tensors that nobody has named are found at the first forward, see ``BufferWatch``.
    """

    carried: Mapping[str, str]  # name -> "average" or "first"; a tensor with several names has one here
    local: frozenset[str]  # all names of the tensors that stay on each replica
    named: frozenset[str]  # all names of the tensors for which there is a choice


def changing_buffers(model: torch.nn.Module) -> list[str]:
    """Return the names of running statistics, as normalisation layers have them."""
    return [name for name, _ in model.named_buffers() if _is_statistic(name)]


def default_buffers(model: torch.nn.Module) -> str:
    """Return the choice for a script that cannot make one: statistics are averaged."""
    return "average" if changing_buffers(model) else "refuse"


def choose_buffers(model: torch.nn.Module, wanted: Buffers) -> BufferChoices:
    """Return the choice for each tensor of ``model``. Raises ConfigError."""
    patterns = {} if isinstance(wanted, str) else dict(wanted)
    check_choices(wanted)
    kinds = _kinds(model)
    carried: dict[str, str] = {}
    local: set[str] = set()
    named: set[str] = set()
    used: set[str] = set()
    for names, tensor in _tensors(model):
        kind = next((kinds[name] for name in names if name in kinds), "")
        pattern = next((p for p in patterns if any(fnmatchcase(name, p) for name in names)), None)
        used.update(p for p in patterns if any(fnmatchcase(name, p) for name in names))
        if pattern is not None:
            choice = patterns[pattern]
        elif not kind:
            continue
        elif kind == "statistics" and (wanted == "refuse" or not isinstance(wanted, str)):
            raise ConfigError(
                f"forward changes the buffer {names[0]!r} differently on every replica: pass "
                'buffers="average" to share their average, buffers="ignore" to keep them local, or use a '
                "layer without running statistics"
            )
        else:
            choice = str(wanted) if kind == "statistics" or wanted in ("ignore", "first") else "first"
        named.update(names)
        if choice == "ignore":
            local.update(names)
        else:
            _check(names[0], tensor, choice)
            carried[names[0]] = choice
    for attribute in read_attributes(model) if "ignore" in patterns.values() else ():
        pattern = next((p for p in patterns if fnmatchcase(attribute.full_name, p)), "")
        if patterns.get(pattern) == "ignore":
            named.add(attribute.full_name)
            used.add(pattern)
    unused = next((p for p in patterns if p not in used), None)
    if unused is not None:
        raise ConfigError(
            f"buffers has the pattern {unused!r}, and no buffer and no frozen parameter of the model has "
            "such a name: give names as model.named_buffers() shows them, with * for any characters"
        )
    return BufferChoices(carried, frozenset(local), frozenset(named))


def check_choices(wanted: Buffers) -> None:
    """Raise ConfigError for a choice that does not exist."""
    given = {"buffers": wanted} if isinstance(wanted, str) else {f"buffers[{p!r}]": wanted[p] for p in wanted}
    for place, choice in given.items():
        if choice not in CHOICES and not (place == "buffers" and choice == "refuse"):
            raise ConfigError(
                f'{place} is {choice!r}: it must be "average", "first" or "ignore", for all statistics, or '
                'by pattern as {"*.queue": "first"}'
            )


def _is_statistic(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in _STATISTICS


def _tensors(model: torch.nn.Module) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield each buffer and each frozen parameter with all its names."""
    names: dict[torch.Tensor, list[str]] = {}  # tensors are hashed by identity
    for name, tensor in [
        *model.named_buffers(remove_duplicate=False),
        *model.named_parameters(remove_duplicate=False),
    ]:
        if not (isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad):
            names.setdefault(tensor, []).append(name)
    yield from ((own, tensor) for tensor, own in names.items())


def _kinds(model: torch.nn.Module) -> dict[str, str]:
    """Return the kind of each buffer of torch's modules that forward changes, by name."""
    kinds = {
        name: "statistics" for name, _ in model.named_buffers(remove_duplicate=False) if _is_statistic(name)
    }
    for place, module in model.named_modules(remove_duplicate=False):
        prefix = f"{place}." if place else ""
        bases = {base.__name__ for base in type(module).__mro__}
        own: list[str] = []
        if bases.intersection(_OBSERVERS):
            own += [name for name, _ in module.named_buffers(recurse=False)]
        if "_SpectralNorm" in bases:  # torch.nn.utils.parametrizations.spectral_norm
            own += ["_u", "_v"]
        for hook in module._forward_pre_hooks.values():  # noqa: SLF001
            if type(hook).__name__ == "SpectralNorm":  # torch.nn.utils.spectral_norm
                own += [f"{hook.name}_u", f"{hook.name}_v"]
        kinds |= {prefix + name: "vectors" for name in own}
    return kinds


def _check(name: str, tensor: torch.Tensor, choice: str) -> None:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if choice == "average" and (tensor.dtype in _NEVER_AVERAGED or tensor.is_complex()):
        raise ConfigError(
            f"the buffer {name!r} is {dtype}, which has no exact average: keep it in float32 or float64, or "
            f'choose buffers={{"{name}": "first"}}'
        )
    if not tensor.numel():
        raise ConfigError(
            f"the buffer {name!r} has no element yet, and forward gives it its shape: call the model once "
            f'before its training, or choose buffers={{"{name}": "ignore"}}'
        )
    if not has_exact_values(tensor):
        raise ConfigError(
            f'the buffer {name!r} is {dtype}, which fabric cannot send: choose buffers={{"{name}": "ignore"}}'
        )


_SAMPLED = 4096  # elements that are compared of a large tensor
_NAMED = 3  # tensors that a sentence names


class _Mark(Value):
    """The remembered value of a tensor."""

    shape: torch.Size
    version: int
    sample: torch.Tensor
    is_whole: bool  # the sample has every element

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "_Mark":
        local: Any = tensor.detach()
        if hasattr(local, "to_local"):  # a part of a DTensor is gathered and dropped in forward
            local = local.to_local()
        flat = local.reshape(-1)
        apart = max(1, flat.numel() // _SAMPLED)
        has_version = not (hasattr(tensor, "to_local") or tensor.is_inference())
        version = tensor._version if has_version else 0  # noqa: SLF001
        return cls(tensor.shape, version, flat[::apart].clone(), apart == 1)

    def differs(self, other: "_Mark") -> bool:
        if self.shape != other.shape or self.sample.shape != other.sample.shape:
            return True
        written = self.version != other.version and not self.is_whole
        # Compare bits: a NaN equals no NaN.
        return written or not torch.equal(self.sample.view(torch.uint8), other.sample.view(torch.uint8))


class BufferWatch:
    """Watches the persistent buffers and the frozen parameters of ``model``, except those in ``named``.

    Forward may change a tensor from some step on. So the steps 1, 2, 4, 8 and so on of this process count.

    Each replica would change such a tensor differently, and the job would end in a dispute about the state.
    So the values before and after the first forward passes are compared, before the step is committed.
    Buffers that are not persistent are caches, which no state has, so they are not watched.
    """

    def __init__(self, model: torch.nn.Module, named: Collection[str]) -> None:
        self._model, self._named = model, frozenset(named)
        self._marks: dict[str, _Mark] = {}
        self._trainable: list[tuple[int, int]] = []
        self._checked = 0
        self.begin()

    def begin(self) -> None:
        """Remember the values before a forward."""
        self._marks.clear()
        if self._checked & (self._checked + 1) == 0:
            with torch.no_grad():
                self._marks = {name: _Mark.of(tensor) for name, tensor in self._watched()}
            self._trainable = self._versions()

    def check(self) -> None:
        """Raise ConfigError if a tensor has changed since ``begin``, except where the user loaded a state."""
        if self._marks and self._trainable != self._versions():
            return
        self._checked += 1
        marks, self._marks = self._marks, {}
        if not marks:
            return
        with torch.no_grad():
            watched = ((name, tensor) for name, tensor in self._watched() if name in marks)
            changed = [name for name, tensor in watched if marks[name].differs(_Mark.of(tensor))]
        if changed:
            first = changed[0]
            raise ConfigError(
                f"forward has changed {first_of([repr(x) for x in changed], _NAMED)}, and each replica would "
                f'change them differently: choose for each, as buffers={{"{first}": "first"}} ("first" takes '
                'the values of one replica, for queues and codebooks; "average" averages running means; '
                '"ignore" keeps the values on each replica)'
            )

    def _watched(self) -> Iterator[tuple[str, torch.Tensor]]:
        for place, module in self._model.named_modules():
            kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}  # noqa: SLF001
            frozen = {k: p for k, p in module._parameters.items() if p is not None and not p.requires_grad}  # noqa: SLF001
            for key, tensor in {**kept, **frozen}.items():
                name = f"{place}.{key}" if place else key
                if tensor is None or name in self._named or tensor.is_quantized:
                    continue
                if tensor.layout == torch.strided and tensor.device.type != "meta":
                    yield name, tensor

    def _versions(self) -> list[tuple[int, int]]:
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        return [(p.data_ptr(), p._version) for p in trainable if not hasattr(p, "to_local")]  # noqa: SLF001


_PREFIX = "buffer:"
NAME = "buffers"  # among the objects of the shared state


def first_member(record: Record | None) -> str:
    """Return the member whose values all take: of those with the job's state, the first by name."""
    roster = record.roster if record is not None else ()
    with_state = [x.replica for x in roster if not x.joining]
    return min(with_state or [x.replica for x in roster], default="")


class RankMeans(Value):
    """Means of the stand-ins' gradients over the ranks of this replica that hold the buffer."""

    group: RankGroup
    sizes: Mapping[str, int]  # elements of each stand-in that any rank has, in one order at all ranks
    holders: Mapping[str, int]  # the number of ranks that have it

    @classmethod
    def of(cls, group: RankGroup, layout: ReplicaLayout) -> "RankMeans | None":
        """Return the means for the stand-ins in ``layout``, None where no rank has one."""
        stand_ins = [x for row in layout.ranks for x in row if x.name.startswith(_PREFIX)]
        sizes = {x.name: x.region.elements for x in stand_ins}
        return cls(group, sizes, Counter(x.name for x in stand_ins)) if stand_ins else None

    def take(self, stand_ins: Iterable[tuple[str, torch.nn.Parameter]]) -> None:
        """Replace each ``.grad`` by its mean. All ranks of the replica must call it."""
        gradients = {name: stand_in.grad for name, stand_in in stand_ins if stand_in.grad is not None}
        where = next((gradient.device for gradient in gradients.values()), torch.device("cpu"))
        flat = torch.zeros(sum(self.sizes.values()), dtype=torch.float64, device=where)
        parts = dict(zip(self.sizes, torch.split(flat, list(self.sizes.values())), strict=True))
        for name, gradient in gradients.items():
            parts[name].copy_(gradient.view(-1))
        self.group.add(flat)
        for name, gradient in gradients.items():
            gradient.copy_((parts[name] / self.holders[name]).view(gradient.shape))


@dataclass(slots=True)
class _Carried:
    """One tensor of the model and its stand-in."""

    name: str
    choice: str
    module: torch.nn.Module
    attribute: str
    tensor: torch.Tensor  # the tensor that stays in the module, also if forward replaces it
    persistent: bool
    stand_in: torch.nn.Parameter
    before: torch.Tensor  # the value at the step boundary

    @classmethod
    def of(cls, model: torch.nn.Module, name: str, choice: str) -> "_Carried":
        place, _, attribute = name.rpartition(".")
        module = model.get_submodule(place)
        tensor: torch.Tensor = getattr(module, attribute)
        if choice == "first":
            values = exact_values(tensor.detach())
        else:
            values = tensor.detach() if tensor.is_floating_point() else tensor.double()
        persistent = attribute not in module._non_persistent_buffers_set  # noqa: SLF001
        stand_in = torch.nn.Parameter(torch.zeros_like(values))
        before = tensor.detach().clone()
        return cls(name, choice, module, attribute, tensor, persistent, stand_in, before)

    def take_back(self) -> None:
        """Write a tensor with which forward has replaced this one into this one. Raises ConfigError."""
        current = getattr(self.module, self.attribute)
        if current is self.tensor:
            return
        if not isinstance(current, torch.Tensor) or current.shape != self.tensor.shape:
            now = list(current.shape) if isinstance(current, torch.Tensor) else type(current).__name__
            raise ConfigError(
                f"forward has changed the shape of the buffer {self.name!r} from {list(self.tensor.shape)} "
                f"to {now}: give it its shape before the training, or choose "
                f'buffers={{"{self.name}": "ignore"}}'
            )
        self.tensor.copy_(current)
        setattr(self.module, self.attribute, self.tensor)

    def contribute(self, weight: float, scale: float) -> None:
        """Put the value into the stand-in's gradient."""
        if self.choice == "first":
            self.stand_in.grad = exact_values(self.tensor.detach())
        elif self.tensor.is_floating_point():
            self.stand_in.grad = self.tensor.detach() * weight
        else:
            self.stand_in.grad = (self.tensor - self.before).to(self.stand_in.dtype) / scale

    @torch.no_grad()
    def commit(self, total_weight: float) -> None:
        """Write the committed value into the tensor; keep the value before the step where there is none."""
        values = self.stand_in.grad
        if values is None:
            self.tensor.copy_(self.before)
        elif self.choice == "first":
            write_exact(values, self.tensor)
        elif self.tensor.is_floating_point():
            self.tensor.copy_(values)
        else:
            increments = torch.round(values * total_weight).to(self.tensor.dtype)
            self.tensor.copy_(self.before + increments)


class ForwardBuffers:
    """The tensors of ``model`` that ``choices`` carries."""

    def __init__(self, model: torch.nn.Module, choices: BufferChoices) -> None:
        self._carried = [_Carried.of(model, name, choice) for name, choice in choices.carried.items()]
        self._places = self._addresses()
        self.watch = BufferWatch(model, choices.named)
        self.attributes = CarriedAttributes(model, choices.named)
        self._weight = 0.0
        self.rank_means: RankMeans | None = None  # set where the ranks of a replica take means

    @property
    def stand_ins(self) -> list[tuple[str, torch.nn.Parameter]]:
        """The stand-in parameters by name."""
        return [(_PREFIX + x.name, x.stand_in) for x in self._carried]

    @property
    def of_one(self) -> frozenset[str]:
        """The names of the stand-ins whose sum has the values of one member."""
        return frozenset(_PREFIX + x.name for x in self._carried if x.choice == "first")

    @property
    def shared(self) -> dict[str, object]:
        """This object by its name in the shared state, if it has tensors that the model's state lacks."""
        return {NAME: self} if any(not x.persistent for x in self._carried) else {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the tensors that the model's own state lacks."""
        return {x.name: x.tensor for x in self._carried if not x.persistent}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take the tensors over."""
        with torch.no_grad():
            for x in self._carried:
                if not x.persistent:
                    x.tensor.copy_(state[x.name])

    def begin(self) -> None:
        """Remember the buffers at a step boundary, before the forward passes of the next step change them."""
        for x in self._carried:
            x.before = x.tensor.detach().clone()
        if self._carried:
            self._places, self._weight = self._addresses(), 0.0
        self.watch.begin()
        self.attributes.next_batch()

    def standing(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the value that ``tensor`` had when the step began, if it is one of these buffers.

        Any other tensor is returned as it is. So the boundary's state can be read while the step runs.
        """
        carried = self._places.get(tensor.data_ptr()) if self._places else None
        return carried.before if carried is not None and carried.before.shape == tensor.shape else tensor

    def contribute(self, weight: float, scale: float = 1.0) -> None:
        """Put the buffers into the exchange, times the weight of this replica's gradient so far.

        ``scale``: the factor by which the exchange multiplies gradients; increments must not change by it.
        All ranks of a replica must call it at the same point.
        """
        if weight > 0:
            self.watch.check()
            self.attributes.check()
        if not self._carried and self.rank_means is None:
            return
        with torch.no_grad():
            for x in self._carried:
                x.take_back()
            self._places = self._addresses()
            self._weight += weight
            for x in self._carried if weight or self.rank_means is not None else ():
                x.contribute(self._weight, scale)
            if self.rank_means is not None:
                self.rank_means.take(self.stand_ins)

    def commit(self, total_weight: float) -> None:
        """Write the committed values, which the stand-ins hold, into the buffers."""
        for x in self._carried:
            x.commit(total_weight)
            x.stand_in.grad = None
        self.begin()

    def _addresses(self) -> dict[int, _Carried]:
        """The carried tensors by their addresses: ``parameter.data = ...`` in forward changes an address."""
        return {x.tensor.data_ptr(): x for x in self._carried}

    @torch.no_grad()
    def drop(self) -> None:
        """Restore the buffers to the step boundary: the kept gradient of these forward passes is dropped."""
        for x in self._carried:
            x.take_back()
            x.tensor.copy_(x.before)
            x.stand_in.grad = None
        self._weight = 0.0


# Bytes of a row: for a state with up to _WORKERS loader workers, and for each worker beyond.
ROW_BYTES, WORKER_BYTES, _WORKERS = 64 * 1024, 16 * 1024, 4
_LENGTH_BYTES = 4
_MOST_BYTES = 1 << 26  # of a state that is not compressed
_STATES = "local_state"  # among the objects of the shared state


class ReplicaStates:
    """The states of ``objects`` in data slot ``slot`` of ``slots``. Without objects it does nothing.

    They are states of each replica's own, such as its data loader's: ``attach(..., local_state=)``. They
    travel with the gradients. A stand-in parameter has a row of bytes for each data slot. In a step a replica
    fills the row of its slot, and the sum over the replicas has the rows of all. So a step commits its
    gradient and its states together, and a replay of the gradient brings the states too. The rows are part
    of the shared state, where a replica that takes a slot over finds the slot's newest state.

    A state is compressed. Each number of the stand-in parameter carries two bytes of it. 65,535 survives the
    division by the weight and the multiplication after it.
    """

    def __init__(self, objects: Mapping[str, Any], slot: int, slots: int, device: torch.device) -> None:
        for name, value in objects.items():
            if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
                raise ConfigError(
                    f"local_state[{name!r}] is a {type(value).__name__} without state_dict and "
                    "load_state_dict: give an object that has both"
                )
        self.handed_over = 0  # how many times a state of the job was loaded into the objects
        self._objects = dict(objects)
        self._slot = slot
        workers = sum(max(0, int(getattr(x, "num_workers", 0)) - _WORKERS) for x in objects.values())
        self._row_bytes = _LENGTH_BYTES + ROW_BYTES + WORKER_BYTES * workers
        self._rows = torch.zeros(slots if objects else 0, self._row_bytes, dtype=torch.uint8, device="cpu")
        numbers = torch.zeros(len(self._rows), self._row_bytes // 2, dtype=torch.float32, device=device)
        stand_in = torch.nn.Parameter(numbers)
        self.stand_ins = [(_STATES, stand_in)] if objects else []

    @classmethod
    def of(cls, settings: Settings, objects: Mapping[str, Any], device: torch.device) -> "ReplicaStates":
        """Return the states of the replica that ``settings`` name. Raises ConfigError."""
        replicas = parse_replicas(settings.replicas)[1]
        if objects and settings.unequal:
            raise ConfigError(
                "local_state does not go with FABRIC_UNEQUAL: turn it off, or leave local_state out"
            )
        slot = data_slot_of(settings.replica, replicas, None) if objects else 0
        return cls(objects, slot, replicas, device)

    @property
    def shared(self) -> dict[str, object]:
        """This object by its name in the shared state; empty without objects."""
        return {_STATES: self} if self._objects else {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the newest committed state of every slot."""
        return {"rows": self._rows}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over the job's states, and load that of this replica's slot into the objects."""
        self._rows.copy_(state["rows"])
        self.hand_over()

    def contribute(self) -> None:
        """Put the objects' states, as they are now, into the exchange. Raises ConfigError if too large."""
        for _, stand_in in self.stand_ins:
            content = _content(self._objects, self._row_bytes)
            numbers = torch.from_numpy(np.frombuffer(content, "<u2").astype(np.float32))
            stand_in.grad = torch.zeros_like(stand_in)
            stand_in.grad[self._slot, : len(numbers)] = numbers.to(stand_in.device)

    def commit(self, total_weight: float) -> None:
        """Take the rows of the replicas that contributed to the committed step; the others stay."""
        for _, stand_in in self.stand_ins:
            assert stand_in.grad is not None
            # The gradient is the sum over the replicas, divided by the weight.
            numbers = torch.round(stand_in.grad * total_weight).to("cpu", torch.int32).numpy()
            rows = torch.from_numpy(numbers.astype("<u2").view(np.uint8))
            stand_in.grad = None
            filled = (rows[:, :_LENGTH_BYTES] != 0).any(dim=1)
            self._rows[filled] = rows[filled]

    def drop(self) -> None:
        """Keep the rows as they are: nothing of this step is committed."""
        for _, stand_in in self.stand_ins:
            stand_in.grad = None

    def hand_over(self) -> None:
        """Load the state of this replica's slot into the objects: it has no part in the newest step."""
        if not self._objects:
            return
        row = self._rows[self._slot].numpy().tobytes()
        length = int.from_bytes(row[:_LENGTH_BYTES], "little")
        if length:
            packed = row[_LENGTH_BYTES : _LENGTH_BYTES + length]
            content = zlib.decompressobj().decompress(packed, _MOST_BYTES)
            restore(memoryview(bytearray(content)), self._objects)
        self.handed_over += 1

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of ``loader``, pass after pass. After a hand-over go on from its place."""
        if not self._objects:
            raise ConfigError(
                "session.batches goes through a loader of attach(..., local_state=), and none is given: give "
                'attach local_state={"data": loader}, so that a replica that joins repeats no sample'
            )
        while True:
            handed_over, drawn = self.handed_over, iter(loader)
            while self.handed_over == handed_over:
                try:
                    batch = next(drawn)
                except StopIteration:
                    break
                yield batch


def _content(objects: Mapping[str, Any], row_bytes: int) -> bytes:
    """Return the objects' states with their length in front, an even number of bytes."""
    view = capture(objects, 0)
    parts = [tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for _, tensor in view.tensors]
    content = b"".join([view.header, *parts])
    packed = zlib.compress(content, 1)
    if len(packed) + _LENGTH_BYTES > row_bytes or len(content) > _MOST_BYTES:
        raise ConfigError(
            f"local_state has {len(packed)} bytes after compression, and {row_bytes - _LENGTH_BYTES} fit: "
            "leave out what every replica can compute, such as samples in a shuffle buffer"
        )
    framed = len(packed).to_bytes(_LENGTH_BYTES, "little") + packed
    return framed + bytes(len(framed) % 2)
