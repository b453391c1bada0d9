"""Finds what ``attach`` lacks: schedulers, scalers, averages of the model and optimizers, and refuses it.

The mistake has no effect while all replicas run from the start. But a joining replica's scheduler is at
another step, and its average lacks the steps before, so that it differs from the others. torch keeps no list
of these objects, so this module searches all living objects for them.

``ema = [p.clone() for p in model.parameters()]`` with ``ema[i].lerp_(p, 0.01)`` after each step is an average
by hand. Two looks search for copies of the model: tensors of the shapes of all its trainable parameters, in
one dict, list, tuple or module. A copy is an average if it is near the parameters, moves from look to look,
and equals neither shared state nor the parameters of an earlier look.
"""

import ast
import gc
import itertools
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.optim.swa_utils import AveragedModel
from torch.utils.hooks import RemovableHandle

from fabric.client.loop.loop_flow import LOOPS, called, carry, dotted, pairs, stores, walked
from fabric.client.loop.user_functions import (
    RunningSource,
    UserFunction,
    attributes_of,
    callee,
    function_of,
    functions_in,
    loops_around,
    search,
    value_of,
)
from fabric.errors import ConfigError
from fabric.runtime.living_objects import contents_of_tuples, living, of_types, subtypes

# The choices for a scheduler or scaler that is not shared.
UNSHARED = ("refuse", "ignore")
# The search within an object of ``state=`` has a largest depth and a largest number of parts.
_DEPTH = 6
_PARTS = 10_000
_OF_OPTIMIZER = ("state", "param_groups", "defaults")  # they are many, and hold no other optimizer
# Looks come in windows: the first steps may have a learning rate of zero, and an average may begin late.
_FIRST_LOOKS = (3, 30, 300, 3000, 30_000)
_WATCHED = 4  # so many parameters or a few more are enough to tell a copy from an average
# Each tensor is known by at most so many of its elements, evenly spread.
_SAMPLE = 64
# A copy whose distance from the parameters is above this part of their norm is none.
_NEAR = 0.5
# Fewer elements than this in all parameters are near other values by chance.
_FEWEST = 16
_HOLDERS = {list, dict, OrderedDict}
ADVICE = 'pass it in state=, or say unshared="ignore" where that is intended'

_Sample = tuple[float, ...]
_Copies = list[tuple[str, list[_Sample]]]


class UnsharedWatch:
    """Raises ConfigError for a scheduler of ``optimizers``, or a scaler, that no object of ``state`` holds.

    ``ignored``: the user has said ``unshared="ignore"``.
    """

    def __init__(
        self, optimizers: Iterable[torch.optim.Optimizer], state: Mapping[str, Any], ignored: bool = False
    ) -> None:
        self._optimizers = list(optimizers)
        self._state = dict(state)
        self._ignored = ignored
        self._wrapped = self._count_wrapped()

    def check(self) -> None:
        """Search for schedulers, and for scalers that have scaled a loss already."""
        self._wrapped = self._count_wrapped()
        if self._ignored or self._refusal() is None:
            return
        gc.collect()  # a scheduler that was found may be garbage that is not collected yet
        refusal = self._refusal()
        if refusal is not None:
            raise refusal

    def _refusal(self) -> ConfigError | None:
        objects = living(LRScheduler, torch.amp.GradScaler, AveragedModel)
        inside = {id(x) for x in _parts(self._state.values(), _DEPTH, is_state=True)}
        # A wrapper around an optimizer, such as Accelerate's, returns the inner optimizer's ``param_groups``.
        groups = {id(x.param_groups) for x in self._optimizers}
        schedulers = [x for x in objects if isinstance(x, LRScheduler)]
        steered = [getattr(getattr(x, "optimizer", None), "param_groups", None) for x in schedulers]
        schedulers = [x for x, own in zip(schedulers, steered, strict=True) if id(own) in groups]
        within = {id(part) for x in schedulers for part in getattr(x, "_schedulers", ())}
        for scheduler in schedulers:
            if id(scheduler) not in within and id(scheduler) not in inside:
                kind = type(scheduler).__name__
                return _refusal(
                    f"{'an' if kind[0] in 'AEIOU' else 'a'} {kind} steers the optimizer",
                    "another learning rate",
                    '"scheduler": scheduler',
                )
        for scaler in objects:
            scales = isinstance(scaler, torch.amp.GradScaler) and getattr(scaler, "_scale", None) is not None
            if scales and id(scaler) not in inside:
                return _refusal("a GradScaler scales the loss", "another scale", '"scaler": scaler')
        held = [p for x in self._optimizers for group in x.param_groups for p in group["params"]]
        shapes = sorted(x.shape for x in held)
        for average in objects:
            if not isinstance(average, AveragedModel) or id(average) in inside:
                continue
            if sorted(x.shape for x in average.parameters()) == shapes:
                return _refusal("an AveragedModel averages the model", "another average", '"ema": ema_model')
        return None

    def check_when_changed(self) -> None:
        """As ``check``, but only if a scheduler has wrapped an optimizer's ``step`` since the last check."""
        if self._count_wrapped() != self._wrapped:
            self.check()

    def _count_wrapped(self) -> int:
        return sum(hasattr(x.step, "_wrapped_by_lr_sched") for x in self._optimizers)


def _parts(values: Iterable[Any], depth: int = 2, is_state: bool = False) -> Iterator[Any]:
    """Yield these objects, and what they hold in attributes, lists and mappings, each once.

    ``is_state``: also the modules within a module, and nothing within an optimizer, which is in no state.
    """
    seen: dict[int, Any] = {}  # by id; values that a property makes must live until the end
    level = list(values)
    for _ in range(depth + 1):
        following: list[Any] = []
        for value in level:
            if id(value) in seen or len(seen) > _PARTS:
                continue
            seen[id(value)] = value
            yield value
            if isinstance(value, Mapping | list | tuple):
                following += value.values() if isinstance(value, Mapping) else value
            elif isinstance(value, torch.nn.Module):
                following += value.modules() if is_state else ()
            elif not isinstance(value, torch.Tensor | type | Optimizer if is_state else torch.Tensor | type):
                left_out = () if is_state else _OF_OPTIMIZER
                attributes = getattr(value, "__dict__", {})
                following += [x for name, x in attributes.items() if name not in left_out]
        level = following


def _refusal(what: str, differs: str, entry: str) -> ConfigError:
    return ConfigError(
        f"{what} and is not in state=, so a replica that joins would train with {differs}: make it before "
        f'attach and pass state={{{entry}}}, or say unshared="ignore" where that is intended'
    )


# --- averages by hand ---------------------------------------------------------------------------------------


class AverageWatch:
    """Looks at its steps; raises ConfigError for an average of ``parameters`` that is not in ``shared``.

    ``shared``: the objects of the shared state. ``advice`` ends the sentence.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], shared: Iterable[Any]) -> None:
        self.advice = ADVICE
        self._parameters = parameters
        self._shared = shared
        self._step, self._steps = -1, 0  # the newest step, and the number of steps of this process
        self._known: set[_Sample] | None = (
            None  # samples of watched parameters, and of copies, in this window
        )
        self._watched = range(0)  # the places of these parameters
        self._ignored = sum(x.numel() for x in parameters) < _FEWEST

    def look(self, step: int) -> None:
        """Look, where ``step`` is the first or second of a pair of looks. Call it before each update."""
        if self._ignored or step == self._step:
            return
        begin, end = self._window()
        # Steps that this process replays may lie between two looks: then the window begins again.
        self._steps = begin if begin <= self._steps < end and step != self._step + 1 else self._steps + 1
        self._step = step
        begin, end = self._window()
        if self._steps == 1 and all(map(_is_readable, self._parameters)):
            self._read_sources()
        if not begin <= self._steps <= end:
            return
        if self._steps == begin:
            self._known = set()
            self._watched = range(0, len(self._parameters), max(1, len(self._parameters) // _WATCHED))
        is_checked = self._steps in (begin, begin + 1, end)
        needed = self._parameters if is_checked else [self._parameters[i] for i in self._watched]
        if self._known is None or not all(map(_is_readable, needed)):
            self._known = None  # this window has missed values of the model
            return
        copies = self._copies() if is_checked else ()
        for what, copy in copies:
            samples = {copy[i] for i in self._watched}
            if self._steps > begin and not self._known.issuperset(samples):
                raise self._refusal(what)
            self._known |= samples
        self._known.update(_sample(self._parameters[i]) for i in self._watched)

    def _window(self) -> tuple[int, int]:
        """Return the newest window that has begun: the numbers of its first and its last look.

        An average that moves at every k-th step moves within a window of k steps.
        """
        begin = max((x for x in _FIRST_LOOKS if x <= self._steps), default=-1)
        return begin, begin + begin // 2

    def _refusal(self, what: str) -> ConfigError:
        return ConfigError(
            f"the training keeps an average of the model in {what}, and a replica that joins would go on "
            f"with another average: {self.advice}"
        )

    @search(None)
    def _read_sources(self) -> None:
        """Refuse an average that the source of the loops under way shows, or that of a hook of its object."""
        own = [_sample(x) for x in self._parameters]
        near = [
            (what, tensors, holder)
            for what, tensors, holder in self._candidates()
            if _distance(own, list(map(_sample, tensors))) <= _NEAR * _distance(own)
        ]
        model = [x for x in self._shared if isinstance(x, torch.nn.Module) and self._is_trained(x)]
        others = [x.state_dict() for x in self._shared if near and not any(x is y for y in model)]
        samples = {_sample(x) for x in tensors_in(others) if _is_readable(x)}
        memory = {x.data_ptr() for x in tensors_in([x.state_dict() for x in model if near])}
        copies = {
            id(holder): what
            for what, tensors, holder in near
            if not samples.issuperset(map(_sample, tensors)) and tensors[0].data_ptr() not in memory
        }
        if not copies:
            return
        reader = _AverageSource(copies, self._is_trained)
        for frame, loops in loops_around(sys._getframe()):  # noqa: SLF001
            reader.read(RunningSource.of(frame, loops[0]), {})
        for function in _methods_of_owners([holder for _, _, holder in near if id(holder) in copies]):
            if function.name.startswith(_HOOKS):
                arguments = [x.arg for x in function.node.args.args]
                reader.read_function(function, dict.fromkeys(arguments, frozenset({_MODEL})))
        for copy in sorted(reader.moves.keys() & reader.keeps):
            raise self._refusal(f"{copies[copy]} ({reader.moves[copy]})")

    def _is_trained(self, value: Any) -> bool:
        """Whether a module, a tensor or a list or dict of tensors is that of the model's parameters."""
        own = {id(x) for x in self._parameters}
        parts = value.parameters() if isinstance(value, torch.nn.Module) else tensors_in(value)
        return any(id(x) in own for x in parts)

    def _copies(self) -> _Copies:
        """Return the unshared copies near the parameters, each with what holds it.

        Tensors with a graph that nothing has written to are made for one loss, as fast weights are.
        """
        own = [_sample(x) for x in self._parameters]
        norm = _distance(own)
        copies: _Copies = []
        shared: set[_Sample] | None = None
        for what, tensors, _ in self._candidates():
            if any(x.grad_fn is not None and not x._version for x in tensors):  # noqa: SLF001
                continue
            copy = [_sample(x) for x in tensors]
            apart = _distance(own, copy)
            if 0 < apart <= _NEAR * norm:
                if shared is None:
                    states = [x.state_dict() for x in self._shared]
                    shared = {_sample(x) for x in tensors_in(states)}
                if not shared.issuperset(copy):
                    copies.append((what, copy))
        return copies

    def _candidates(self) -> Iterator[tuple[str, list[torch.Tensor], Any]]:
        """Yield what holds tensors of the parameters' shapes in their order, these tensors, and the holder.

        Tensors that an optimizer moves, as those of a second model, are not a copy of the parameters.
        """
        tensors, modules = subtypes(torch.Tensor), subtypes(torch.nn.Module)
        optimizers = subtypes(torch.optim.Optimizer)
        objects = of_types({*optimizers, *modules, *_HOLDERS})
        groups = (group for x in objects if type(x) in optimizers for group in x.param_groups)
        attached = {id(x) for x in self._parameters}.union(id(x) for group in groups for x in group["params"])
        shapes = [x.shape for x in self._parameters]
        lengths = range(len(shapes), 4 * len(shapes) + 65)
        tuples = ((identity, values[::-1]) for identity, values in contents_of_tuples(lengths, tensors))
        for holder, values in itertools.chain(_values_of(objects, lengths, modules), tuples):
            held = [x for x in values if type(x) in tensors]
            if len(held) < len(shapes):
                continue
            matched = _in_order((x for x in held if id(x) not in attached and _is_readable(x)), shapes)
            if not matched:
                continue
            kind = type(holder).__name__
            if isinstance(holder, torch.nn.Module):
                yield f"a module {kind}", matched, holder
            elif not isinstance(holder, int):
                yield f"a {kind} of {len(values)} values", matched, holder
            else:
                a_tuple = next((x for x in gc.get_referrers(matched[0]) if id(x) == holder), None)
                yield f"a tuple of {len(values)} values", matched, a_tuple


def _values_of(objects: Iterable[Any], lengths: range, modules: Set[type]) -> Iterator[tuple[Any, list[Any]]]:
    """Yield modules with their parameters, and what has so many values with these."""
    for holder in objects:
        kind = type(holder)
        if kind in _HOLDERS and len(holder) in lengths:
            yield holder, list(holder if kind is list else holder.values())
        elif kind in modules and "_parameters" in holder.__dict__:
            yield holder, list(holder.parameters())


# Hooks of Lightning and of transformers that run in each step; they get the model or the Trainer.
_HOOKS = (
    "on_train_batch",
    "on_before_zero_grad",
    "on_after_backward",
    "optimizer_step",
    "on_step",
    "on_optim",
)
_MODEL = 0  # the mark of the model's own parameters; the mark of a copy is its id
_IN_PLACE = {"mul_", "div_", "add_", "sub_", "lerp_", "copy_"}
_COPY = {"clone", "copy", "deepcopy"}
_MOST_READ = 200  # functions
_Marks = frozenset[int]
_NONE: _Marks = frozenset()


class _AverageSource:
    """Reads source for copies of the model that are made from their old value and from the model.

    ``keeps``: copies of which a statement keeps a part. ``moves``: copies into which a statement puts the
    model, each with the line.
    """

    def __init__(self, copies: Collection[int], is_trained: Callable[[Any], bool]) -> None:
        self.keeps: set[int] = set()
        self.moves: dict[int, str] = {}
        self._copies = copies
        self._is_trained = is_trained
        self._source = RunningSource(ast.Module([], []), {}, "")  # that is read now
        self._names: dict[str, _Marks] = {}  # the source's own names, with the marks of what they hold
        self._fresh: set[str] = set()  # those that hold a new tensor, and no part of a copy
        self._seen: set[int] = set()

    def read(self, source: RunningSource, given: Mapping[str, _Marks]) -> None:
        """Read a loop, or a function whose arguments have the marks ``given``."""
        node, outer = source.node, (self._source, self._names, self._fresh)
        if id(node) in self._seen or len(self._seen) > _MOST_READ:
            return
        self._seen.add(id(node))
        carried: dict[str, int] = {}
        if isinstance(node, LOOPS):
            carry([node], set(), carried)
        own = dict.fromkeys(set(stores(ast.iter_child_nodes(node))) - {*carried}, _NONE)
        self._source, self._names, self._fresh = source, {**own, **given}, set()
        nodes = list(walked(node))
        for x in (*nodes, *nodes):  # a name may get what a later statement marks
            if isinstance(x, ast.Assign):
                self._give(x.targets[0], x.value)
            elif isinstance(x, ast.For):
                self._give(x.target, x.iter)
        for x in nodes:
            self._write(x)
            function = function_of(callee(source.values, dotted(x.func))) if isinstance(x, ast.Call) else None
            if isinstance(x, ast.Call) and function is not None:
                marks = {name: self._marks(y) for name, y in function.given_by(x).items()}
                self.read_function(function, {**dict.fromkeys(function.arguments, _NONE), **marks})
        self._source, self._names, self._fresh = outer

    def read_function(self, function: UserFunction, given: Mapping[str, _Marks]) -> None:
        marks = {name: x for name, x in given.items() if name != function.me}
        self.read(RunningSource(function.node, function.values, function.file), marks)

    def _marks(self, node: ast.AST) -> _Marks:
        """Return the marks of what an expression reads."""
        name = dotted(node) if isinstance(node, ast.Name | ast.Attribute) else ""
        if not name:
            parts = [node.value] if isinstance(node, ast.Subscript) else ast.iter_child_nodes(node)
            return _NONE.union(*map(self._marks, parts))
        root, *path = name.split(".")
        if "grad" in path or root in self._names:
            return _NONE if "grad" in path else self._names[root]
        for end in range(len(path), -1, -1):
            value = value_of(self._source.values, ".".join([root, *path[:end]]))
            if id(value) in self._copies:
                return frozenset({id(value)})
            if isinstance(value, torch.nn.Module | torch.Tensor | list | tuple | dict):
                return frozenset({_MODEL} if self._is_trained(value) else ())
        return _NONE

    def _give(self, target: ast.expr, source: ast.expr) -> None:
        """Mark the names of a target with what they get."""
        parts, by = list(getattr(target, "elts", ())), called(source) if isinstance(source, ast.Call) else ""
        if parts and by in ("zip", "enumerate"):
            for part, x in pairs(target, source):
                self._give(part, x)
        elif len(parts) == 2 and by in ("items", "named_parameters", "named_buffers"):
            self._give(parts[1], source)
        elif parts:
            for part in parts:
                self._give(part, source)
        elif isinstance(target, ast.Name) and target.id in self._names:
            self._names[target.id] |= self._marks(source)
            if any(isinstance(x, ast.BinOp) or getattr(x, "attr", "") in _COPY for x in walked(source)):
                self._fresh.add(target.id)

    def _write(self, node: ast.AST) -> None:
        """Note what a statement writes into a copy."""
        if isinstance(node, ast.Assign):
            target = node.targets[0]
            is_own = dotted(target).partition(".")[0] in self._names  # then ``x = ...`` changes no tensor
            if not is_own or getattr(target, "attr", "") == "data":
                self._put(target, [node.value], node.lineno, scales=False)
        elif isinstance(node, ast.AugAssign):
            self._put(node.target, [node.value], node.lineno, isinstance(node.op, ast.Mult | ast.Div))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name, target, given = node.func.attr, node.func.value, node.args
            if name.startswith("_foreach_") and node.args:
                name, target, given = name.removeprefix("_foreach_"), node.args[0], node.args[1:]
            while isinstance(target, ast.Call) and called(target) in (*_IN_PLACE, "detach", "list"):
                parts = [target.func.value] if isinstance(target.func, ast.Attribute) else target.args
                target = parts[0] if parts else ast.Constant(None)
            if name in _IN_PLACE:
                self._put(target, given, node.lineno, name in ("mul_", "div_", "lerp_"))

    def _put(self, target: ast.expr, given: Iterable[ast.expr], line: int, scales: bool) -> None:
        while isinstance(target, ast.Subscript):
            target = target.value
        name, read = dotted(target).partition(".")[0], _NONE.union(*map(self._marks, given))
        if isinstance(target, ast.Call):
            is_part = called(target) in ("parameters", "values")
        else:
            is_part = isinstance(target, ast.Name | ast.Attribute) and name not in self._fresh
        into = self._marks(target) - {_MODEL} if is_part else _NONE
        self.keeps |= into if scales else into & read
        if _MODEL in read:
            place = f"{self._source.file}:{line}"
            self.moves |= {copy: place for copy in into if copy not in self.moves}


def _methods_of_owners(copies: list[Any]) -> Iterator[UserFunction]:
    """Yield the methods of the user's objects that have one of the copies as an attribute."""
    referrers = gc.get_referrers(*copies)
    owners = [*referrers, *gc.get_referrers(*(x for x in referrers if type(x) is dict))]
    for owner in {id(x): x for x in owners if not isinstance(x, FunctionType | ModuleType | type)}.values():
        if any(x is copy for x in list(attributes_of(owner).values()) for copy in copies):
            yield from functions_in(owner)


def _distance(left: list[_Sample], right: list[_Sample] | None = None) -> float:
    """Return the distance of the elements, from zero where there is one list."""
    other = itertools.repeat(0.0) if right is None else itertools.chain(*right)
    pairs = zip(itertools.chain(*left), other, strict=False)
    return math.sqrt(sum((a - b) ** 2 for a, b in pairs))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in ``value`` and its mappings, lists and tuples."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(part)


def _is_readable(value: Any) -> bool:
    """Whether a value is a tensor with numbers: no fake one of a compiler, and none whose memory is freed."""
    if not issubclass(type(value), torch.Tensor):
        return False
    local = value.to_local() if hasattr(value, "to_local") else value
    plain = type(local) in (torch.Tensor, torch.nn.Parameter) and local.layout == torch.strided
    if not plain or local.is_meta or not local.is_floating_point():
        return False
    return bool(local.untyped_storage().nbytes() >= local.nbytes)


def _in_order(tensors: Iterable[torch.Tensor], shapes: Sequence[torch.Size]) -> list[torch.Tensor]:
    """Return tensors of these shapes in this order, or an empty list where some shape has none."""
    matched: list[torch.Tensor] = []
    for tensor in tensors:
        if tensor.shape == shapes[len(matched)]:
            matched.append(tensor)
            if len(matched) == len(shapes):
                return matched
    return []


def _sample(tensor: torch.Tensor) -> _Sample:
    """Return some elements of this rank's part of a tensor."""
    local = tensor.detach()
    if hasattr(local, "to_local"):
        local = local.to_local()
    flat = local.reshape(-1)
    return tuple(flat[:: max(1, flat.numel() // _SAMPLE)][:_SAMPLE].float().tolist())


MORE_OPTIMIZERS = (
    "give attach all optimizers, and one module of all that they train, or say "
    'unshared="ignore" where that is intended'
)


class OptimizerWatch:
    """Looks at each optimizer that makes a step in this process. ``shared``: objects of the shared state.

    It refuses one that is not attached: no other replica has what it changes, and no run would say so. A
    second model that the script trains follows one replica's own data. A new optimizer of the attached model
    is at its first step in a replica that joins, and goes on in the others. An optimizer whose parameters are
    not in the model may live for one step, as in the inner loop of meta-learning. ``advice`` ends the
    sentence.
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], optimizers: Iterable[Optimizer], shared: Iterable[Any]
    ) -> None:
        self.advice = MORE_OPTIMIZERS
        self.step = -1  # the step whose gradient the loop has, or will have next
        self._parameters = {id(x) for x in parameters}
        self.attached = list(optimizers)
        self.attached += [x for x in _parts(shared) if isinstance(x, Optimizer)]
        self._own = {id(x) for x in self.attached}
        # Others, with the step of the job in which each made its first step here.
        self._known: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()
        self._hook: RemovableHandle | None = None

    def begin(self) -> None:
        """Look from now on."""
        self._hook = self._hook or register_optimizer_step_pre_hook(self._look)

    def end(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _look(self, optimizer: Optimizer, *_: Any) -> None:
        is_own = torch.compiler.is_compiling() or id(optimizer) in self._own
        if not is_own and not belongs(optimizer, self.attached):
            begun = self._known.setdefault(optimizer, self.step)
            self.refuse(optimizer, lasts=begun != self.step)

    def refuse(self, optimizer: Optimizer, lasts: bool) -> None:
        """Raise ConfigError for an optimizer that is not attached. ``lasts``: it makes steps in several steps
        of the job.
        """
        moved = [p for x in optimizer.param_groups for p in x["params"] if p.requires_grad]
        kind = type(optimizer).__name__
        if any(id(p) in self._parameters for p in moved):
            raise ConfigError(
                f"an optimizer {kind} changes parameters of the model and is not attached, so a replica that "
                f"joins would go on with another state of it: {self.advice}"
            )
        if moved and lasts:
            raise ConfigError(
                f"an optimizer {kind} changes parameters that are not in the attached model, so each replica "
                f"would train them by its own data: {self.advice}"
            )


def belongs(optimizer: Optimizer, attached: Sequence[Optimizer]) -> bool:
    """Return whether an optimizer is one of ``attached``, or wraps it, or is wrapped by it."""
    groups = {id(x) for x in getattr(optimizer, "param_groups", ())}
    inside = {id(x) for x in _parts([optimizer])}
    return any(
        id(x) in inside
        or any(id(y) in groups for y in getattr(x, "param_groups", ()))
        or any(y is optimizer for y in _parts([x]))
        for x in attached
    )
