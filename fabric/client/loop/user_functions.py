"""Finds what the user's functions keep from call to call, where their results depend on it.

A collate function that counts its calls, and a data set that weighs a sample by those before it, give other
data on each replica, because each makes other calls.
"""

import ast
import contextlib
import functools
import inspect
import linecache
import logging
import random
import sysconfig
from collections import ChainMap, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, FunctionType, GeneratorType, MappingProxyType, MethodType, ModuleType
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import Optimizer
from torch.utils.data import DataLoader

import fabric
from fabric.client.loop.loop_flow import (
    CLIPS,
    GROWS,
    asks_for_health,
    called,
    carry,
    dotted,
    holder,
    inside,
    loops_at,
    made_from,
    moves_training,
    names_read,
    of_kind,
    sets_rate,
    stores,
    walked,
)
from fabric.errors import FabricError

_P = ParamSpec("_P")
_R = TypeVar("_R")
_log = logging.getLogger(__name__)
_LIBRARIES = tuple(sysconfig.get_paths()[x] for x in ("stdlib", "platstdlib", "purelib", "platlib"))
_CALLS = ("__call__", "__getitem__", "__getitems__")  # the methods that give data
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_FRESH = {"copy_", "zero_", "fill_", "normal_", "uniform_", "requires_grad_"}  # no old value is left
_CONTAINERS = {list, tuple, dict, torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict}
# Limits of a search: the parts of an object, their depth, the length of a list, and the functions.
_PARTS, _DEPTH, _FEW, _FUNCTIONS = 1000, 4, 64, 300


def search(default: _R) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Make a search of the user's source say nothing where it meets what it cannot read.

    ``default``: what it returns then. A fault of the search must not end a training.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def guarded(*arguments: _P.args, **named: _P.kwargs) -> _R:
            try:
                return function(*arguments, **named)
            except FabricError:
                raise
            except Exception:  # noqa: BLE001
                _log.warning(
                    "fabric could not read a part of the script, and does not check it: please report this",
                    exc_info=True,
                )
                return default

        return guarded

    return decorate


def kept_by_calls(things: Iterable[Any], shared: Collection[int] = ()) -> str:
    """Return what calls of ``things`` keep for later calls, whose results depend on it, as "NAME, which ...".

    It is empty where the source shows none. Caches, opened files and counts for prints are left alone, and
    what the objects with the ids ``shared`` hold.
    """
    reached = _Reached(things)
    for functions in reached.groups():
        sets = [(f, x) for f in functions for x in f.node.body if isinstance(x, ast.Assign)]
        begun = {f.symbols.get(y, "") for f, x in sets for y in stores([x]) if y not in names_read(x)}
        for keeper in functions:
            counted = {name: x for name, x in keeper.kept().items() if keeper.symbols.get(name) not in begun}
            for name, line in (counted | keeper.left() if id(keeper.thing) not in shared else {}).items():
                gives = functools.partial(_gives, conditions=name in counted)
                made = spread(functions, keeper.symbols.get(name, ""), gives, name in counted)
                givers = (x for x in functions if x in reached.entries)
                if id(value_of(keeper.values, name)) not in shared and any(
                    gives(x, x.made(made, name in counted)) for x in givers
                ):
                    return f"{name}, which {keeper} keeps from call to call ({keeper.place(line)})"
    return ""


def kept_by_loop(
    loop: ast.stmt,
    values: Mapping[str, Any],
    shared: Collection[int] = (),
    fed: Callable[[ast.Call], bool] = lambda _: True,
) -> str:
    """As ``kept_by_calls``, for what a loop calls and trains by. ``values``: of the names in its frame.

    ``fed``: whether a statement that calls a method gives it what a replica that joins has not seen.
    """
    for call in (x.value for x in of_kind(loop, ast.Expr) if isinstance(x.value, ast.Call)):
        owner, _, method = dotted(call.func).rpartition(".")
        thing = value_of(values, owner) if owner else None
        if thing is None or id(thing) in shared or isinstance(thing, torch.nn.Module) or not fed(call):
            continue
        functions = functions_in(thing) if not isinstance(thing, FunctionType) else []
        for keeper in (x for x in functions if x.name == method):
            for name, line in keeper.kept().items():
                symbols = spread(functions, keeper.symbols[name], lambda x, made: _gives(x, made, False))
                read = {f"{owner}.{x.partition('.')[2]}" for x in symbols if x.startswith(f"{id(thing)}.")}
                if moves_training(loop, made_from(loop, read)):
                    return f"{name}, which {keeper} keeps from call to call ({keeper.place(line)})"
    for name in sorted({dotted(x.func) for x in of_kind(loop, ast.Call)} - {""}):
        value = callee(values, name)
        if isinstance(value, torch.nn.Module):  # one with parameters is watched, or refused
            is_free = id(value) not in shared and next(value.parameters(), None) is None
        else:
            is_free = not isinstance(value, type)
        if is_free and moves_training(loop, made_from(loop, {name})):
            kept = kept_by_calls([value], shared)
            if kept:
                return kept
    return ""


def value_of(values: Mapping[str, Any], name: str) -> Any:
    """Return what a name or an attribute's path has, or None. No code of an object runs for it."""
    thing, *path = name.split(".")
    value = values.get(thing)
    for part in path:
        own = attributes_of(value)
        tables = ("_parameters", "_buffers", "_modules") if isinstance(value, torch.nn.Module) else ()
        value = next((x[part] for x in (own, *(own.get(y, {}) for y in tables)) if part in x), None)
    return value


def drawn_from(node: ast.AST, values: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Yield the names of generators of random numbers that a node draws from, and the line.

    ``values``: the objects of the names. torch's own generator is not one of them.
    """
    for x in of_kind(node, ast.Call):
        held = x.func.value if isinstance(x.func, ast.Attribute) else x.func
        for name in map(dotted, (held, *x.args, *(z.value for z in x.keywords))):
            drawn = value_of(values, name)
            if isinstance(drawn, _GENERATORS) and drawn is not torch.default_generator:
                yield name, x.lineno


def steers_update(node: ast.AST, values: Mapping[str, Any]) -> list[ast.expr]:
    """Return the expressions by which a node sets a rate or a limit for the gradient, or asks for an update.

    ``values``: the objects of the names.
    """

    def is_step_of(call: ast.AST, kinds: Any) -> bool:
        if not isinstance(call, ast.Call) or called(call) != "step":
            return False
        return isinstance(value_of(values, dotted(call.func).rpartition(".")[0]), kinds)

    if isinstance(node, ast.Assign | ast.AugAssign) and sets_rate(node):
        return [node.value]
    if isinstance(node, ast.Call):
        given = [*node.args, *(x.value for x in node.keywords)]
        if sets_rate(node) or is_step_of(node, LRScheduler):
            return given
        return given[1:] if called(node) in CLIPS else []
    if isinstance(node, ast.If) and not asks_for_health(node.test):
        chosen = [y for part in (*node.body, *node.orelse) for y in walked(part)]
        if any(sets_rate(x) or is_step_of(x, Optimizer | torch.amp.GradScaler) for x in chosen):
            return [node.test]
    return []


def steers_forward(module: torch.nn.Module, attribute: str) -> bool:
    """Return whether calls of a module read one of its plain attributes, as Dropout reads ``p``."""
    kind: Any = type(module)
    methods = {name: node for name, (_, node) in methods_of(kind).items()}
    names, new = set[str](), {"forward"}
    while new:
        names |= new
        called_ones = [node for name, node in methods.items() if name in names]
        reads = {x.attr for node in called_ones for x in of_kind(node, ast.Attribute)}
        new = (reads & set(methods)) - names
    is_read = any(
        f"{node.args.args[0].arg}.{attribute}" in names_read(node)
        for name, node in methods.items()
        if name in names and node.args.args
    )
    return is_read or attribute in getattr(kind, "__constants__", ())


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Return an object's own attributes without its ``__getattribute__``, which may raise an error."""
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:  # it has slots
        return {}
    return attributes


def callee(values: Mapping[str, Any], name: str) -> Any:
    """As ``value_of``, and the method of a user's object."""
    owner, _, last = name.rpartition(".")
    thing = value_of(values, owner)
    kind: Any = type(thing)
    method = methods_of(kind).get(last)
    return MethodType(method[0], thing) if method is not None else value_of(values, name)


@dataclass(frozen=True, slots=True)
class RunningSource:
    """A piece of the user's source that runs now, with the objects of its names."""

    node: ast.AST
    values: Mapping[str, Any]
    file: str  # the name of its file, for a sentence

    @classmethod
    def of(cls, frame: FrameType, node: ast.AST) -> "RunningSource":
        """Return a piece of the source that ``frame`` runs."""
        return cls(node, {**frame.f_globals, **frame.f_locals}, Path(frame.f_code.co_filename).name)

    def place(self, node: ast.stmt | ast.expr) -> str:
        """Return the place of a part for a sentence."""
        return f"{self.file}:{node.lineno}"

    def value(self, node: ast.expr) -> Any:
        """Return the object of an expression, or None."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Subscript):  # of a container whose item runs no code of the user
            held = self.value(node.value)
            with contextlib.suppress(ValueError, TypeError, LookupError):
                return held[ast.literal_eval(node.slice)] if type(held) in _CONTAINERS else None
            return None
        return value_of(self.values, dotted(node))


@dataclass(frozen=True, eq=False)
class UserFunction:
    """A function in the user's files: its source, and the objects of the names in the source.

    Names are as in the source: ``n``, or an attribute's path as ``self.count``. A symbol names the same thing
    in all functions: a global name begins with its module there, a name of an outer function with its cell,
    and an attribute with its object.
    """

    thing: Any  # the object whose method it is, or None
    name: str  # of the method in its class
    function: FunctionType
    node: ast.FunctionDef
    given: Mapping[str, Any]  # names of arguments, with what they get

    def __str__(self) -> str:
        return self.function.__qualname__.rpartition("<locals>.")[2]

    @property
    def file(self) -> str:
        """The name of the function's file, for a sentence."""
        return Path(self.function.__code__.co_filename).name

    def place(self, line: int) -> str:
        """Return a line of the function's file for a sentence."""
        return f"{self.file}:{line}"

    @property
    def arguments(self) -> list[str]:
        """The names of the arguments that a call may give by position."""
        return [x.arg for x in self.node.args.args if x.arg != self.me]

    def given_by(self, call: ast.Call) -> dict[str, ast.expr]:
        """Return the expressions that a call gives to arguments, by name."""
        by_place = dict(zip(self.arguments, call.args, strict=False))
        return by_place | {x.arg: x.value for x in call.keywords if x.arg}

    @functools.cached_property
    def me(self) -> str:
        """The name of a method's own object; empty for a plain function."""
        arguments = self.node.args.args
        return arguments[0].arg if self.thing is not None and arguments else ""

    @functools.cached_property
    def values(self) -> ChainMap[str, Any]:
        """The names that have an object before a call, and with None the function's own variables."""
        code = self.function.__code__
        values = dict.fromkeys((*code.co_varnames, *code.co_cellvars))
        values |= {name: x for name, x in self.given.items() if name in values}
        values |= {self.me: self.thing} if self.me else {}
        for name, cell in zip(code.co_freevars, self.function.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # the name is not set yet
                values[name] = cell.cell_contents
        return ChainMap(values, self.function.__globals__)

    @functools.cached_property
    def symbols(self) -> dict[str, str]:
        """The names in the source, with their symbols. A variable of the function's own keeps its name."""
        names = names_read(self.node) | set(stores(self.node.body))
        return {name: symbol for name in names if (symbol := self._symbol(name))}

    def _symbol(self, name: str) -> str:
        held, _, last = name.rpartition(".")
        code, thing = self.function.__code__, value_of(self.values, held)
        if held and thing is None:
            outer = self._symbol(held)
            return f"{outer}.{last}" if "." in outer else ""
        if held:
            return f"{id(thing)}.{last}"
        if name in code.co_freevars:
            return f"{id((self.function.__closure__ or ())[code.co_freevars.index(name)])}.{name}"
        return name if name in (*code.co_varnames, *code.co_cellvars) else f"{id(self.values.maps[1])}.{name}"

    def shared(self, names: Iterable[str]) -> set[str]:
        """Return the symbols of those names that other functions know too."""
        return {x for x in (self.symbols.get(name, "") for name in names) if "." in x}

    def made(self, source: Collection[str], conditions: bool = True) -> set[str]:
        """Return the names of the symbols ``source``, and those that the function makes from them.

        ``conditions``: also under a test of them.
        """
        names = {name for name, symbol in self.symbols.items() if symbol in source}
        return made_from(self.node, names, conditions, parts=True) if names else names

    def kept(self) -> dict[str, int]:
        """Return the names that a call makes from the value of an earlier call, each with its line."""
        names = dict[str, int]()
        arguments = {x.arg for x in of_kind(self.node.args, ast.arg)}
        carry(self.node.body, arguments - {self.me}, names)
        names |= changed_in_place(self.node)
        for x in of_kind(self.node, ast.Call):
            name = dotted(x.func.value) if isinstance(x.func, ast.Attribute) else ""
            is_change = called(x).endswith("_") and called(x) not in _FRESH
            if is_change and isinstance(value_of(self.values, name), torch.Tensor):
                names.setdefault(name, x.lineno)
        own = {name: at for name, at in names.items() if "." in self.symbols.get(name, "")}
        return {name: at for name, at in own.items() if not _is_dealt(value_of(self.values, name))}

    def left(self) -> dict[str, int]:
        """Return the names that each call reads, and then sets to another value."""
        tests = of_kind(self.node, ast.Compare)
        looks_up = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
        if any(isinstance(op, looks_up) and f"{self.me}." in ast.unparse(x) for x in tests for op in x.ops):
            return {}  # a cache of the newest part of the data
        read, names = set[str](), dict[str, int]()
        for node in self.node.body:
            if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Constant):
                stored = [x for x in stores([node]) if self.me and x.startswith(f"{self.me}.") and x in read]
                names |= dict.fromkeys(stored, node.lineno)
            read |= names_read(node)
        return names


def spread(
    functions: Collection[UserFunction],
    source: str,
    gives: Callable[[UserFunction, set[str]], bool],
    conditions: bool = True,
) -> set[str]:
    """Return ``source``, the symbols that the functions make from it, and functions that give one of them.

    ``gives``: whether a function's result is made from one of the names.
    """
    made, size = {source} - {""}, 0
    while size != len(made):
        size = len(made)
        for function in functions:
            names = function.made(made, conditions)
            made |= function.shared(names)
            if names and gives(function, names):
                made.add(f"{id(function.thing)}.{function.name}")
    return made


def changed_in_place(node: ast.AST) -> dict[str, int]:
    """Return the names whose content a node makes from the old one, or moves on, each with its line."""
    names: dict[str, int] = {}
    fills = set(_fills(node))
    for x in walked(node):
        if isinstance(x, ast.Assign | ast.AugAssign) and x not in fills:
            for target in x.targets if isinstance(x, ast.Assign) else [x.target]:
                name = holder(target) if isinstance(target, ast.Subscript) else ""
                if isinstance(x, ast.AugAssign) or name in names_read(x.value):
                    names.setdefault(name, x.lineno)
        elif isinstance(x, ast.Call) and called(x) == "next" and x.args:
            names.setdefault(dotted(x.args[0]), x.lineno)
        elif isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr in GROWS:
            name = holder(x.func.value)
            lists = [y for y in of_kind(node, ast.Subscript) if dotted(y.value) == name]
            if all(
                isinstance(y.slice, ast.Constant | ast.UnaryOp | ast.Slice) for y in lists
            ):  # else a cache
                names.setdefault(name, x.lineno)
    names.pop("", None)
    return names


def _is_dealt(value: Any) -> bool:
    """Whether an iteration gives the batches that fabric deals out, or passes them on like a ``cycle``."""
    if not isinstance(value, GeneratorType):
        return False
    node = functions_of(value.gi_code.co_filename).get(value.gi_code.co_firstlineno)
    if node is None:
        return value.gi_code.co_filename.startswith(tuple(fabric.__path__))
    held = value.gi_frame.f_locals.values() if value.gi_frame is not None else ()
    loaders = [x for x in held if isinstance(x, DataLoader)]
    keeps = bool(of_kind(node, ast.Assign, ast.AugAssign, ast.AnnAssign))
    return not keeps and any(type(x).__iter__.__module__.startswith("fabric.") for x in loaders)


def _fills(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the assignments that make an item of a cache once: its value goes by its index alone.

    They lie under ``if not self.done[i]:`` or ``if i not in self.done:`` that marks the index, or under
    ``if isinstance(self.items[i], str):`` that loads the item.
    """
    for branch in of_kind(node, ast.If):
        inner, test = [x for part in branch.body for x in walked(part)], branch.test
        puts = {ast.unparse(x.targets[0]): x for x in inner if isinstance(x, ast.Assign)}
        marks = {item for item, x in puts.items() if ast.unparse(x.value) in ("True", "1")}
        adds = [x for x in inner if isinstance(x, ast.Call) and called(x) == "add" and len(x.args) == 1]
        marks |= {f"{ast.unparse(x.func).removesuffix('.add')}[{ast.unparse(x.args[0])}]" for x in adds}
        asked = ""
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            asked = ast.unparse(test.operand)
        elif isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.NotIn):
            asked = f"{ast.unparse(test.comparators[0])}[{ast.unparse(test.left)}]"
        elif isinstance(test, ast.Call) and called(test) == "isinstance" and test.args:
            item = ast.unparse(test.args[0])
            value = puts[item].value if item in puts else None
            if isinstance(value, ast.Call) and item in map(ast.unparse, value.args):
                yield puts[item]
        if "[" in asked and asked in marks:
            yield from (x for item, x in puts.items() if item.endswith(asked[asked.index("[") :]))


def _gives(function: UserFunction, made: set[str], conditions: bool) -> bool:
    """Whether what a function returns or yields is made from one of the names."""
    results = ast.Return | ast.Yield | ast.YieldFrom
    for x, _ in inside(function.node):
        if isinstance(x, results) and x.value is not None and names_read(x.value) & made:
            return True
        decides = conditions and isinstance(x, ast.If) and names_read(x.test) & made
        if decides and any(isinstance(y, results) for y in walked(x)):
            return True
    return False


class _Reached:
    """The functions in the user's files that calls of ``things`` and of their parts run.

    ``entries``: those whose results leave their object.
    """

    def __init__(self, things: Iterable[Any]) -> None:
        self.entries: set[UserFunction] = set()
        self._functions: dict[tuple[int, int], UserFunction] = {}
        self._seen: dict[int, Any] = {}
        self._pending = deque((x, 0) for x in things)
        while self._pending:
            self._look(*self._pending.popleft())

    def groups(self) -> list[list[UserFunction]]:
        """Return the functions by their object."""
        groups: dict[int, list[UserFunction]] = {}
        for f in self._functions.values():
            groups.setdefault(id(f.function if f.thing is None else f.thing), []).append(f)
        return list(groups.values())

    def _look(self, value: Any, depth: int) -> None:
        if id(value) in self._seen or depth > _DEPTH or len(self._seen) > _PARTS:
            return
        self._seen[id(value)] = value
        more: Iterable[Any] = ()
        if isinstance(value, functools.partial):
            more = (value.func, *value.args, *value.keywords.values())
        elif isinstance(value, FunctionType | MethodType):
            if (own := function_of(value)) is not None:
                self._add(own, None)
            elif isinstance(value, FunctionType) and is_of_user(value.__code__.co_filename):  # a lambda
                more = [x.cell_contents for x in value.__closure__ or ()]
                more = [*more, *(value.__globals__.get(name) for name in value.__code__.co_names)]
        elif isinstance(value, list | tuple | dict):
            more = (value.values() if isinstance(value, dict) else value) if len(value) <= _FEW else ()
        elif isinstance(value, torch.nn.Module):
            if depth == 0 and next(value.parameters(), None) is None:  # a loss of the user's
                self._method(value, "forward", None)
        elif not isinstance(value, torch.Tensor | type | ModuleType):
            for name in _CALLS:
                self._method(value, name, None)
            more = list(attributes_of(value).values())
        self._pending.extend((x, depth + 1) for x in more)

    def _method(self, thing: Any, name: str, caller: UserFunction | None) -> None:
        kind: Any = type(thing)
        if name in methods_of(kind):
            self._add(UserFunction(thing, name, *methods_of(kind)[name], {}), caller)

    def _add(self, function: UserFunction, caller: UserFunction | None) -> None:
        key = id(function.thing), id(function.function)
        is_new, function = key not in self._functions, self._functions.setdefault(key, function)
        if caller is None or caller.thing is not function.thing:
            self.entries.add(function)
        if not is_new or len(self._functions) > _FUNCTIONS:
            return
        for x in of_kind(function.node, ast.Attribute):
            owner = value_of(function.values, dotted(x.value))
            if owner is not None:
                self._method(owner, x.attr, function)
        for made in of_kind(function.node, ast.Call):
            value = value_of(function.values, dotted(made.func))
            if not isinstance(value, type):
                self._look(value, 0)


def functions_in(thing: Any, given: Mapping[str, Any] = MappingProxyType({})) -> list[UserFunction]:
    """Return the methods of an object, or a function, that lie in the user's files.

    A function that is bound to another object than one of its class, as a hook to its module, is a function.
    """
    if isinstance(thing, FunctionType | MethodType):
        function: Any = getattr(thing, "__func__", thing)
        node = functions_of(function.__code__.co_filename).get(function.__code__.co_firstlineno)
        owner = thing.__self__ if isinstance(thing, MethodType) else None
        return [UserFunction(owner, "__call__", function, node, given)] if node is not None else []
    kind: Any = type(thing)
    return [UserFunction(thing, name, *method, given) for name, method in methods_of(kind).items()]


def function_of(thing: Any) -> UserFunction | None:
    """Return the function or method of the user's that a call of ``thing`` runs; None for another thing."""
    function, owner = getattr(thing, "__func__", thing), getattr(thing, "__self__", None)
    if not isinstance(function, FunctionType):
        return None
    own = functions_in(function if owner is None else owner)
    within = inspect.unwrap(function)  # of a decorated method
    return next((x for x in (*own, *functions_in(thing)) if x.function in (function, within)), None)


@functools.cache
def methods_of(kind: type) -> dict[str, tuple[FunctionType, ast.FunctionDef]]:
    """Return the methods of a class that lie in the user's files, by name."""
    functions: dict[str, FunctionType] = {}
    for base in kind.__mro__:
        for name, value in vars(base).items():
            function = inspect.unwrap(value) if callable(value) else getattr(value, "fget", None)
            if name not in functions and isinstance(function, FunctionType):
                functions[name] = function
    nodes = {
        name: functions_of(x.__code__.co_filename).get(x.__code__.co_firstlineno)
        for name, x in functions.items()
    }
    return {name: (functions[name], node) for name, node in nodes.items() if node is not None}


@functools.cache
def is_of_user(file: str) -> bool:
    """Whether a source file is neither of an installed package nor of fabric."""
    path = Path(file).resolve()
    return path.is_file() and not str(path).startswith((*_LIBRARIES, *fabric.__path__))


@functools.cache
def functions_of(file: str) -> dict[int, ast.FunctionDef]:
    """Return the functions of a user's file by their first line, which may be a decorator's."""
    if not is_of_user(file):
        return {}
    tree = parsed("".join(linecache.getlines(file)))
    if tree is None:
        return {}
    functions = of_kind(tree, ast.FunctionDef)
    return {min([x.lineno, *(y.lineno for y in x.decorator_list)]): x for x in functions}


@functools.lru_cache(maxsize=64)
def parsed(source: str) -> ast.Module | None:
    """Return the tree of a source, or None where Python cannot read it."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return None


def tree_of(frame: FrameType) -> ast.Module | None:
    """Return the tree of the source that a frame runs."""
    return parsed("".join(linecache.getlines(frame.f_code.co_filename, frame.f_globals)))


def loops_around(
    frame: FrameType | None,
) -> Iterator[tuple[FrameType, list[ast.For | ast.AsyncFor | ast.While]]]:
    """Yield the frames of the user's files, from this one outward, with the loops that run there."""
    while frame is not None:
        tree = tree_of(frame) if is_of_user(frame.f_code.co_filename) else None
        if tree is not None and (loops := loops_at(tree, frame.f_lineno)):
            yield frame, loops
        frame = frame.f_back
