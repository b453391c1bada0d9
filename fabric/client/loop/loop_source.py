"""Reads the source of a loop of your own at the first ``session.steps``, for what would go wrong later.

``for batch in step: loss = ...`` followed by ``print(loss)`` raises NameError in a joining replica's first
step, hours after the job began. ``count += 1`` in the loop begins at another value there, and a loss that
depends on the count differs from the others' without an error. The search names what is certain, and says
nothing where it cannot know.
"""

import ast
import builtins
import inspect
import linecache
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch

from fabric.client.gradients.bucket_stream import changed_early
from fabric.client.loop.loop_flow import (
    COMPREHENSIONS,
    LOOPS,
    SCOPES,
    asks_for_health,
    called,
    carry,
    dotted,
    early_change,
    holder,
    inside,
    kept_weights,
    loads_weights,
    loops_at,
    made_from,
    moves_training,
    names_read,
    stores,
)
from fabric.client.loop.user_functions import (
    RunningSource,
    attributes_of,
    callee,
    changed_in_place,
    drawn_from,
    function_of,
    kept_by_calls,
    kept_by_loop,
    methods_of,
    parsed,
    search,
    steers_forward,
    steers_update,
    tree_of,
    value_of,
)
from fabric.errors import ConfigError

_EXITS = ast.Continue | ast.Break | ast.Return | ast.Raise
_PLAIN_USES = {"number", "skipped"}  # attributes of a step that are the same with and without micro-batches
_COUNTS = {"number", "committed_step"}
_OF_FABRIC = {"backward", "metrics", "add_weight"}  # calls in the inner loop after which no test can ask
_SHARED = {"number", "committed_step", "metrics"}  # attributes that are equal on all replicas
_COLLECTIVES = {"all_reduce", "all_gather", "broadcast", "all_gather_object", "all_gather_into_tensor"}
_DRAWS = {"rand", "randn", "randint", "randperm", "normal", "rand_like", "randn_like", "standard_normal"}
_PARTS = {"parameters", "named_parameters", "buffers", "named_buffers", "state_dict"}
_OVERWRITES = {"zero_", "fill_", "copy_", "normal_", "uniform_", "random_", "bernoulli_"}
_KEEP = {"requires_grad_", "share_memory_", "detach_"}  # the values
_LOOKUPS = {"locals", "globals", "vars", "dir", "hasattr"}
# They yield no item that their argument does not yield.
_PASS_ON = {"enumerate", "tqdm", "iter", "islice", "track"}
_PASS_ON_INNER = _PASS_ON | {"zip", "map", "filter"}
_CATCHES = {"NameError", "UnboundLocalError", "Exception", "BaseException"}


@search(None)
def check_source(frame: FrameType | None, shared: Iterable[object]) -> None:
    """Raise ConfigError for what a joining replica cannot do alike in the loop around ``session.steps``.

    ``frame``: that of ``steps`` itself. Generators that only pass steps on, as tqdm does, are left out.
    ``shared``: the objects of the shared state, whose attributes are equal on all replicas.
    """
    caller = frame.f_back if frame is not None else None
    while caller is not None:
        code = caller.f_code
        source = "".join(linecache.getlines(code.co_filename, caller.f_globals))
        if code.co_flags & inspect.CO_GENERATOR and _passes_on(source, caller.f_lineno):
            caller = caller.f_back
            continue
        tree, loop = _loop_at(source, caller.f_lineno)
        if tree is None or loop is None:
            return
        here, shared = RunningSource.of(caller, loop), list(shared)
        bound = {*caller.f_globals, *dir(builtins)} - {*code.co_varnames, *code.co_cellvars}
        for name, line in unbound_names(source, caller.f_lineno, bound | set(caller.f_locals)):
            raise ConfigError(
                f"{here.file}:{line} reads {name}, which only the loop over the "
                "micro-batches sets, and a joining replica's first step has no micro-batches: use "
                f"step.metrics, set {name} before the loops, or read it under `if step.contributed:`"
            )
        _refuse(here, carried_names(source, caller.f_lineno), shared)
        _refuse_kept(here, tree, loop, shared)
        return


@search(None)
def check_exchange_loop(frame: FrameType | None, shared: Iterable[object]) -> None:
    """Raise ConfigError for a name that the loops around a call of ``session.exchange`` carry, see above."""
    caller = frame.f_back if frame is not None else None
    if caller is None:
        return
    tree = tree_of(caller)
    loops = loops_at(tree, caller.f_lineno) if tree is not None else []
    if tree is not None and loops:
        carried: dict[str, int] = {}
        carry(loops[:1], set(), carried)
        here = RunningSource.of(caller, loops[0])
        _refuse(here, _that_train(tree, loops, carried), shared)
        for loader in (here.values.get(name) for name in names_read(loops[0])):
            if isinstance(loader, torch.utils.data.DataLoader):
                refuse_memory(loader.collate_fn, loader.dataset)


@search(None)
def refuse_memory(collate: object, dataset: object) -> None:
    """Raise ConfigError for a data set or collate function whose samples depend on its earlier calls."""
    # An adapter's own collate function holds the user's.
    kept = kept_by_calls([collate, getattr(collate, "collate_fn", None), dataset])
    if kept:
        raise ConfigError(
            f"the data depend on {kept}, and each replica makes other calls: make it from a sample's index "
            "or from its content"
        )


def _refuse(here: RunningSource, names: Iterable[tuple[str, int]], shared: Iterable[object]) -> None:
    held = {id(x) for x in shared if not isinstance(x, torch.nn.Module)}
    for name, line in names:
        thing, _, rest = name.partition(".")
        value = here.values.get(thing)
        while rest and id(value) not in held and rest not in getattr(value, "_buffers", {}):
            thing, _, rest = rest.partition(".")
            value = getattr(value, "__dict__", {}).get(thing)
        if not rest:
            raise ConfigError(
                f"the training depends on {name}, which {here.file}:{line} carries from step to step, and a "
                f"replica that joins begins with another {name}: make it from session.committed_step, or "
                "keep it in a dict that attach(..., state=) names"
            )


def _refuse_kept(here: RunningSource, tree: ast.AST, loop: ast.For, shared: Sequence[Any]) -> None:
    """Raise ConfigError for what the loop trains by and keeps in place, or a function that it calls."""
    values, step = here.values, _step_name(loop.target, loop.iter)
    if not step:
        return
    for inner in (x for x in ast.walk(loop) if isinstance(x, ast.For) and _iterates(x.iter, step)):
        if line := early_change(inner):
            raise changed_early(f"{here.file}:{line} changes gradients")
    _refuse_judged(here, tree, loop, shared)
    for name, line in _numbers(loop, step).items():
        made = made_from(loop, {name}, parts=True)
        chooses = _chooses_batches(loop, made)
        if chooses or moves_training(loop, made):
            advice = "choose by step.number" if chooses else "put it into the data set of session.loader"
            raise ConfigError(
                f"the training depends on {name} ({here.file}:{line}), which goes by the micro-batches of "
                f"one replica, and replicas have different ones: {advice}"
            )
    for name, line in _local_steering(tree, loop, step, values):
        raise ConfigError(
            f"the update depends on {name} ({here.file}:{line}), which goes by the micro-batches of one "
            "replica, and replicas have different ones: add it up by session.metrics, and read step.metrics "
            "after the micro-batches"
        )
    parts = list(_shared_parts(shared))
    held, memory = {id(x) for x in parts}, {x.data_ptr() for x in parts if isinstance(x, torch.Tensor)}
    for name, line in _that_train(tree, [loop], {**changed_names(loop), **moved_names(loop, values)}):
        value = value_of(values, name)
        path = name.split(".")
        is_shared = any(id(value_of(values, ".".join(path[: i + 1]))) in held for i in range(len(path)))
        tensors = [*value.parameters(), *value.buffers()] if isinstance(value, torch.nn.Module) else [value]
        is_shared = is_shared or any(isinstance(x, torch.Tensor) and x.data_ptr() in memory for x in tensors)
        if isinstance(value, Iterator):
            raise ConfigError(
                f"the training reads {name}, an iterator that {here.file}:{line} moves on, and each replica "
                "moves its own: put what it gives into the data set of session.loader"
            )
        is_kept = isinstance(value, torch.Tensor | np.ndarray | list | dict | deque | torch.nn.Module)
        if (is_kept or (value is None and name in values)) and not is_shared:
            raise ConfigError(
                f"the training depends on {name}, which {here.file}:{line} changes from step to step, and "
                "each replica changes its own: make it from the batch, or from step.metrics and keep it in a "
                "dict that attach(..., state=) names"
            )
    _refuse_later(here, loop, shared)
    held |= {id(y) for x in shared if isinstance(x, torch.nn.Module) for y in x.modules()}
    kept = kept_by_loop(loop, values, held)
    if kept:
        raise ConfigError(
            f"the training depends on {kept}, and each replica makes other calls: make it from "
            "session.committed_step or from the batch, or keep it in an object of attach(..., state=)"
        )


def _refuse_judged(here: RunningSource, tree: ast.AST, loop: ast.For, shared: Sequence[Any]) -> None:
    """Raise ConfigError for carried names that change a module or choose the weights to keep."""
    carried = _own(tree, _carried(loop, _step_name(loop.target, loop.iter)))
    for name, line in carried.items():
        owner, _, attribute = name.rpartition(".")
        module = value_of(here.values, owner) if owner else None
        if isinstance(module, torch.nn.Module) and steers_forward(module, attribute):
            _refuse(here, [(name, line)], shared)
        thing = value_of(here.values, owner) if owner else None
        calls = {dotted(x.func) for x in ast.walk(loop) if isinstance(x, ast.Call)}
        readers = {x: function_of(callee(here.values, x)) for x in calls - {""}}
        read = {
            x
            for x, method in readers.items()
            if method and method.thing is thing and f"{method.me}.{attribute}" in names_read(method.node)
        }
        if thing is not None and moves_training(loop, made_from(loop, read)):
            _refuse(here, [(name, line)], shared)
        for kept, at in kept_weights(tree, loop, {name}):
            raise ConfigError(
                f"{kept} at {here.file}:{at} keeps weights by {name}, and a replica that joins has another "
                f"{name}: save the weights in a file where session.is_writer is true, and keep {name} in a "
                "dict that attach(..., state=) names"
            )


def changed_names(loop: ast.stmt) -> dict[str, int]:
    """Return the names that the loop does not set and whose content it changes, with the line.

    Content that is written before it is read carries nothing, and a cache is filled where a test asks for it.
    """
    nodes = list(ast.walk(loop))
    tests = [x for x in nodes if isinstance(x, ast.If | ast.IfExp)]
    caches = [x for x in tests if any(isinstance(y, ast.In | ast.NotIn | ast.Is) for y in ast.walk(x.test))]
    # One that draws its item in a micro-batch has other items on each replica.
    caches = [
        x for x in caches if not any(isinstance(y, ast.Call) and called(y) in _DRAWS for y in ast.walk(x))
    ]
    left_out = {id(y) for x in caches for y in ast.walk(x)}
    names = changed_in_place(loop)
    for put in sorted((x for x in nodes if isinstance(x, ast.Assign)), key=lambda x: x.lineno):
        for target in (x for x in put.targets if isinstance(x, ast.Subscript) and id(put) not in left_out):
            left_out |= {id(x) for x in ast.walk(target)}
            reads = [x for x in nodes if isinstance(x, ast.expr) and id(x) not in left_out]
            if any(dotted(x) == dotted(target.value) != "" and x.lineno < put.lineno for x in reads):
                names.setdefault(dotted(target.value), put.lineno)
    # Only a first step sets what stands under ``if average is None:``.
    begins = [x for x in tests if isinstance(x, ast.If) and isinstance(x.test, ast.Compare)]
    once = Counter(stores(y for x in begins if "is None" in ast.unparse(x.test) for y in x.body))
    fresh = {name for name, count in Counter(stores([loop])).items() if count > once[name]}
    calls = [x for x in nodes if isinstance(x, ast.Call)]
    clearing = [x.func for x in calls if called(x) == "clear"]
    emptied = {dotted(x.value) for x in clearing if isinstance(x, ast.Attribute)}
    return {x: at for x, at in names.items() if x not in emptied and not {x, x.partition(".")[0]} & fresh}


def moved_names(loop: ast.stmt, values: Mapping[str, Any]) -> dict[str, int]:
    """Return the tensors, and modules with parameters, that torch's methods change in place, with the line.

    A tensor that a method overwrites carries nothing. A network into which another one is copied does, unless
    each step does so before it reads the network.
    """
    nodes, of = list(ast.walk(loop)), dict[str, str]()
    for inner in (x for x in nodes if isinstance(x, ast.For)):
        for target, source in _pairs(inner):
            name = _owner(source)
            of |= dict.fromkeys(stores([target]), name) if name else {}
    calls = [x for x in nodes if isinstance(x, ast.Call) and called(x).endswith("_")]
    changes = [(x.func.value, called(x), x.lineno) for x in calls if isinstance(x.func, ast.Attribute)]
    changes += [(x.target, "", x.lineno) for x in nodes if isinstance(x, ast.AugAssign)]
    data = [x for y in nodes if isinstance(y, ast.Assign) for x in y.targets if isinstance(x, ast.Attribute)]
    changes += [(x, "copy_", x.lineno) for x in data if x.attr == "data"]
    written, moved = set[str](), dict[str, int]()
    for target, method, line in changes:
        name = of.get(held := holder(target), held)
        is_tensor, is_part = isinstance(value_of(values, name), torch.Tensor), held in of
        while is_tensor and isinstance(value_of(values, owner := name.rpartition(".")[0]), torch.nn.Module):
            name, is_part = owner, True
        is_copied = method == "copy_" and is_part and not _fills_first(loop, line, name)
        if method in _OVERWRITES and not is_copied:
            written.add(name)
        elif method not in _KEEP and (is_tensor or held in of):
            moved.setdefault(name, line)
    return {name: line for name, line in moved.items() if name not in {*written, *stores([loop])}}


def _pairs(inner: ast.For) -> list[tuple[ast.expr, ast.expr]]:
    """Return the targets of a loop with what each goes over, as of zip and enumerate."""
    call, parts = inner.iter, getattr(inner.target, "elts", ())
    if not isinstance(call, ast.Call) or called(call) not in ("enumerate", "zip"):
        return [(inner.target, call)]
    given = call.args if called(call) == "zip" else [ast.Constant(0), *call.args]
    return list(zip(parts, given, strict=False))


def _owner(source: ast.expr) -> str:
    """Return the name of the module whose parameters, buffers or state these are; empty for other things."""
    while isinstance(source, ast.Call) and called(source) in ("list", "tuple", "items", "values"):
        source = (
            source.func.value if isinstance(source.func, ast.Attribute) else [*source.args, source.func][0]
        )
    owner, _, method = dotted(getattr(source, "func", source)).rpartition(".")
    return owner if method in _PARTS else ""


def _fills_first(loop: ast.stmt, line: int, name: str) -> bool:
    """Whether each step goes through ``line`` before another statement reads ``name``."""
    body: list[ast.stmt] = getattr(loop, "body", [])
    before = [x for x in body if x.lineno <= line]
    is_sure = bool(before) and not isinstance(before[-1], ast.If | ast.While | ast.Try)
    return is_sure and not any(name in names_read(x) for x in before[:-1])


def _numbers(loop: ast.For, step: str) -> dict[str, int]:
    """Return the names that a loop over the micro-batches gets beside them: an index, another iterable."""
    names: dict[str, int] = {}
    for inner in (x for x in ast.walk(loop) if isinstance(x, ast.For)):
        pairs = _pairs(inner) if _iterates(inner.iter, step) else []
        for target, source in pairs if len(pairs) > 1 else ():
            names |= {} if _iterates(source, step) else dict.fromkeys(stores([target]), inner.lineno)
    return names


def _local_steering(
    tree: ast.AST, loop: ast.For, step: str, values: Mapping[str, Any]
) -> Iterator[tuple[str, int]]:
    """Yield each name that the micro-batches set, and the line of an update or an end that goes by it."""
    inner = [x for x in ast.walk(loop) if isinstance(x, ast.For) and _iterates(x.iter, step)]
    parts = [part for x in inner for part in (x.target, *x.body)]
    within = {id(x) for part in parts for x in ast.walk(part)}
    calls = [x for x in ast.walk(loop) if isinstance(x, ast.Call)]
    if any(called(x) in _COLLECTIVES for x in calls):
        return
    local = set(_own(tree, dict.fromkeys(stores(parts), 0)))
    for x in (x.func.value for x in calls if id(x) in within and isinstance(x.func, ast.Attribute)):
        kind: Any = type(value_of(values, dotted(x)))
        if not issubclass(kind, torch.nn.Module) and (issubclass(kind, list | deque) or methods_of(kind)):
            local.add(dotted(x))  # a list, or a meter of the user's, keeps what it gets
    rest = [x for x in loop.body if not any(id(y) in within for y in ast.walk(x))]
    local = made_from(ast.Module(rest, []), local)
    for node in (x for x in ast.walk(loop) if id(x) not in within):
        tests = steers_update(node, values)
        if isinstance(node, ast.If) and not asks_for_health(node.test):
            breaks = any(isinstance(x, ast.Break) and is_own for x, is_own in inside(node))
            tests += [node.test] if breaks else []
        for name in sorted({name for test in tests for name in names_read(test)} & local):
            yield name, getattr(node, "lineno", 0)


def _chooses_batches(loop: ast.For, made: set[str]) -> bool:
    """Whether a test of these names leaves a micro-batch out, or runs a backward pass."""
    for test in (x for x in ast.walk(loop) if isinstance(x, ast.If) and names_read(x.test) & made):
        chosen = [(y, is_own) for part in test.body for y, is_own in ((part, True), *inside(part))]
        if any(isinstance(y, ast.Break | ast.Continue) and is_own for y, is_own in chosen):
            return True
        if any(isinstance(y, ast.Call) and called(y) == "backward" for y, _ in chosen):
            return True
    return False


def _refuse_later(here: RunningSource, loop: ast.For, shared: Sequence[Any]) -> None:
    """Raise ConfigError for what steps set for later ones, or draw, and a replica that joins does not."""
    values = here.values
    held = {id(y) for x in shared for y in (x, *attributes_of(x).values())}
    held |= {id(y) for x in shared if isinstance(x, torch.nn.Module) for y in x.modules()}
    held -= {id(None), id(True), id(False)}
    for name, line in _set_for_later(loop):
        path = name.split(".")
        if not any(id(value_of(values, ".".join(path[: i + 1]))) in held for i in range(len(path))):
            raise ConfigError(
                f"the training depends on {name}, which {here.file}:{line} sets for later steps, and a "
                f"replica that joins begins with another {name}: keep it in an object that attach(..., "
                "state=) names"
            )
    for name, line in drawn_from(loop, values):
        if id(value_of(values, name)) not in held and moves_training(loop, made_from(loop, {name})):
            raise ConfigError(
                f"the training depends on {name}, a generator that {here.file}:{line} draws from, and each "
                "replica draws other numbers of it: draw from torch's own generator, which fabric seeds for "
                "each micro-batch and update, or keep one for the update in state="
            )


def _set_for_later(loop: ast.For) -> Iterator[tuple[str, int]]:
    """Yield the names by which a step trains before it sets them, and which a joining replica sets otherwise.

    Their value goes by the micro-batches, or not every step sets it.
    """
    step, nodes = _step_name(loop.target, loop.iter), list(ast.walk(loop))
    inner = [x for x in nodes if isinstance(x, ast.For) and _iterates(x.iter, step)]
    batch = set(stores(part for x in inner for part in (x.target, *x.body)))
    targets = {
        name for x in nodes if isinstance(x, ast.For | ast.comprehension) for name in stores([x.target])
    }
    branched = {id(y) for x in nodes if isinstance(x, ast.If) for y in ast.walk(x)}
    statements = [x for x in nodes if isinstance(x, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Expr)]
    first: dict[str, ast.stmt] = {}
    for node in sorted(statements, key=lambda x: x.lineno):
        names = set(stores([node]))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and loads_weights(node.value):
            names = {dotted(node.value.func).rpartition(".")[0]}
        for name in names - targets - {""}:
            first.setdefault(name, node)
    for name, put in first.items():
        shared = {x.attr for x in ast.walk(put) if isinstance(x, ast.Attribute)} & _SHARED
        if id(put) not in branched and (shared or not names_read(put) & (batch - {name})):
            continue
        for node in (x for x in statements if x.lineno < put.lineno and name in names_read(x)):
            made = set(stores([node]))
            if moves_training(node, {name}) or (made and moves_training(loop, made_from(loop, made))):
                yield name, put.lineno


def _shared_parts(shared: Iterable[Any]) -> Iterator[Any]:
    """Yield the objects of the shared state, and the containers and tensors in their states."""
    for value in shared:
        if not isinstance(value, torch.nn.Module):
            yield value
        pending = [value.state_dict()]
        while pending:
            part = pending.pop()
            if not isinstance(part, int | float | str | None):  # equal numbers may be one object
                yield part
            if isinstance(part, Mapping | list | tuple):
                pending.extend(part.values() if isinstance(part, Mapping) else part)


def unbound_names(source: str, line: int, bound: Iterable[str]) -> list[tuple[str, int]]:
    """Return each name, with the line that reads it, which is certainly not set in a bare first step.

    ``line``: of the ``for`` statement over the steps. ``bound``: the names that are set before it.
    """
    tree, loop = _loop_at(source, line)
    step = _step_name(loop.target, loop.iter) if loop is not None else ""
    if tree is None or loop is None or not step:
        return []
    if any(isinstance(x, ast.Call) and called(x) in ("exec", "eval") for x in ast.walk(loop)):
        return []
    declared = {name for x in ast.walk(tree) if isinstance(x, ast.Global | ast.Nonlocal) for name in x.names}
    bare = _BareStep(loop, step, {*bound, *declared, *stores([loop.target])})
    bare.block(loop.body, quiet=False)
    return list(bare.unbound.items())


class _BareStep:
    """Goes through the body of the loop over the steps as a step without micro-batches does."""

    def __init__(self, loop: ast.For, step: str, bound: set[str]) -> None:
        self.step = step
        self.bound = bound  # names that may be set by now
        self.unbound: dict[str, int] = {}  # name -> line of its first read
        self.over = False  # a bare step may not come to the statements that follow
        inner = [x for x in ast.walk(loop) if isinstance(x, ast.For) and self._is_inner(x)]
        parts = [part for x in inner for part in (x.target, *x.body)]
        self.candidates = set(stores(parts))
        self.answers = self.candidates | _changed(parts) - {step}  # names whose value tells a bare step
        self.attributes = {
            x.attr
            for part in parts
            for x in ast.walk(part)
            if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store)
        }
        self.counts: set[str] = set()  # names of step numbers
        inside = {id(x) for part in parts for x in ast.walk(part)}
        self._derive([x for x in ast.walk(loop) if id(x) not in inside])

    def _is_inner(self, node: ast.AST) -> bool:
        return isinstance(node, ast.For) and _iterates(node.iter, self.step)

    def _derive(self, nodes: list[ast.AST]) -> None:
        """Add names that the loop makes from what tells a bare step, and names of step numbers."""
        size = -1
        while size != len(self.answers) + len(self.counts):
            size = len(self.answers) + len(self.counts)
            for node in nodes:
                if not isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign | ast.NamedExpr):
                    continue
                if node.value is None:
                    continue
                if any(self._is_count(x) for x in ast.walk(node.value)):
                    self.counts |= set(stores([node]))
                elif self.guards(node.value):
                    self.answers |= set(stores([node]))

    # --- statements ---------------------------------------------------------------------------------

    def block(self, statements: Iterable[ast.stmt], quiet: bool) -> None:
        """Go through ``statements``. ``quiet``: a read here is not certain, or its error is caught."""
        for statement in statements:
            if self.over:
                return
            self._statement(statement, quiet)
            if isinstance(statement, _EXITS):
                return

    def _statement(self, node: ast.stmt, quiet: bool) -> None:
        if self._is_inner(node):
            assert isinstance(node, ast.For)
            self.block(node.orelse, quiet)
        elif isinstance(node, ast.If | LOOPS):
            self._branch(node, quiet)
        elif isinstance(node, ast.Try | ast.TryStar):
            self._try(node, quiet)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                self._read(item.context_expr, quiet)
                self.bound |= set(stores([item]))
                quiet = quiet or (
                    isinstance(item.context_expr, ast.Call) and called(item.context_expr) == "suppress"
                )
            self.block(node.body, quiet)
        elif isinstance(node, ast.Match):
            self._read(node.subject, quiet)
            tests = [node.subject, *(x.guard for x in node.cases if x.guard is not None)]
            patterns = [x.pattern for x in node.cases]
            self.bound |= set(stores(patterns))
            self._guarded([x.body for x in node.cases], quiet, any(map(self.guards, tests)))
        elif isinstance(node, SCOPES):
            self.bound.add(node.name)
        else:
            self._read(node, quiet)
            self.bound |= set(stores([node]))
            self.over = self.over or (isinstance(node, ast.Assert) and self.guards(node.test))

    def _branch(self, node: ast.If | LOOPS, quiet: bool) -> None:
        test = node.test if isinstance(node, ast.If | ast.While) else node.iter
        self._read(test, quiet)
        if not isinstance(node, ast.If):  # a later pass may read what an earlier one has set
            outside = (x for x in ast.walk(node) if isinstance(x, ast.stmt) and not self._is_inner(x))
            self.bound |= set(stores(outside))
        self._guarded([node.body, node.orelse], quiet, self.guards(test))

    def _guarded(self, blocks: Iterable[list[ast.stmt]], quiet: bool, guarded: bool) -> None:
        for statements in blocks:
            self.block(statements, quiet or guarded)
            self.over = self.over or (guarded and _leaves(statements))

    def _try(self, node: ast.Try | ast.TryStar, quiet: bool) -> None:
        catches = any(x.type is None or _names(x.type) & _CATCHES for x in node.handlers)
        self.block(node.body, quiet or catches)
        for handler in node.handlers:
            self.bound |= {handler.name} if handler.name else set()
            self.block(handler.body, quiet)
        self.block(node.orelse, quiet or catches)
        self.block(node.finalbody, quiet)
        self.over = self.over or (catches and any(_leaves(x.body) for x in node.handlers))

    # --- expressions --------------------------------------------------------------------------------

    def _read(self, node: ast.AST, quiet: bool) -> None:
        """Note the names that ``node`` reads; ``x += 1`` and ``del x`` read x."""
        self.bound |= {x.target.id for x in ast.walk(node) if isinstance(x, ast.NamedExpr)}
        self._expression(node, quiet)

    def _expression(self, node: ast.AST, quiet: bool) -> None:
        if isinstance(node, SCOPES):
            return
        if isinstance(node, COMPREHENSIONS):  # the rest is a scope of its own, and may not run
            self._expression(node.generators[0].iter, quiet)
        elif isinstance(node, ast.IfExp):
            self._expression(node.test, quiet)
            quiet = quiet or self.guards(node.test)
            self._expression(node.body, quiet)
            self._expression(node.orelse, quiet)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                self._expression(value, quiet)
                quiet = quiet or self.guards(value)
        elif isinstance(node, ast.Name):
            if not isinstance(node.ctx, ast.Store):
                self._name(node, quiet)
        else:
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                self._name(node.target, quiet)
            for child in ast.iter_child_nodes(node):
                self._expression(child, quiet)

    def _name(self, node: ast.Name, quiet: bool) -> None:
        if not quiet and not self.over and node.id in self.candidates - self.bound:
            self.unbound.setdefault(node.id, node.lineno)

    def guards(self, test: ast.AST) -> bool:
        """Return whether ``test`` may tell a bare step from another one."""
        nodes = list(ast.walk(test))
        plain = {id(x.value) for x in nodes if isinstance(x, ast.Attribute) and x.attr in _PLAIN_USES}
        compared = {id(y) for x in nodes if _is_periodic(x) for y in ast.walk(x)}
        for node in nodes:
            if isinstance(node, ast.Name):
                tells = node.id in self.answers or (node.id == self.step and id(node) not in plain)
            elif isinstance(node, ast.Attribute):
                tells = node.attr in self.attributes
            elif isinstance(node, ast.Constant):
                tells = isinstance(node.value, str) and node.value in self.candidates
            else:
                tells = isinstance(node, ast.Call) and called(node) in _LOOKUPS
            if tells or (self._is_count(node) and id(node) not in compared):
                return True
        return False

    def _is_count(self, node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr in _COUNTS
        return isinstance(node, ast.Name) and node.id in self.counts


# --- names that the loop carries ----------------------------------------------------------------------------


def carried_names(source: str, line: int) -> list[tuple[str, int]]:
    """Return each name that the loop makes from its own value of the step before, and on which the training
    depends: a backward, or a value of the optimizer's groups. With the line that makes it.

    ``line``: of the ``for`` statement over the steps. A name that the source takes from a step's number, from
    ``committed_step`` or from a step's metrics somewhere, or declares global, is left out.
    """
    tree, loop = _loop_at(source, line)
    step = _step_name(loop.target, loop.iter) if loop is not None else ""
    if tree is None or loop is None or not step:
        return []
    return list(_that_train(tree, [loop], _carried(loop, step)))


def _carried(loop: ast.For, step: str) -> dict[str, int]:
    carried = dict.fromkeys(set(stores([loop.target])) - {step}, loop.lineno)  # the index of enumerate
    carry(loop.body, {step}, carried)
    return carried


def _that_train(
    tree: ast.AST, loops: Sequence[ast.For | ast.AsyncFor | ast.While], carried: dict[str, int]
) -> Iterator[tuple[str, int]]:
    """Yield those of the carried names by which the loops train, and which no shared value gives."""
    for name, at in _own(tree, carried).items():
        if moves_training(loops[0], made_from(loops[0], {name})):
            yield name, at


def _own(tree: ast.AST, carried: dict[str, int]) -> dict[str, int]:
    """Return those of the carried names that no shared value gives."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Global | ast.Nonlocal):
            carried = {name: at for name, at in carried.items() if name not in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and node.value is not None:
            shared = {x.attr for x in ast.walk(node.value) if isinstance(x, ast.Attribute)} & _SHARED
            fresh = set(stores([node])) - names_read(node.value) if shared else set()
            carried = {name: at for name, at in carried.items() if name not in fresh}
    return carried


# --- the parts of a source ----------------------------------------------------------------------------------


def _loop_at(source: str, line: int) -> tuple[ast.Module | None, ast.For | None]:
    """Return the source's tree, and the one ``for`` statement whose head has this line."""
    tree = parsed(source)
    loops = [x for x in ast.walk(tree) if isinstance(x, ast.For)] if tree is not None else []
    loops = [x for x in loops if x.lineno <= line <= (x.iter.end_lineno or x.lineno)]
    return tree, loops[0] if len(loops) == 1 else None


def _passes_on(source: str, line: int) -> bool:
    """Return whether the loop at ``line`` yields what it iterates, as that of a progress bar does."""
    _, loop = _loop_at(source, line)
    return loop is not None and any(
        isinstance(x, ast.Expr)
        and isinstance(x.value, ast.Yield)
        and isinstance(x.value.value, ast.Name)
        and ast.unparse(x.value.value) == ast.unparse(loop.target)
        for x in loop.body
    )


def _step_name(target: ast.expr, iterated: ast.expr) -> str:
    """Return the name that each step gets; empty where the source does not show it."""
    if isinstance(iterated, ast.Call) and called(iterated) != "steps":
        if called(iterated) not in _PASS_ON or not iterated.args:
            return ""
        if called(iterated) == "enumerate":
            if not (isinstance(target, ast.Tuple) and len(target.elts) == 2):
                return ""
            target = target.elts[1]
        return _step_name(target, iterated.args[0])
    is_shown = isinstance(iterated, ast.Call | ast.Name | ast.Attribute)
    return target.id if is_shown and isinstance(target, ast.Name) else ""


def _iterates(iterated: ast.expr, step: str) -> bool:
    """Return whether a loop over ``iterated`` has no pass in a step without micro-batches."""
    if isinstance(iterated, ast.Call) and called(iterated) in _PASS_ON_INNER:
        return any(_iterates(x, step) for x in iterated.args)
    return isinstance(iterated, ast.Name) and iterated.id == step


def _names(node: ast.AST) -> set[str]:
    return {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}


def _changed(parts: Iterable[ast.AST]) -> set[str]:
    """Return the names of objects that these statements may change without setting a name."""
    names = set()
    for node in (x for part in parts for x in ast.walk(part)):
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
            names |= _names(node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            names |= _names(node) if called(node.value) not in _OF_FABRIC else set()
    return names


def _is_periodic(node: ast.AST) -> bool:
    """Return whether a step number is only compared so that a joining replica's first step may pass."""
    if isinstance(node, ast.BinOp):
        return isinstance(node.op, ast.Mod)
    return isinstance(node, ast.Compare) and all(isinstance(x, ast.Gt | ast.GtE) for x in node.ops)


def _leaves(statements: Iterable[ast.AST]) -> bool:
    return any(isinstance(x, _EXITS) for statement in statements for x in ast.walk(statement))
