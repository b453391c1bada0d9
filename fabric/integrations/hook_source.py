"""Reads the source of a user's hooks before the first step, for what a joining replica could not do alike.

*Kept values*: a callback that counts ``self.n += 1``, and a ``compute_loss`` that weighs a term by
``callback.n``, are right while a replica runs from the start. A replica that joins begins with another count,
and trains with another loss without an error. An attribute is named only where a hook of each step makes it
from its own old value, its object does not save it, and a loss is made from it. *Logged figures*: the hook
that logs a figure, because some figures are one replica's own. Only methods in the user's files are read.
"""

import ast
import contextlib
import random
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
import torch

from fabric.client.loop.loop_flow import GROWS, called, gradient_sources, sets_rate
from fabric.client.loop.user_functions import functions_of, methods_of, steers_forward

_COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "gather_for_metrics"),
    *("reduce_scatter", "reduce_scatter_tensor"),
}
# Tensors have methods of these names too: they count on these attributes, and in torch.distributed.
_SHARED_NAMES = {"broadcast", "gather", "reduce", "scatter"}
_BACKWARDS = {"backward", "manual_backward"}
_ASSIGNMENTS = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_BRANCHES = ast.If | ast.Try | ast.Match | ast.While


@dataclass(frozen=True, slots=True)
class Hooks:
    """Names of methods. ``running``: run in each step. ``losses``: their result is the loss.

    ``evaluating``: run in an evaluation, which a replica that joins has not made. ``saves``: save attributes,
    so that an attribute which they name is shared. ``given``: argument names of hooks with what they get.
    ``stops``: attributes that end the training of one replica alone.
    """

    running: Collection[str]
    evaluating: Collection[str]
    losses: Collection[str]
    saves: Collection[str]
    given: Mapping[str, Any]
    stops: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class UserMethod:
    """A method of ``thing`` in the user's own files."""

    thing: Any
    name: str
    function: FunctionType
    node: ast.FunctionDef
    given: Mapping[str, Any]  # argument name -> what a hook gets

    def __str__(self) -> str:
        return self.function.__qualname__.rpartition("<locals>.")[2]

    def symbol(self, node: ast.expr) -> str:
        """Return what an expression reads or sets: a name, or an object's id with the attribute's name.

        A global name belongs to its module, and a name of an outer function to its cell. It is empty where
        the source does not show the object.
        """
        if isinstance(node, ast.Name):
            code, cells = self.function.__code__, self.function.__closure__ or ()
            if node.id in code.co_freevars:
                return f"{id(cells[code.co_freevars.index(node.id)])}.{node.id}"
            is_own = node.id in code.co_varnames or node.id in code.co_cellvars
            return node.id if is_own else f"{id(self.function.__globals__)}.{node.id}"
        if not isinstance(node, ast.Attribute):
            return ""
        held = self.object_of(node.value)
        return f"{id(held)}.{node.attr}" if held is not None else ""

    def object_of(self, node: ast.expr) -> Any:
        """Return the object that an expression names, or None where the source does not show it."""
        if isinstance(node, ast.Name):
            arguments = self.node.args.args
            if arguments and node.id == arguments[0].arg:
                return self.thing
            if any(x.arg == node.id for x in arguments):
                return self.given.get(node.id)
            free = dict(zip(self.function.__code__.co_freevars, self.function.__closure__ or (), strict=True))
            if node.id not in free:
                return self.function.__globals__.get(node.id)
            with contextlib.suppress(ValueError):  # the name is not set yet
                return free[node.id].cell_contents
            return None
        if not isinstance(node, ast.Attribute):
            return None
        held = self.object_of(node.value)
        children = held._modules if isinstance(held, torch.nn.Module) else {}  # noqa: SLF001
        return getattr(held, "__dict__", {}).get(node.attr, children.get(node.attr))

    def read(self, node: ast.AST) -> set[str]:
        """Return the symbols that an expression reads."""
        return {self.symbol(x) for x in ast.walk(node) if isinstance(x, ast.Name | ast.Attribute)} - {""}

    def assignments(self, node: ast.AST) -> Iterator[tuple[ast.AST, set[str], ast.expr]]:
        """Yield each assignment in ``node`` with the symbols that it sets, and its value."""
        for x in ast.walk(node):
            if isinstance(x, _ASSIGNMENTS) and x.value is not None:
                targets = x.targets if isinstance(x, ast.Assign) else [x.target]
                parts = [y for target in targets for y in ast.walk(target)]
                stored: list[ast.expr] = [
                    y
                    for y in parts
                    if isinstance(y, ast.Name | ast.Attribute) and isinstance(y.ctx, ast.Store)
                ]
                # A part of a list, dict or tensor is set.
                stored += [
                    y.value for y in parts if isinstance(y, ast.Subscript) and isinstance(y.ctx, ast.Store)
                ]
                yield x, {self.symbol(y) for y in stored} - {""}, x.value

    def made(self, source: set[str]) -> set[str]:
        """Return ``source`` and the symbols that are made from it, by their value or under a condition."""
        made, size = set(source), 0
        while size != len(made):
            size = len(made)
            for _, stored, value in self.assignments(self.node):
                if self.read(value) & made:
                    made |= stored
            for branch in ast.walk(self.node):
                if isinstance(branch, ast.If | ast.While) and self.read(branch.test) & made:
                    for _, stored, _ in self.assignments(branch):
                        made |= stored
        return made

    def generators(self) -> Iterator[tuple[str, int]]:
        """Yield the symbols of generators of random numbers that the method draws from, and the line."""
        for x in ast.walk(self.node):
            if isinstance(x, ast.Call):
                held = x.func.value if isinstance(x.func, ast.Attribute) else x.func
                for y in (held, *x.args, *(z.value for z in x.keywords)):
                    drawn = self.object_of(y)
                    if isinstance(drawn, _GENERATORS) and drawn is not torch.default_generator:
                        yield self.symbol(y), x.lineno

    def results(self) -> Iterator[ast.expr]:
        """Yield the values that the method returns: of a dict, that of the key "loss"."""
        for x in ast.walk(self.node):
            if isinstance(x, ast.Return) and x.value is not None:
                keys = [ast.unparse(y) if y else "" for y in getattr(x.value, "keys", ())]
                parts = getattr(x.value, "values", [])
                yield parts[keys.index("'loss'")] if "'loss'" in keys else x.value


def kept_value(things: Sequence[Any], hooks: Hooks) -> str:
    """Return the first half of a sentence about a value that hooks of ``things`` keep for a loss, or ""."""
    methods = [method for thing in things for method in _methods(thing, hooks.given)]
    saved = _saved(things, methods, hooks)
    running = _reached(methods, hooks.running)
    measured = _set_by(_reached(methods, hooks.evaluating))
    measured = {symbol: at for symbol, at in measured.items() if symbol not in _set_by(running)}
    for symbol, (keeper, line) in (_kept(running) | measured).items():
        if symbol not in saved:
            made, every = _made(symbol, running), _made(symbol, methods)
            module = next((x for x in things if symbol.partition(".")[0] == str(id(x))), None)
            steered = isinstance(module, torch.nn.Module) and steers_forward(module, symbol.partition(".")[2])
            user = keeper if steered and type(module).__module__.startswith("torch.") else None
            user = user or next((x for x in running if _makes_loss(x, made, hooks.losses)), None)
            user = user or next((x for x in methods if _steers(x, x.made(every), hooks.stops)), None)
            if user is not None:
                name, file = symbol.partition(".")[2], Path(keeper.function.__code__.co_filename).name
                way = "sets in an evaluation" if symbol in measured else "makes from its own old value"
                return (
                    f"{user} uses {name}, which {keeper} ({file}:{line}) {way}, and a replica that joins "
                    f"begins with another {name}"
                )
    return ""


def _saved(things: Sequence[Any], methods: list[UserMethod], hooks: Hooks) -> set[str]:
    """Return the symbols of buffers, and those that methods of ``hooks.saves`` name, a framework's too."""
    saving = [x for x in methods if x.name in hooks.saves]
    saved = {f"{id(x.thing)}.{name}" for x in saving for name in _mentioned(x.node)}
    saved |= {symbol for x in saving for symbol in x.read(x.node)}
    for thing in things:
        inherited = (getattr(type(thing), name, None) for name in hooks.saves)
        codes = [x.__code__ for x in inherited if isinstance(x, FunctionType)]
        saved |= {f"{id(thing)}.{name}" for code in codes for name in code.co_names}
        saved |= {f"{id(thing)}.{name}" for name in getattr(thing, "_buffers", {})}
    return saved


def _steers(method: UserMethod, made: set[str], stops: Collection[str]) -> bool:
    """Whether a method changes a rate of the training, or weights, or stops, by one of these symbols."""
    for x in ast.walk(method.node):
        if isinstance(x, ast.Call) and called(x) == "load_state_dict":
            if any(method.read(y) & made for y in x.args):
                return True
        elif isinstance(x, ast.If | ast.While) and method.read(x.test) & made:
            inside = [y for part in (*x.body, *x.orelse) for y in ast.walk(part)]
            if any(sets_rate(y) or (isinstance(y, ast.Attribute) and _is_set(y, stops)) for y in inside):
                return True
        elif isinstance(x, ast.Assign | ast.AugAssign) and sets_rate(x) and method.read(x.value) & made:
            return True
    return False


def collective(things: Sequence[Any], hooks: Hooks) -> str:
    """Return the first half of a sentence about a collective in the computing of a loss, or "".

    A collective that the framework's objects offer counts wherever it is; one of ``torch.distributed`` counts
    where a loss is made from its result.
    """
    methods = [method for thing in things for method in _methods(thing, hooks.given)]
    for method in _reached(methods, hooks.losses):
        for x in ast.walk(method.node):
            if not (isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute)):
                continue
            owner = ast.unparse(x.func.value).split(".")[-1]
            module = getattr(method.object_of(x.func.value), "__name__", "")
            is_torchs = module.startswith("torch.distributed") or owner in ("dist", "distributed")
            shared = _SHARED_NAMES if is_torchs or owner in ("accelerator", "strategy") else set()
            if x.func.attr not in _COLLECTIVES | shared:
                continue
            if not is_torchs or _makes_loss(method, _results_of(x, method), hooks.losses):
                place = f"{Path(method.function.__code__.co_filename).name}:{x.lineno}"
                return f"{method} calls {ast.unparse(x.func)} ({place}), which sees one replica"
    return ""


def _results_of(call: ast.Call, method: UserMethod) -> set[str]:
    """Return the symbols that get the result of a call, or that it writes into."""
    written = {y.id for x in call.args[:1] for y in ast.walk(x) if isinstance(y, ast.Name)}
    for _, stored, value in method.assignments(method.node):
        if any(x is call for x in ast.walk(value)):
            written |= stored
    return written


def skips(thing: Any, hook: str) -> str:
    """Return the method with its line if ``hook`` of ``thing`` is the user's and returns -1, or ""."""
    for method in _methods(thing, {}):
        for x in ast.walk(method.node):
            if method.name == hook and isinstance(x, ast.Return) and x.value and ast.unparse(x.value) == "-1":
                return f"{method} ({Path(method.function.__code__.co_filename).name}:{x.lineno})"
    return ""


def logged_by(thing: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield each figure that a method of ``thing`` logs: its name, the method, and the object where shown."""
    for method in _methods(thing, {}):
        for x in ast.walk(method.node):
            if not isinstance(x, ast.Call) or getattr(x.func, "attr", "") not in ("log", "log_dict"):
                continue
            names = x.args[0].keys if x.args and isinstance(x.args[0], ast.Dict) else x.args[:1]
            value = method.object_of(x.args[1]) if len(x.args) > 1 else None
            for name in names:
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield name.value, method.name, value


def _methods(thing: Any, given: Mapping[str, Any]) -> Iterator[UserMethod]:
    if isinstance(thing, FunctionType):
        if node := functions_of(thing.__code__.co_filename).get(thing.__code__.co_firstlineno):
            yield UserMethod(thing, "__call__", thing, node, given)
        return
    kind: Any = type(thing)
    for name, function, node in methods_of(kind):
        yield UserMethod(thing, name, function, node, given)


def _mentioned(node: ast.AST) -> set[str]:
    """Return the attributes and words that a method names."""
    words = {x.value for x in ast.walk(node) if isinstance(x, ast.Constant) and isinstance(x.value, str)}
    return words | {x.attr for x in ast.walk(node) if isinstance(x, ast.Attribute)}


def _reached(methods: list[UserMethod], hooks: Collection[str]) -> list[UserMethod]:
    """Return the hooks among the methods, and the methods that they call by name."""
    names, new = set(), set(hooks)
    while new:
        names |= new
        calls = [
            x.func
            for method in methods
            if method.name in new
            for x in ast.walk(method.node)
            if isinstance(x, ast.Call)
        ]
        new = {x.attr for x in calls if isinstance(x, ast.Attribute)} - names
    return [x for x in methods if x.name in names]


def _set_by(methods: list[UserMethod]) -> dict[str, tuple[UserMethod, int]]:
    """Return the attributes that the methods set, with the method and the line."""
    assignments = ((x, *y) for x in methods for y in x.assignments(x.node))
    return {
        symbol: (method, value.lineno)
        for method, _, stored, value in assignments
        for symbol in _of_objects(stored)
    }


def _kept(methods: list[UserMethod]) -> dict[str, tuple[UserMethod, int]]:
    """Return the attributes that a method makes from their own old value, and that none sets afresh."""
    kept: dict[str, tuple[UserMethod, int]] = {}
    fresh: set[str] = set()
    for method in methods:
        branches = [x for x in ast.walk(method.node) if isinstance(x, _BRANCHES)]
        conditional = {id(y) for x in branches for y in ast.walk(x)}
        for symbol, line in [*method.generators(), *_grown(method)]:
            kept.setdefault(symbol, (method, line))
        for statement, stored, value in method.assignments(method.node):
            tables = {method.symbol(x) for x in _tables(statement, method)}
            for symbol in _of_objects(stored):
                if isinstance(statement, ast.AugAssign) or symbol in method.read(value) | tables:
                    kept.setdefault(symbol, (method, value.lineno))
                elif id(statement) not in conditional and "epoch" not in method.name:
                    fresh.add(symbol)
    return {symbol: at for symbol, at in kept.items() if symbol not in fresh}


def _of_objects(symbols: Collection[str]) -> list[str]:
    """Return the symbols that are not a method's own names, by their names."""
    return sorted((x for x in symbols if "." in x), key=lambda x: x.partition(".")[2])


def _tables(statement: ast.AST, method: UserMethod) -> Iterator[ast.expr]:
    """Yield the tensors and arrays of which an assignment sets some rows, by an index that varies."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    for x in (y for target in targets for y in ast.walk(target)):
        if isinstance(x, ast.Subscript) and not isinstance(x.slice, ast.Constant | ast.Slice):
            held = method.object_of(x.value)
            yield from [x.value] if isinstance(held, torch.Tensor | np.ndarray) else []


def _grown(method: UserMethod) -> Iterator[tuple[str, int]]:
    """Yield the lists of objects to which a method appends, and the line."""
    for x in ast.walk(method.node):
        if isinstance(x, ast.Call) and isinstance(x.func, ast.Attribute) and x.func.attr in GROWS:
            for symbol in _of_objects([method.symbol(x.func.value)]):
                yield symbol, x.lineno


def _is_set(node: ast.Attribute, names: Collection[str]) -> bool:
    return node.attr in names and isinstance(node.ctx, ast.Store)


def _made(symbol: str, methods: list[UserMethod]) -> set[str]:
    """Return ``symbol``, and the attributes and results of methods that are made from it."""
    made, size = {symbol}, 0
    while size != len(made):
        size = len(made)
        for method in methods:
            within = method.made(made)
            made |= {x for x in within if "." in x}
            if any(method.read(x) & within for x in method.results()):
                made.add(f"{id(method.thing)}.{method.name}")
    return made


def _makes_loss(method: UserMethod, made: set[str], losses: Collection[str]) -> bool:
    within = method.made(made)
    values = list(method.results()) if method.name in losses else []
    for x in ast.walk(method.node):
        values += gradient_sources(x)
        if isinstance(x, ast.Call) and getattr(x.func, "attr", "") in _BACKWARDS:
            values += x.args
    return any(method.read(x) & within for x in values)
