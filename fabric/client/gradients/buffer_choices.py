"""The user's choice for each tensor that forward changes: ``attach(..., buffers=)``.

Such a tensor is a buffer, or a frozen parameter such as MoCo's second encoder. ``average`` is right for
running means and counters. ``first`` takes the value of one member, as DistributedDataParallel does: it is
right for queues, their pointers, codebooks, and the vectors of a power iteration. ``ignore`` keeps a value on
each replica.

The modules of torch whose buffers forward changes are known here. Where one choice is plainly right, that is
the default. Tensors that nobody has named are found at the first forward, see ``BufferWatch``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from fabric.client.gradients.carried_attributes import read_attributes
from fabric.errors import ConfigError

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


@dataclass(frozen=True, slots=True)
class BufferChoices:
    """The choice for each tensor that forward changes, by its name in the model's state."""

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
            raise _refusal(names[0])
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
    given = (
        [("buffers", wanted)]
        if isinstance(wanted, str)
        else [(f"buffers[{p!r}]", c) for p, c in wanted.items()]
    )
    for place, choice in given:
        if choice not in CHOICES and not (place == "buffers" and choice == "refuse"):
            raise ConfigError(
                f'{place} is {choice!r}: it must be "average", "first" or "ignore", for all statistics, or '
                'by pattern as {"*.queue": "first"}'
            )


def _is_statistic(name: str) -> bool:
    return name.rsplit(".", 1)[-1] in _STATISTICS


def _tensors(model: torch.nn.Module) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Yield each buffer and each frozen parameter with all its names."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, torch.Tensor] = {}
    for name, tensor in [
        *model.named_buffers(remove_duplicate=False),
        *model.named_parameters(remove_duplicate=False),
    ]:
        if not (isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad):
            names.setdefault(id(tensor), []).append(name)
            tensors[id(tensor)] = tensor
    for key, tensor in tensors.items():
        yield names[key], tensor


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


def _refusal(name: str) -> ConfigError:
    return ConfigError(
        f"forward changes the buffer {name!r} differently on every replica: pass "
        'buffers="average" to share their average, buffers="ignore" to keep them local, or use a layer '
        "without running statistics"
    )


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
