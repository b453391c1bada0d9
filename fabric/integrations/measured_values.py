"""Finds what a script measures with its model and then trains or stops by, in the loops that are under way.

With ``--adopt`` and accelerate a replica that joins goes over the loop's past steps without computing. Its
counts of steps are right, and what it measures on the way is not. ``if v > best: bad += 1`` and
``if bad >= 3: break`` would therefore end its loop at another step than the others'. A loss that is weighed
by its own past would be another one, and so would the best weights that the loop keeps. The search goes
through the loops of the user's functions on the stack, before the first step. Tests for ``isnan`` and
``isfinite`` are left alone.
"""

import ast
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from fabric.client.loop.loop_flow import (
    MEASURES_GRADIENTS,
    called,
    carry,
    dotted,
    ends_by,
    kept_weights,
    made_from,
    moves_training,
    names_read,
    stores,
)
from fabric.client.loop.loop_source import changed_names
from fabric.client.loop.user_functions import (
    UserFunction,
    callee,
    function_of,
    kept_by_loop,
    loops_around,
    methods_of,
    search,
    tree_of,
    value_of,
)

Loop = ast.For | ast.AsyncFor | ast.While
_CONTAINERS = (list, dict, set, deque)
_CLOCKS = {"time.time", "time.monotonic", "time.perf_counter", "monotonic", "perf_counter"}
_CLOCKS |= {"datetime.now", "datetime.datetime.now"}
# Methods of a model that measure nothing.
_NO_MEASURE = {
    *("train", "eval", "to", "cuda", "cpu", "half", "float", "bfloat16", "requires_grad_", "zero_grad"),
    *("parameters", "named_parameters", "modules", "named_modules", "buffers", "children", "apply"),
    *("state_dict", "load_state_dict", "register_forward_hook"),
}


@search("")
def measured_value(frame: FrameType | None, shared: Iterable[object] = ()) -> str:
    """Return the first half of a sentence about a measured value that ends or steers a loop, or "".

    ``shared``: objects of the shared state, which may keep what they like.
    """
    held = {id(x) for x in shared}
    for inner, loops in loops_around(frame):
        values, place = {**inner.f_globals, **inner.f_locals}, Path(inner.f_code.co_filename).name
        measured = _Measured(loops[0], values)
        kept = kept_by_loop(loops[0], values, held, measured.is_fed)
        if kept:
            return f"the training depends on {kept}"
        text = _in_loops(tree_of(inner), loops, measured, place)
        if text:
            return text
    return ""


def _in_loops(tree: ast.AST | None, loops: list[Loop], measured: "_Measured", place: str) -> str:
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
        at = _trains_by_past(loops, name)
        if at:
            return f"the training depends on {name}, which {place}:{at} measures for the next pass"
    for name, at in kept_weights(tree, loops[0], sources) if tree is not None else ():
        return f"{name} at {place}:{at} keeps the weights that measure best"
    return ""


def _trains_by_past(loops: list[Loop], name: str) -> int:
    """Return the line that measures ``name`` after the loop over the batches that trains by it, or 0."""
    if len(loops) < 2:
        return 0
    inner = loops[1]
    parts = [x for x in ast.walk(loops[0]) if isinstance(x, ast.Name | ast.Attribute)]
    first = min((x.lineno for x in parts if isinstance(x.ctx, ast.Store) and dotted(x) == name), default=0)
    if first <= (inner.end_lineno or 0):
        return 0
    for node in ast.walk(inner):
        if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr) and name in names_read(
            node
        ):
            made = made_from(inner, set(stores([node])))
            if moves_training(node, {name}) or (made and moves_training(inner, made)):
                return first
    return 0


class _Measured:
    """``names``: those in ``loop`` that a call of a model, or a call with a model, gives or changes."""

    def __init__(self, loop: ast.stmt, values: dict[str, Any]) -> None:
        self._values = values
        self.names: set[str] = set()
        size = -1
        while size != len(self.names):
            size = len(self.names)
            for node in ast.walk(loop):
                if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                    if node.value is not None and self.measures(node.value):
                        # ``step = train(model, step)`` measures none of the whole numbers that it gets.
                        given = {x.id for x in ast.walk(node.value) if isinstance(x, ast.Name)}
                        counts = {name for name in given if type(self._values.get(name)) is int}
                        self.names |= set(stores([node])) - counts
                        self.names |= set(_tables(node))
                elif isinstance(node, ast.For) and self.measures(node.iter):
                    self.names |= set(stores([node.target]))
                elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                    self.names |= set(self._changed(node.value, loop))
            self.names = made_from(loop, self.names, conditions=True) if self.names else set()
        self.names -= {name for name, x in values.items() if isinstance(x, torch.nn.Module)}

    def is_fed(self, call: ast.Call) -> bool:
        """Whether a call gets what is measured."""
        return any(map(self.measures, [*call.args, *(x.value for x in call.keywords)]))

    def measures(self, node: ast.AST) -> bool:
        """Whether an expression reads a measured name, or what a model gives."""
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            return True
        if isinstance(node, ast.Call):
            if called(node) == "len":
                return False
            if called(node) in MEASURES_GRADIENTS or dotted(node.func) in _CLOCKS:
                return True
            if isinstance(node.func, ast.Attribute) and called(node) in _NO_MEASURE:
                # ``(model(x) == y).float()`` is a figure, and ``model.float()`` is none.
                return not self._is_model(node.func.value) and self.measures(node.func.value)
            function = function_of(callee(self._values, dotted(node.func)))
            if function is not None and _returns_figure(function):
                return True
            if self._is_model(node.func) or any(self._is_model(x) for x in node.args):
                return True
            if isinstance(node.func, ast.Attribute) and self._is_model(node.func.value):
                return True
        if isinstance(node, ast.Name):
            return node.id in self.names
        return any(self.measures(x) for x in ast.iter_child_nodes(node))

    def _changed(self, call: ast.Call, loop: ast.stmt) -> Iterator[str]:
        """Yield the name of a list, or of a user's object, that a statement gives what is measured."""
        root = call.func
        while isinstance(root, ast.Attribute):
            root = root.value
        given = [*call.args, *(x.value for x in call.keywords)]
        if isinstance(root, ast.Name) and any(map(self.measures, given)):
            kind: Any = type(self._values.get(root.id))
            is_users = root.id != "self" and bool(methods_of(kind))
            if issubclass(kind, _CONTAINERS) or is_users or _is_list(root.id, loop):
                yield root.id

    def _is_model(self, node: ast.expr) -> bool:
        return isinstance(value_of(self._values, dotted(node)), torch.nn.Module)


def _returns_figure(function: UserFunction) -> bool:
    """Whether a function without the model among its arguments returns what the model gives."""

    def asks(node: ast.AST) -> bool:
        calls = [x for x in ast.walk(node) if isinstance(x, ast.Call)]
        return any(isinstance(value_of(function.values, dotted(x.func)), torch.nn.Module) for x in calls)

    sets = [x for x in ast.walk(function.node) if isinstance(x, ast.Assign | ast.AugAssign) and asks(x.value)]
    figures = made_from(function.node, set(stores(sets)))
    results = [x.value for x in ast.walk(function.node) if isinstance(x, ast.Return) and x.value is not None]
    return any(names_read(x) & figures or asks(x) for x in results)


def _tables(node: ast.AST) -> Iterator[str]:
    """Yield the names of tables into which an assignment puts a value under a key that varies."""
    for target in node.targets if isinstance(node, ast.Assign) else ():
        if isinstance(target, ast.Subscript) and not isinstance(target.slice, ast.Constant):
            yield from [dotted(target.value)] if dotted(target.value) else []


def _is_list(name: str, loop: ast.stmt) -> bool:
    """Whether the loop sets a name to a new list, dict or set."""
    return any(
        isinstance(x, ast.Assign)
        and isinstance(x.value, ast.List | ast.Dict | ast.Set)
        and any(isinstance(y, ast.Name) and y.id == name for y in x.targets)
        for x in ast.walk(loop)
    )
