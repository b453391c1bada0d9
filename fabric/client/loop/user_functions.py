"""Finds what the user's functions keep from call to call, where their results depend on it.

A collate function that counts its calls, and a data set that weighs a sample by those before it, give other
data on each replica, because each makes other calls.
"""

import ast
import contextlib
import functools
import inspect
import linecache
import sysconfig
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

import fabric
from fabric.client.loop.loop_flow import (
    GROWS,
    called,
    carry,
    dotted,
    holder,
    inside,
    made_from,
    moves_training,
    names_read,
    stores,
)

_LIBRARIES = tuple(sysconfig.get_paths()[x] for x in ("stdlib", "platstdlib", "purelib", "platlib"))
_CALLS = ("__call__", "__getitem__", "__getitems__")  # the methods that give data
_PARTS, _DEPTH, _FEW = 1000, 4, 64  # limits of a search for the parts of an object


def kept_by_calls(things: Iterable[Any], shared: Collection[int] = ()) -> str:
    """Return what calls of ``things`` keep for later calls, whose results depend on it, as "NAME, which ...".

    It is empty where the source shows none. Caches, opened files and counts for prints are left alone, and
    what the objects with the ids ``shared`` hold.
    """
    reached = _Reached(things)
    for functions in reached.groups():
        for keeper in functions:
            if id(keeper.thing) in shared:
                continue
            kept = {name: True for name in keeper.kept() if keeper.outer(name) not in _begun(functions)}
            kept |= {name: False for name in keeper.left() if name not in kept}
            for name, conditions in kept.items():
                held = keeper.object_of(ast.parse(name, mode="eval").body)
                if id(held) not in shared and _give(
                    functions, reached.entries, keeper.outer(name), conditions
                ):
                    line = (keeper.kept() | keeper.left())[name]
                    file = Path(keeper.function.__code__.co_filename).name
                    return f"{name}, which {keeper} keeps from call to call ({file}:{line})"
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
    for call in (
        x.value for x in ast.walk(loop) if isinstance(x, ast.Expr) and isinstance(x.value, ast.Call)
    ):
        owner, _, method = dotted(call.func).rpartition(".")
        thing = value_of(values, owner) if owner else None
        if thing is None or id(thing) in shared or isinstance(thing, torch.nn.Module) or not fed(call):
            continue
        kind: Any = type(thing)
        for own, function, node in methods_of(kind):
            keeper = UserFunction(thing, function, node)
            for name, line in keeper.kept().items() if own == method else ():
                read = {owner + x for x in _given_out(kind, keeper.outer(name))}
                if moves_training(loop, made_from(loop, read)):
                    file = Path(function.__code__.co_filename).name
                    return f"{name}, which {keeper} keeps from call to call ({file}:{line})"
    for name in sorted({dotted(x.func) for x in ast.walk(loop) if isinstance(x, ast.Call)} - {""}):
        value = value_of(values, name)
        if not isinstance(value, torch.nn.Module | type) and moves_training(loop, made_from(loop, {name})):
            kept = kept_by_calls([value], shared)
            if kept:
                return kept
    return ""


def _given_out(kind: type, name: str) -> set[str]:
    """Return an attribute, and the methods and properties whose result is made from it."""
    made, size = {name}, 0
    while size != len(made):
        size = len(made)
        for own, function, node in methods_of(kind):
            me = UserFunction(kind, function, node).me
            local = made_from(node, {me + x for x in made}, parts=True)
            made |= {x.removeprefix(me) for x in local if x.startswith(f"{me}.")}
            made |= {f".{own}"} if _gives(node, local, False) else set()
    return made


def value_of(values: Mapping[str, Any], name: str) -> Any:
    """Return what a name or an attribute's path has, or None; of a user's object also a method."""
    thing, *path = name.split(".")
    value = values.get(thing)
    for part in path:
        kind: Any = type(value)
        names = {own for own, _, _ in methods_of(kind)} & {part}
        methods = {x: getattr(value, x) for x in names if not isinstance(getattr(kind, x), property)}
        tensors: dict[str, Any] = {}  # only a module's: other objects may answer any name
        if isinstance(value, torch.nn.Module):
            tensors = {**value._parameters, **value._buffers}  # noqa: SLF001
        value = {**tensors, **methods, **getattr(value, "__dict__", {})}.get(part)
    return value


def steers_forward(module: torch.nn.Module, attribute: str) -> bool:
    """Return whether calls of a module read one of its plain attributes, as Dropout reads ``p``."""
    kind: Any = type(module)
    methods = {name: node for name, _, node in methods_of(kind)}
    names, new = set[str](), {"forward"}
    while new:
        names |= new
        called_ones = [node for name, node in methods.items() if name in names]
        reads = {x.attr for node in called_ones for x in ast.walk(node) if isinstance(x, ast.Attribute)}
        new = (reads & set(methods)) - names
    is_read = any(
        f"{node.args.args[0].arg}.{attribute}" in names_read(node)
        for name, node in methods.items()
        if name in names and node.args.args
    )
    return is_read or attribute in getattr(kind, "__constants__", ())


@dataclass(frozen=True, slots=True, eq=False)
class UserFunction:
    """A function in the user's files. ``thing``: the object whose method it is, or None."""

    thing: Any
    function: FunctionType
    node: ast.FunctionDef

    def __str__(self) -> str:
        return self.function.__qualname__.rpartition("<locals>.")[2]

    @property
    def me(self) -> str:
        """The name of a method's own object; empty for a plain function."""
        arguments = self.node.args.args
        return arguments[0].arg if self.thing is not None and arguments else ""

    def outer(self, name: str) -> str:
        """Return a name as other functions know it: an attribute of the own object begins with a dot."""
        return name.removeprefix(self.me) if self.me and name.startswith(f"{self.me}.") else name

    def object_of(self, node: ast.AST) -> Any:
        """Return the object that an expression names, or None where the source does not show it."""
        if isinstance(node, ast.Name):
            if node.id == self.me:
                return self.thing
            free = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True))
            with contextlib.suppress(ValueError):  # the name is not set yet
                return free[node.id].cell_contents if node.id in free else self._of_module(node.id)
        if isinstance(node, ast.Attribute):
            return getattr(self.object_of(node.value), "__dict__", {}).get(node.attr)
        return None

    def _of_module(self, name: str) -> Any:
        return None if name in self._own() else self.function.__globals__.get(name)

    def _own(self) -> set[str]:
        """Return the names of arguments and of variables of this function's own."""
        parts = [x for x in ast.walk(self.node) if isinstance(x, ast.Global | ast.Nonlocal)]
        arguments = {x.arg for x in ast.walk(self.node.args) if isinstance(x, ast.arg)}
        own = arguments | set(stores(self.node.body)) - {name for x in parts for name in x.names}
        return own - {self.me}

    def kept(self) -> dict[str, int]:
        """Return the names that a call makes from the value of an earlier call, each with its line."""
        own, names = self._own(), dict[str, int]()
        carry(
            self.node.body, own & {x.arg for x in ast.walk(self.node.args) if isinstance(x, ast.arg)}, names
        )
        names |= changed_in_place(self.node)
        return {
            name: at for name, at in names.items() if name.partition(".")[0] not in own and name != self.me
        }

    def left(self) -> dict[str, int]:
        """Return the names that each call reads, and then sets to another value."""
        tests = [x for x in ast.walk(self.node) if isinstance(x, ast.Compare)]
        looks_up = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)
        if any(isinstance(op, looks_up) and f"{self.me}." in ast.unparse(x) for x in tests for op in x.ops):
            return {}  # a cache of the newest part of the data
        read, names = set[str](), dict[str, int]()
        for node in self.node.body:
            if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Constant):
                names |= {
                    name: node.lineno
                    for name in stores([node])
                    if self.outer(name)[0] == "." and name in read
                }
            read |= names_read(node)
        return names


def changed_in_place(node: ast.AST) -> dict[str, int]:
    """Return the names whose content a node makes from the old one, or moves on, each with its line."""
    names: dict[str, int] = {}
    for x in ast.walk(node):
        if isinstance(x, ast.Assign | ast.AugAssign):
            for target in x.targets if isinstance(x, ast.Assign) else [x.target]:
                name = holder(target) if isinstance(target, ast.Subscript) else ""
                if isinstance(x, ast.AugAssign) or name in names_read(x.value):
                    names.setdefault(name, x.lineno)
        elif isinstance(x, ast.Call) and called(x) == "next" and x.args:
            names.setdefault(dotted(x.args[0]), x.lineno)
        elif isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr in GROWS:
            name = holder(x.func.value)
            lists = [y for y in ast.walk(node) if isinstance(y, ast.Subscript) and dotted(y.value) == name]
            if all(
                isinstance(y.slice, ast.Constant | ast.UnaryOp | ast.Slice) for y in lists
            ):  # else a cache
                names.setdefault(name, x.lineno)
    names.pop("", None)
    return names


def _begun(functions: list[UserFunction]) -> set[str]:
    """Return the attributes that one of the functions sets in each call, without their old value."""
    return {
        f.outer(name)
        for f in functions
        for node in f.node.body
        if isinstance(node, ast.Assign)
        for name in stores([node])
        if name not in names_read(node)
    }


def _give(functions: list[UserFunction], entries: set[UserFunction], name: str, conditions: bool) -> bool:
    """Whether the result of one of the ``entries`` depends on ``name``."""
    made, size = {name}, 0
    while size != len(made):
        size = len(made)
        for f in functions:
            inner = {f.me + x if x[0] == "." else x for x in made}
            local = made_from(f.node, inner, conditions, parts=True)
            made |= {x for x in map(f.outer, local) if x[0] == "."}
            if _gives(f.node, local, conditions):
                if f in entries:
                    return True
                made.add(f".{f.node.name}")
    return False


def _gives(function: ast.FunctionDef, made: set[str], conditions: bool) -> bool:
    """Whether what a function returns or yields is made from one of the names."""
    results = ast.Return | ast.Yield | ast.YieldFrom
    for x, _ in inside(function):
        if isinstance(x, results) and x.value is not None and names_read(x.value) & made:
            return True
        decides = conditions and isinstance(x, ast.If) and names_read(x.test) & made
        if decides and any(isinstance(y, results) for y in ast.walk(x)):
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
        elif isinstance(value, MethodType):
            self._method(value.__self__, value.__name__, None)
        elif isinstance(value, FunctionType):
            node = functions_of(value.__code__.co_filename).get(value.__code__.co_firstlineno)
            if node is not None:
                self._add(UserFunction(None, value, node), None)
            elif is_of_user(value.__code__.co_filename):  # a lambda
                more = [x.cell_contents for x in value.__closure__ or ()]
                more = [*more, *(value.__globals__.get(name) for name in value.__code__.co_names)]
        elif isinstance(value, list | tuple | dict):
            more = (value.values() if isinstance(value, dict) else value) if len(value) <= _FEW else ()
        elif not isinstance(value, torch.Tensor | torch.nn.Module | type | ModuleType):
            for name in _CALLS:
                self._method(value, name, None)
            more = list(getattr(value, "__dict__", {}).values())
        self._pending.extend((x, depth + 1) for x in more)

    def _method(self, thing: Any, name: str, caller: UserFunction | None) -> None:
        kind: Any = type(thing)
        for own, function, node in methods_of(kind):
            if own == name:
                self._add(UserFunction(thing, function, node), caller)

    def _add(self, function: UserFunction, caller: UserFunction | None) -> None:
        key = id(function.thing), id(function.function)
        is_new, function = key not in self._functions, self._functions.setdefault(key, function)
        if caller is None or caller.thing is not function.thing:
            self.entries.add(function)
        if not is_new:
            return
        for x in ast.walk(function.node):
            if isinstance(x, ast.Attribute) and (owner := function.object_of(x.value)) is not None:
                self._method(owner, x.attr, function)
            if isinstance(x, ast.Call) and not isinstance(called := function.object_of(x.func), type):
                self._look(called, 0)


@functools.cache
def methods_of(kind: type) -> list[tuple[str, FunctionType, ast.FunctionDef]]:
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
    return [(name, functions[name], node) for name, node in nodes.items() if node is not None]


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
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError, RecursionError):
        return {}
    functions = [x for x in ast.walk(tree) if isinstance(x, ast.FunctionDef)]
    return {min([x.lineno, *(y.lineno for y in x.decorator_list)]): x for x in functions}
