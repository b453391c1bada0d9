"""Reads a user's source before the first step, for what a joining replica could not do as the others do.

*Kept values*: a callback that counts ``self.n += 1``, and a ``compute_loss`` that weighs a term by
``callback.n``, are right while a replica runs from the start. A replica that joins begins with another count,
and trains with another loss without an error. An attribute is named only where a hook of each step makes it
from its own old value, its object does not save it, and a loss is made from it. *Logged figures*: the hook
that logs a figure, because some figures are one replica's own. Only methods in the user's files are read.

*Measured values*: with ``--adopt`` and accelerate a replica that joins goes over the loop's past steps
without computing. Its counts of steps are right, and what it measures on the way is not. ``if v > best: bad
+= 1`` and ``if bad >= 3: break`` would therefore end its loop at another step than the others'. A loss that
is weighed by its own past would be another one, and so would the best weights that the loop keeps. The search
goes through the loops of the user's functions on the stack. Tests for ``isnan`` and ``isfinite`` are left
alone.
"""

import ast
import copy
import itertools
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, FunctionType
from typing import Any

import numpy as np
import torch

from fabric.client.loop.loop_flow import (
    LOOPS,
    MEASURES_GRADIENTS,
    assignments,
    called,
    calls,
    carry,
    dotted,
    ends_by,
    gradient_sources,
    kept_weights,
    made_from,
    moves_training,
    names_read,
    of_kind,
    sets_rate,
    stores,
    trains_by_value,
    walked,
)
from fabric.client.loop.loop_source import changed_names, moved_names
from fabric.client.loop.user_functions import (
    UserFunction,
    callee,
    drawn_from,
    function_of,
    functions_in,
    kept_by_loop,
    loops_around,
    methods_of,
    search,
    spread,
    steers_forward,
    steers_update,
    tree_of,
    value_of,
)

_COLLECTIVES = {
    *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "gather_for_metrics"),
    *("reduce_scatter", "reduce_scatter_tensor"),
}
# Tensors have methods of these names too: they count on these attributes, and in torch.distributed.
_SHARED_NAMES = {"broadcast", "gather", "reduce", "scatter"}
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


@search("")
def kept_value(things: Sequence[Any], hooks: Hooks) -> str:
    """Return the first half of a sentence about a value that hooks of ``things`` keep for a loss, or ""."""
    methods = [x for thing in things for x in functions_in(thing, hooks.given)]
    saved = _saved(things, methods, hooks)
    running = _reached(methods, hooks.running)
    measured = _set_by(_reached(methods, hooks.evaluating))
    measured = {symbol: at for symbol, at in measured.items() if symbol not in _set_by(running)}
    for symbol, (keeper, line) in (_kept(running) | measured).items():
        if symbol not in saved:
            made, every = (spread(x, symbol, _gives) for x in (running, methods))
            module = next((x for x in things if symbol.partition(".")[0] == str(id(x))), None)
            steered = isinstance(module, torch.nn.Module) and steers_forward(module, symbol.partition(".")[2])
            user = keeper if steered and type(module).__module__.startswith("torch.") else None
            user = user or next((x for x in running if _makes_loss(x, x.made(made), hooks.losses)), None)
            user = user or next((x for x in methods if _steers(x, x.made(every), hooks.stops)), None)
            if user is not None:
                name = symbol.partition(".")[2]
                way = "sets in an evaluation" if symbol in measured else "makes from its own old value"
                return (
                    f"{user} uses {name}, which {keeper} ({keeper.place(line)}) {way}, and a replica that "
                    f"joins begins with another {name}"
                )
    return ""


def _saved(things: Sequence[Any], methods: list[UserFunction], hooks: Hooks) -> set[str]:
    """Return the symbols of buffers, and those that methods of ``hooks.saves`` name, a framework's too."""
    saving = [x for x in methods if x.name in hooks.saves]
    parts = [(x, part) for x in saving for part in walked(x.node)]
    saved = {f"{id(x.thing)}.{part.attr}" for x, part in parts if isinstance(part, ast.Attribute)}
    words = [(x, part.value) for x, part in parts if isinstance(part, ast.Constant)]
    saved |= {f"{id(x.thing)}.{word}" for x, word in words if isinstance(word, str)}
    saved |= {symbol for x in saving for symbol in x.symbols.values()}
    for thing in things:
        inherited = (getattr(type(thing), name, None) for name in hooks.saves)
        codes = [x.__code__ for x in inherited if isinstance(x, FunctionType)]
        saved |= {f"{id(thing)}.{name}" for code in codes for name in code.co_names}
        saved |= {f"{id(thing)}.{name}" for name in getattr(thing, "_buffers", {})}
    return saved


def _steers(method: UserFunction, made: set[str], stops: Collection[str]) -> bool:
    """Whether a method changes a rate of the training, or weights, or stops, by one of these names."""
    given = [y for x in calls(method.node, "load_state_dict") for y in x.args]
    given += [x.value for x in of_kind(method.node, ast.Assign, ast.AugAssign) if sets_rate(x)]
    tests = [x for x in of_kind(method.node, ast.If, ast.While) if names_read(x.test) & made]
    under = [y for x in tests for part in (*x.body, *x.orelse) for y in walked(part)]
    sets = [x.attr for x in under if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)]
    is_given = any(names_read(x) & made for x in given)
    return is_given or any(map(sets_rate, under)) or not set(stops).isdisjoint(sets)


@search("")
def collective(things: Sequence[Any], hooks: Hooks) -> str:
    """Return the first half of a sentence about a collective in the computing of a loss, or "".

    A collective that the framework's objects offer counts wherever it is; one of ``torch.distributed`` counts
    where a loss is made from its result.
    """
    methods = [x for thing in things for x in functions_in(thing, hooks.given)]
    for method in _reached(methods, hooks.losses):
        for x in calls(method.node, *_COLLECTIVES, *_SHARED_NAMES):
            if not isinstance(x.func, ast.Attribute):
                continue
            owner = ast.unparse(x.func.value).split(".")[-1]
            module = getattr(value_of(method.values, dotted(x.func.value)), "__name__", "")
            is_torchs = module.startswith("torch.distributed") or owner in ("dist", "distributed")
            shared = _SHARED_NAMES if is_torchs or owner in ("accelerator", "strategy") else set()
            if x.func.attr not in _COLLECTIVES | shared:
                continue
            # Names that are made from the call's result, or from what the call writes into.
            given = {y.id for z in x.args[:1] for y in of_kind(z, ast.Name)}
            given.update(*(names for _, names, value in assignments(method.node) if x in walked(value)))
            made = made_from(method.node, given, conditions=True, parts=True)
            if not is_torchs or _makes_loss(method, made, hooks.losses):
                return (
                    f"{method} calls {ast.unparse(x.func)} ({method.place(x.lineno)}), which sees one replica"
                )
    return ""


@search("")
def skips(thing: Any, hook: str) -> str:
    """Return the method with its line if ``hook`` of ``thing`` is the user's and returns -1, or ""."""
    for method in functions_in(thing):
        for x in of_kind(method.node, ast.Return):
            if method.name == hook and x.value and ast.unparse(x.value) == "-1":
                return f"{method} ({method.place(x.lineno)})"
    return ""


def logged_by(thing: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield each figure that a method of ``thing`` logs: its name, the method, and the object where shown."""
    for method in functions_in(thing):
        for x in calls(method.node, "log", "log_dict"):
            names = x.args[0].keys if x.args and isinstance(x.args[0], ast.Dict) else x.args[:1]
            value = value_of(method.values, dotted(x.args[1])) if len(x.args) > 1 else None
            for name in names:
                if isinstance(name, ast.Constant) and isinstance(name.value, str):
                    yield name.value, method.name, value


def _reached(methods: list[UserFunction], hooks: Collection[str]) -> list[UserFunction]:
    """Return the hooks among the methods, and the methods that they call by name."""
    names, new = set(), set(hooks)
    while new:
        names |= new
        asked = [x.func for method in methods if method.name in new for x in of_kind(method.node, ast.Call)]
        new = {x.attr for x in asked if isinstance(x, ast.Attribute)} - names
    return [x for x in methods if x.name in names]


def _set_by(methods: list[UserFunction]) -> dict[str, tuple[UserFunction, int]]:
    """Return the attributes that the methods set, with the method and the line."""
    return {
        symbol: (method, value.lineno)
        for method in methods
        for _, stored, value in assignments(method.node)
        for symbol in sorted(method.shared(stored), key=lambda x: x.partition(".")[2])
    }


def _kept(methods: list[UserFunction]) -> dict[str, tuple[UserFunction, int]]:
    """Return the attributes that a method makes from their own old value, and that none sets afresh."""
    kept: dict[str, tuple[UserFunction, int]] = {}
    fresh: set[str] = set()
    for method in methods:
        branches = [x for x in walked(method.node) if isinstance(x, _BRANCHES)]
        conditional = {id(y) for x in branches for y in walked(x)}
        lines = dict(drawn_from(method.node, method.values)) | method.kept()
        for statement, stored, value in assignments(method.node):
            tables = _tables(statement, method)
            lines |= dict.fromkeys(tables, value.lineno)
            afresh = method.shared(stored) - method.shared(names_read(value) | tables)
            is_sure = not isinstance(statement, ast.AugAssign) and id(statement) not in conditional
            fresh |= afresh if is_sure and "epoch" not in method.name else set()
        for name, line in lines.items():
            kept.setdefault(method.symbols.get(name, ""), (method, line))
    return {symbol: at for symbol, at in kept.items() if symbol and symbol not in fresh}


def _tables(statement: ast.AST, method: UserFunction) -> set[str]:
    """Return the tensors and arrays of which an assignment sets some rows, by an index that varies."""
    targets = statement.targets if isinstance(statement, ast.Assign) else []
    parts = [x for target in targets for x in of_kind(target, ast.Subscript)]
    names = {dotted(x.value) for x in parts if not isinstance(x.slice, ast.Constant | ast.Slice)}
    return {x for x in names if isinstance(value_of(method.values, x), torch.Tensor | np.ndarray)}


def _results(method: UserFunction) -> Iterator[ast.expr]:
    """Yield the values that the method returns: of a dict, that of the key "loss"."""
    for x in walked(method.node):
        if isinstance(x, ast.Return) and x.value is not None:
            keys = [ast.unparse(y) if y else "" for y in getattr(x.value, "keys", ())]
            parts = getattr(x.value, "values", [])
            yield parts[keys.index("'loss'")] if "'loss'" in keys else x.value


def _gives(method: UserFunction, made: set[str]) -> bool:
    return any(names_read(x) & made for x in _results(method))


def _makes_loss(method: UserFunction, made: set[str], losses: Collection[str]) -> bool:
    """Whether a loss or a gradient is made from one of these names."""
    values = [y for x in walked(method.node) for y in gradient_sources(x)]
    values += [y for x in calls(method.node, "backward", "manual_backward") for y in x.args]
    return any(names_read(x) & made for x in values) or (method.name in losses and _gives(method, made))


# Values that a script measures and then trains or stops by, in the loops that are under way.

_CONTAINERS = (list, dict, set, deque)
_CLOCKS = {"time.time", "time.monotonic", "time.perf_counter", "monotonic", "perf_counter"}
_CLOCKS |= {"datetime.now", "datetime.datetime.now"}
# Methods of a model that measure nothing.
_NO_MEASURE = {
    *("train", "eval", "to", "cuda", "cpu", "half", "float", "bfloat16", "requires_grad_", "zero_grad"),
    *("parameters", "named_parameters", "modules", "named_modules", "buffers", "children", "apply"),
    *("state_dict", "load_state_dict", "register_forward_hook"),
}


_WEIGHTS = {"parameters", "named_parameters", "state_dict"}
_COPIES = {"clone", "copy", "deepcopy", "parameters_to_vector"}


@search("")
def measured_value(frame: FrameType | None, shared: Iterable[object] = ()) -> str:
    """Return the first half of a sentence about a measured value that ends or steers a loop, or "".

    ``shared``: objects of the shared state, which may keep what they like.
    """
    held = {id(y) for x in shared for y in (x.modules() if isinstance(x, torch.nn.Module) else [x])}
    for inner, loops in loops_around(frame):
        values, place = {**inner.f_globals, **inner.f_locals}, Path(inner.f_code.co_filename).name
        measured = _Measured(loops[0], values)
        kept = kept_by_loop(loops[0], values, held, measured.is_fed)
        if kept:
            return f"the training depends on {kept}"
        text = _in_loops(tree_of(inner), loops, measured, place) or measured.kept_weights(loops, place)
        if text:
            return text
    return ""


@search("")
def carried_network(frame: FrameType | None, shared: Iterable[object]) -> str:
    """Return the first half of a sentence about a network that a loop trains by and sets at times, or ""."""
    held = {id(y) for x in shared for y in (x.modules() if isinstance(x, torch.nn.Module) else [x])}
    for inner, (loop, *_) in loops_around(frame):
        values, place = {**inner.f_globals, **inner.f_locals}, Path(inner.f_code.co_filename).name
        loads = [x.func for x in calls(loop, "load_state_dict")]
        loaded = {dotted(x.value): x.lineno for x in loads if isinstance(x, ast.Attribute)}
        for name, line in {**moved_names(loop, values), **loaded}.items():
            if not isinstance(module := value_of(values, name), torch.nn.Module) or id(module) in held:
                continue
            # The statement that sets the network is not evidence that the loss reads it.
            rest = _without(loop, line)
            if moves_training(rest, made_from(rest, {name})):
                return f"the training depends on the network {name}, which {place}:{line} sets"
    return ""


def _without(loop: LOOPS, line: int) -> LOOPS:
    """Return a copy of the loop without the statements of one line."""
    rest = copy.deepcopy(loop)
    for node in ast.walk(rest):
        for name, parts in ast.iter_fields(node):
            if isinstance(parts, list):
                left_out = [isinstance(x, ast.Expr | ast.Assign) and x.lineno == line for x in parts]
                setattr(node, name, [ast.Pass() if y else x for x, y in zip(parts, left_out, strict=True)])
    return rest


def _in_loops(tree: ast.AST | None, loops: list[LOOPS], measured: "_Measured", place: str) -> str:
    sources = measured.names
    for name in sorted(sources):
        end = ends_by(loops, {name})
        if end:
            return f"the loop ends at {place}:{end} by {name}, which is measured"
    end = ends_by(loops, set(), measured.measures)
    if end:
        return f"the loop ends at {place}:{end} by what it measures"
    carried: dict[str, int] = {}
    carry(loops[:1], set(), carried)
    carried |= changed_names(loops[0])
    for name, at in carried.items():
        if name in sources and moves_training(loops[0], made_from(loops[0], {name})):
            return f"the training depends on {name}, which {place}:{at} carries from what is measured"
    for name in sorted(sources):
        at = _trains_by_past(loops, name, measured)
        if at:
            return f"the training depends on {name}, which {place}:{at} measures for the next pass"
    # A gradient is that of all replicas when a limit or a rate goes by it.
    outputs = _Measured(loops[0], measured.values, gradients=False)
    for node in walked(loops[0]):
        for value in steers_update(node, measured.values):
            if outputs.measures(value):
                return f"the update depends on what {place}:{value.lineno} measures in one replica"
    for name, at in kept_weights(tree, loops[0], sources) if tree is not None else ():
        return f"{name} at {place}:{at} keeps the weights that measure best"
    return ""


def _trains_by_past(loops: list[LOOPS], name: str, measured: "_Measured") -> int:
    """Return the line that sets ``name``, if a loop trains by the value that it has from an earlier pass.

    A line under a test may leave the old value. An environment, or another object that answers to the model
    in each step, gives this replica's data.
    """
    for loop, inner in itertools.zip_longest(loops, loops[1:]):
        tests = [x for x in of_kind(loop, ast.If) if not x.orelse]
        tested = {id(y) for x in tests for part in x.body for y in walked(part)}
        parts = [x for x in of_kind(loop, ast.Name, ast.Attribute) if dotted(x) == name]
        stored = [x for x in parts if isinstance(x.ctx, ast.Store) and id(x) not in tested]
        first, column = min(((x.lineno, x.col_offset) for x in stored), default=(0, 0))
        is_after = inner is not None and first > (inner.end_lineno or 0)
        sets = [value for _, names, value in assignments(loop) if name in names]
        if not is_after and all(map(measured.asks_others, sets)):
            continue
        for node in of_kind(loop, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr, ast.If):
            is_before = (node.lineno, node.col_offset) <= (first, column)
            if is_before and trains_by_value(loop, node, name):
                return first
    return 0


class _Measured:
    """``names``: those in ``loop`` that a call of a model, or a call with a model, gives or changes.

    ``gradients``: those that gradients give count too.
    """

    def __init__(self, loop: ast.stmt, values: dict[str, Any], gradients: bool = True) -> None:
        self.values = values
        self._gradients = gradients
        self.names: set[str] = set()
        size = -1
        while size != len(self.names):
            size = len(self.names)
            for node in walked(loop):
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                    if node.value is not None and self.measures(node.value):
                        # ``step = train(model, step)`` measures none of the whole numbers that it gets.
                        given = {x.id for x in of_kind(node.value, ast.Name)}
                        counts = {name for name in given if type(self.values.get(name)) is int}
                        self.names |= set(stores([node])) - counts
                        # So is a table into which it is put under a key that varies.
                        targets = node.targets if isinstance(node, ast.Assign) else []
                        tables = [x for x in targets if isinstance(x, ast.Subscript)]
                        varying = [x.value for x in tables if not isinstance(x.slice, ast.Constant)]
                        self.names |= {dotted(x) for x in varying} - {""}
                elif isinstance(node, ast.For) and self.measures(node.iter):
                    self.names |= set(stores([node.target]))
                elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                    self.names |= set(self._changed(node.value))
            self.names = made_from(loop, self.names, conditions=True) if self.names else set()
        self.names -= {name for name, x in values.items() if isinstance(x, torch.nn.Module)}

    def is_fed(self, call: ast.Call) -> bool:
        """Whether a call gets what is measured."""
        return any(map(self.measures, [*call.args, *(x.value for x in call.keywords)]))

    def measures(self, node: ast.AST) -> bool:
        """Whether an expression reads a measured name, or what a model gives."""
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            return self._gradients
        if isinstance(node, ast.Call):
            if called(node) == "len":
                return False
            if called(node) in MEASURES_GRADIENTS:
                return self._gradients
            if dotted(node.func) in _CLOCKS:
                return True
            if isinstance(node.func, ast.Attribute) and called(node) in _NO_MEASURE:
                # ``(model(x) == y).float()`` is a figure, and ``model.float()`` is none.
                return not self._is_model(node.func.value) and self.measures(node.func.value)
            function = function_of(callee(self.values, dotted(node.func)))
            if function is not None and _returns_figure(function):
                return True
            if self._is_model(node.func) or any(self._is_model(x) for x in node.args):
                return True
            if isinstance(node.func, ast.Attribute) and self._is_model(node.func.value):
                return True
        if isinstance(node, ast.Name):
            return node.id in self.names
        return any(self.measures(x) for x in ast.iter_child_nodes(node))

    def _changed(self, call: ast.Call) -> Iterator[str]:
        """Yield the name of a list, or of a user's object, that a statement gives what is measured."""
        root = call.func
        while isinstance(root, ast.Attribute):
            root = root.value
        given = [*call.args, *(x.value for x in call.keywords)]
        if isinstance(root, ast.Name) and any(map(self.measures, given)):
            kind: Any = type(self.values.get(root.id))
            is_users = root.id != "self" and bool(methods_of(kind))
            if issubclass(kind, _CONTAINERS) or is_users or root.id not in self.values:
                yield root.id

    def kept_weights(self, loops: list[LOOPS], place: str) -> str:
        """Say which copy of weights, as the pass of an outer loop begins with, an inner loop trains by."""

        def reads(node: ast.AST) -> bool:
            asked = [x.func for x in calls(node, *_WEIGHTS)]
            return any(self._is_model(x.value) for x in asked if isinstance(x, ast.Attribute))

        for outer, inner in itertools.pairwise(loops):
            within = set(walked(inner))
            heads = [x for x in of_kind(outer, ast.For) if reads(x.iter)]
            parts = set(stores([x.target for x in heads]))
            for statement, stored, value in assignments(outer):
                is_copy = calls(value, *_COPIES) and (reads(value) or names_read(value) & parts)
                for name in stored if is_copy and statement not in within else ():
                    if moves_training(inner, made_from(inner, {name})):
                        where = f"{place}:{value.lineno}"
                        return f"the training depends on {name}, in which {where} keeps weights"
        return ""

    def asks_others(self, node: ast.AST) -> bool:
        """Whether an expression calls something that is neither a model nor torch's."""
        roots = [dotted(x.func).partition(".")[0] for x in of_kind(node, ast.Call)]
        others = [x for x in map(self.values.get, roots) if x is not None]
        torchs = (torch.nn.Module, torch.Tensor)
        names = [getattr(x, "__name__", "") for x in others if not isinstance(x, torchs)]
        return any(x.partition(".")[0] != "torch" for x in names)

    def _is_model(self, node: ast.expr) -> bool:
        """Whether it is a model, or one in a Sequential, a list or a dict."""
        is_part = isinstance(node, ast.Subscript)
        value = value_of(self.values, dotted(node.value if isinstance(node, ast.Subscript) else node))
        parts = value.values() if isinstance(value, dict) else value
        if is_part and type(value) in (list, tuple, dict):
            return any(isinstance(x, torch.nn.Module) for x in parts)
        return isinstance(value, torch.nn.Module)


def _returns_figure(function: UserFunction) -> bool:
    """Whether a function without the model among its arguments returns what the model gives, or a time."""

    def asks(node: ast.AST) -> bool:
        names = [dotted(x.func) for x in of_kind(node, ast.Call)]
        values = [value_of(function.values, x) for x in names]
        return not _CLOCKS.isdisjoint(names) or any(isinstance(x, torch.nn.Module) for x in values)

    sets = [x for x in of_kind(function.node, ast.Assign, ast.AugAssign) if asks(x.value)]
    figures = made_from(function.node, set(stores(sets)))
    results = [x.value for x in of_kind(function.node, ast.Return) if x.value is not None]
    return any(names_read(x) & figures or asks(x) for x in results)
