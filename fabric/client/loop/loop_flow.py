"""Follows the names of a loop: those made from their own old value, and those it trains with or ends by."""

import ast
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Set
from typing import Any

SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
COMPREHENSIONS = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp
LOOPS = ast.For | ast.AsyncFor | ast.While
_ASSIGNMENTS = ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr
# Methods that give a value in another place, type or mode.
_CONVERTS = {"to", "cuda", "cpu", "float", "half", "double", "bfloat16"}
_CONVERTS |= {"contiguous", "detach", "train", "eval"}
_OF_GROUPS = {"lr", "momentum", "weight_decay", "betas", "eps"}
GROWS = {"append", "appendleft", "extend", "extendleft", "insert"}
CLIPS = {"clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "clip_gradients"}
_ADDS = {"add_", "sub_", "copy_"}  # to a gradient: the sum over micro-batches stays a sum
MEASURES_GRADIENTS = {*CLIPS, "get_total_norm"}
_ORDERS = ast.Lt | ast.LtE | ast.Gt | ast.GtE
_OF_HEALTH = {"isnan", "isinf", "isfinite"}  # a loop that ends by such a test ends with its job


@functools.lru_cache(maxsize=50_000)
def walked(node: ast.AST) -> tuple[ast.AST, ...]:
    """Return the parts of a node with the node itself. Each node is walked once."""
    return tuple(ast.walk(node))


def of_kind(node: ast.AST, *kinds: type[ast.AST]) -> list[Any]:
    """Return the parts of these kinds."""
    return [x for x in walked(node) if isinstance(x, kinds)]


def calls(node: ast.AST, *names: str) -> list[ast.Call]:
    """Return the calls in a node whose last name is one of these."""
    return [x for x in of_kind(node, ast.Call) if called(x) in names]


def carry(statements: Iterable[ast.stmt], fresh: set[str], carried: dict[str, int]) -> set[str]:
    """Add the names that these statements make from their own old value. Return the names that may have a
    value of this step after them. ``fresh``: those that may have one before.
    """
    fresh = set(fresh)
    for node in statements:
        if isinstance(node, SCOPES):
            continue
        if isinstance(node, ast.If):
            orders = of_kind(node.test, ast.Compare)
            orders = [x for x in orders if any(isinstance(op, _ORDERS) for op in x.ops)]
            compared = {name for x in orders for name in names_read(x)}
            for name in (compared & set(stores([*node.body, *node.orelse]))) - fresh:
                carried.setdefault(name, node.lineno)  # ``if value < best: best = value``
            fresh = carry(node.body, fresh, carried) | carry(node.orelse, fresh, carried)
        elif isinstance(node, LOOPS):
            inner = set(stores([node.target])) if not isinstance(node, ast.While) else set()
            fresh = carry([*node.body, *node.orelse], fresh | inner, carried)
        elif isinstance(node, ast.With | ast.AsyncWith):
            fresh = carry(node.body, fresh | set(stores(node.items)), carried)
        elif isinstance(node, ast.Try | ast.TryStar):
            handled = [x for handler in node.handlers for x in handler.body]
            fresh = carry([*node.body, *handled, *node.orelse, *node.finalbody], fresh, carried)
        elif isinstance(node, ast.Match):
            fresh = fresh.union(
                *(carry(x.body, fresh | set(stores([x.pattern])), carried) for x in node.cases)
            )
        elif not _is_converted(node):
            stored = set(stores([node]))
            old = stored if isinstance(node, ast.AugAssign) else stored & names_read(node)
            for name in old - fresh:
                root, *path = name.split(".")
                if "grad" not in path and (not path or root not in fresh):  # gradients are those of the job
                    carried.setdefault(name, node.lineno)
            fresh |= stored - old
    return fresh


def _is_converted(node: ast.stmt) -> bool:
    """Whether a name gets its own value in another place or type, as in ``weights = weights.to(device)``."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return False
    value = node.value
    while (
        isinstance(value, ast.Call) and called(value) in _CONVERTS and isinstance(value.func, ast.Attribute)
    ):
        value = value.func.value
    return bool(dotted(value)) and dotted(node.targets[0]) == dotted(value)


def loops_at(tree: ast.AST, line: int) -> list[ast.For | ast.AsyncFor | ast.While]:
    """Return the loops around a line within its function, the outermost first."""
    statements = of_kind(tree, ast.stmt)
    around = [x for x in statements if x.lineno <= line <= (x.end_lineno or 0)]
    functions = [x for x in around if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)]
    begin = functions[-1].lineno if functions else 0
    return [x for x in around if isinstance(x, LOOPS) and x.lineno > begin]


def made_from(loop: ast.AST, sources: set[str], conditions: bool = False, parts: bool = False) -> set[str]:
    """Return ``sources`` and what the loop makes from them, with ``conditions`` also under a test of them.

    ``parts``: a thing is made from what is put into a part of it.
    """
    made, size, nodes = set(sources), 0, list(walked(loop))
    branches = ast.If | ast.While if parts else ast.If
    while size != len(made):
        size = len(made)
        for node in nodes:
            if isinstance(node, _ASSIGNMENTS):
                if node.value is not None and names_read(node.value) & made:
                    made |= set(stores([node]))
            elif isinstance(node, ast.For | ast.AsyncFor) and names_read(node.iter) & made:
                made |= set(stores([node.target]))
            elif conditions and isinstance(node, branches) and names_read(node.test) & made:
                body = [x for x in (*node.body, *node.orelse) if not (parts and _clears(x))]
                made |= set(stores(body))
                inside = [x for part in body for x in walked(part)]
                made |= {name for x in inside for name, _ in _put_into(x)} if parts else set()
            if parts:
                made |= {name for name, given in _put_into(node) if given & made}
    return made - {""}


def pairs(target: ast.expr, given: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets of a loop with what each goes over, as of zip and enumerate."""
    if not isinstance(given, ast.Call) or called(given) not in ("enumerate", "zip"):
        return [(target, given)]
    sources = given.args if called(given) == "zip" else [ast.Constant(0), *given.args]
    return list(zip(getattr(target, "elts", ()), sources, strict=False))


def assignments(node: ast.AST) -> Iterator[tuple[ast.AST, set[str], ast.expr]]:
    """Yield each assignment in a node with the names that it sets, and its value.

    Where it sets a part of a list, dict or tensor, it sets this one.
    """
    for x in walked(node):
        if isinstance(x, _ASSIGNMENTS) and x.value is not None:
            targets = x.targets if isinstance(x, ast.Assign) else [x.target]
            parts = [y for target in targets for y in of_kind(target, ast.Subscript)]
            held = {dotted(y.value) for y in parts if isinstance(y.ctx, ast.Store)} - {""}
            yield x, {*stores(targets), *held}, x.value


def moves_training(loop: ast.AST, made: set[str]) -> bool:
    """Return whether the loop trains by one of the names.

    A loss, a gradient, a limit for the gradient or a value of the optimizer's groups is made from it, or a
    test of it sets such a value or loads weights.
    """
    for node in walked(loop):
        if isinstance(node, ast.Call) and called(node) == "backward" and names_read(node) & made:
            return True
        if isinstance(node, ast.Call | ast.Assign | ast.AugAssign):
            given: list[ast.AST] = [*node.keywords] if isinstance(node, ast.Call) else [node.value]
            if sets_rate(node) and any(names_read(x) & made for x in given):
                return True
        if any(names_read(x) & made for x in gradient_sources(node)):
            return True
        is_tested = isinstance(node, ast.If) and names_read(node.test) & made
        if is_tested and (calls(node, "load_state_dict") or any(map(sets_rate, walked(node)))):
            return True
    return False


def trains_by_value(loop: ast.AST, node: ast.AST, name: str) -> bool:
    """Return whether a loop trains by the value of a name that its statement ``node``, or a test, reads."""
    if name not in names_read(node.test if isinstance(node, ast.If) else node):
        return False
    made = set(stores(node.body if isinstance(node, ast.If) else [node]))
    return moves_training(node, {name}) or bool(made and moves_training(loop, made_from(loop, made)))


def gradient_sources(node: ast.AST) -> list[ast.expr]:
    """Return what a node writes into a ``.grad``, or by what it limits gradients."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return [node.value] if any(map(_in_gradient, targets)) else []
    if not isinstance(node, ast.Call):
        return []
    given = [*node.args, *(x.value for x in node.keywords)]
    if called(node) in CLIPS:
        return given[1:]  # the first are the parameters
    is_in_place = called(node).endswith("_") and isinstance(node.func, ast.Attribute)
    return given if is_in_place and _in_gradient(node.func) else []


def early_change(inner: ast.AST, but: Container[ast.AST] = ()) -> int:
    """Return the line at which a loop over micro-batches clips or scales what they have added up, or 0.

    ``but``: nodes that do not count.
    """
    nodes: list[ast.expr | ast.stmt] = [x for x in of_kind(inner, ast.expr, ast.stmt) if x not in but]
    loops = [x for x in nodes if isinstance(x, ast.For) and "param" in ast.unparse(x.iter)]
    parameters = {name for x in loops for name in stores([x.target])}
    for node in nodes:
        if isinstance(node, ast.Call) and called(node) in {*CLIPS, "unscale_"}:
            return node.lineno
        if isinstance(node, ast.AugAssign) and not isinstance(node.op, ast.Add | ast.Sub):
            changed: ast.expr = node.target
        elif isinstance(node, ast.Call) and gradient_sources(node) and called(node) not in _ADDS:
            changed = node.func
        else:
            continue
        if _in_gradient(changed) and {x.id for x in of_kind(changed, ast.Name)} & parameters:
            return node.lineno
    return 0


def _in_gradient(node: ast.expr) -> bool:
    while isinstance(node, ast.Subscript | ast.Attribute):
        if isinstance(node, ast.Attribute) and node.attr == "grad":
            return True
        node = node.value
    return False


def kept_weights(tree: ast.AST, loop: ast.stmt, names: set[str]) -> Iterator[tuple[str, int]]:
    """Yield the names that get a copy of weights under a test of ``names``, and that the script loads."""
    loads = calls(tree, "load_state_dict")
    loaded = {name for call in loads for x in call.args for name in names_read(x)}
    for test in of_kind(loop, ast.If):
        if names_read(test.test) & names:
            for node in (y for part in test.body for y in of_kind(part, ast.Assign)):
                if calls(node.value, "state_dict"):
                    yield from ((name, node.lineno) for name in stores([node]) if name in loaded)


def sets_rate(node: ast.AST) -> bool:
    """Return whether a node sets a value of an optimizer's groups, or the base rates of a scheduler."""
    if isinstance(node, ast.Call):  # group.update(lr=...)
        return called(node) == "update" and any(x.arg in _OF_GROUPS for x in node.keywords)
    if not isinstance(node, ast.Assign | ast.AugAssign):
        return False
    targets = node.targets if isinstance(node, ast.Assign) else [node.target]
    keys = [getattr(x.slice, "value", "") for x in targets if isinstance(x, ast.Subscript)]
    return any(x in _OF_GROUPS for x in keys) or any(getattr(x, "attr", "") == "base_lrs" for x in targets)


def ends_by(
    loops: Iterable[ast.stmt], made: set[str], judges: Callable[[ast.expr], bool] = lambda _: False
) -> int:
    """Return the line of a test of these names by which one of the nested ``loops`` ends, or 0.

    ``judges``: whether a test counts that reads none of the names.
    """
    for loop in loops:
        if isinstance(loop, ast.While) and (names_read(loop.test) & made or judges(loop.test)):
            return loop.lineno
        for node, is_own in inside(loop):
            if not isinstance(node, ast.If) or not (names_read(node.test) & made or judges(node.test)):
                continue
            if asks_for_health(node.test):
                continue
            for end, is_of_if in inside(node):
                if isinstance(end, ast.Return) or (is_own and is_of_if and isinstance(end, ast.Break)):
                    return node.lineno
    return 0


def asks_for_health(test: ast.expr) -> bool:
    return bool(calls(test, *_OF_HEALTH))


def inside(node: ast.AST, is_own: bool = True) -> Iterator[tuple[ast.AST, bool]]:
    """Yield the nodes of a statement, and whether a ``break`` there would end the statement's own loop."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, SCOPES):
            yield child, is_own
            yield from inside(child, is_own and not isinstance(child, LOOPS))


def _put_into(node: ast.AST) -> Iterator[tuple[str, Set[str]]]:
    """Yield each thing into which a statement puts something, with the names that it reads for that."""
    if isinstance(node, ast.Assign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            if isinstance(target, ast.Subscript):
                yield holder(target), names_read(node.value) | names_read(target.slice)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        name = node.func.attr
        is_change = name in (*GROWS, "update", "add") or (name.endswith("_") and not name.endswith("__"))
        if is_change and (name := holder(node.func.value)) not in ("self", "cls"):
            yield name, {x for part in (*node.args, *node.keywords) for x in names_read(part)}


def _clears(node: ast.stmt) -> bool:
    """Whether a statement empties a cache: ``self.cache = {}``."""
    return isinstance(node, ast.Assign) and ast.unparse(node.value) in ("{}", "[]", "None", "dict()")


def holder(node: ast.expr) -> str:
    """Return the name in which ``weights[i].data`` or ``weights.detach()`` lies."""
    while isinstance(node, ast.Subscript | ast.Attribute | ast.Call):
        if isinstance(node, ast.Call) and called(node) == "detach" and isinstance(node.func, ast.Attribute):
            node = node.func.value
        elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "data"):
            node = node.value
        else:
            break
    return dotted(node)


@functools.lru_cache(maxsize=50_000)
def names_read(node: ast.AST) -> frozenset[str]:
    """Return the names that a node reads or deletes, and attributes as ``self.count``."""
    read = [x for x in walked(node) if isinstance(x, ast.Name | ast.Attribute)]
    return frozenset(dotted(x) for x in read if not isinstance(x.ctx, ast.Store)) - {""}


def dotted(node: ast.expr) -> str:
    """Return a name, or an attribute's path as ``self.count``; empty for another expression."""
    if isinstance(node, ast.Name):
        return node.id
    held = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{held}.{node.attr}" if isinstance(node, ast.Attribute) and held else ""


def called(call: ast.Call) -> str:
    """Return the last name of what is called."""
    return call.func.id if isinstance(call.func, ast.Name) else getattr(call.func, "attr", "")


def stores(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield the names that ``nodes`` set in their own scope, and attributes as ``self.count``."""
    for node in nodes:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield from [dotted(node)] if dotted(node) else []
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).partition(".")[0]
        elif isinstance(node, ast.MatchMapping) and node.rest:
            yield node.rest
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name
        if isinstance(node, COMPREHENSIONS):
            yield from (x.target.id for x in of_kind(node, ast.NamedExpr))
        elif isinstance(node, ast.AnnAssign) and node.value is None:
            continue
        elif not isinstance(node, SCOPES):
            yield from stores(ast.iter_child_nodes(node))
