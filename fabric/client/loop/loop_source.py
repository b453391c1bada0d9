"""Reads the source of a loop of your own at the first ``session.steps``, for what would go wrong later.

``for batch in step: loss = ...`` followed by ``print(loss)`` raises NameError in a joining replica's first
step, hours after the job began. ``count += 1`` in the loop begins at another value there, and a loss that
depends on the count differs from the others' without an error. The search names what is certain, and says
nothing where it cannot know. ``_RULES`` has what it looks for, in order, each with its sentence.
"""

import ast
import builtins
import inspect
import linecache
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch

from fabric.client.gradients.bucket_stream import changed_early
from fabric.client.loop.loop_flow import (
    COMPREHENSIONS,
    LOOPS,
    SCOPES,
    asks_for_health,
    called,
    calls,
    carry,
    dotted,
    early_change,
    holder,
    inside,
    kept_weights,
    loops_at,
    made_from,
    moves_training,
    names_read,
    of_kind,
    pairs,
    stores,
    trains_by_value,
    walked,
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

Loop = ast.For | ast.AsyncFor | ast.While
_LEAST = {ast.Gt, ast.GtE}
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


class Shown(NamedTuple):
    """A finding in the source of a loop."""

    rule: str  # of ``_RULES``
    name: str
    line: int
    by: str = ""  # another name, for the sentence


class StepLoop:
    """The loop over ``session.steps``, or around a call of ``session.exchange``, in its source.

    ``step``: the name that each step gets; empty for a loop of exchanges.
    """

    def __init__(self, tree: ast.Module, loop: Loop, step: str) -> None:
        self.tree, self.loop, self.step = tree, loop, step
        # The loops over the micro-batches, and the parts of these that do not run in a step without any.
        self.inner = [x for x in of_kind(loop, ast.For) if step and _iterates(x.iter, step)]
        self.batch: list[ast.AST] = [part for x in self.inner for part in (x.target, *x.body)]
        self.within = {x for part in self.batch for x in walked(part)}
        # The names that a step makes from their value of the step before.
        heads = [loop.target] if step and isinstance(loop, ast.For) else []
        self.carried = dict.fromkeys(set(stores(heads)) - {step}, loop.lineno)  # the index of enumerate
        carry(loop.body if step else [loop], {step}, self.carried)

    @classmethod
    def at(cls, source: str, line: int) -> "StepLoop | None":
        """Return the one loop over steps whose head has this line."""
        tree, loop = parsed(source), _loop_at(source, line)
        step = _step_name(loop.target, loop.iter) if loop is not None else ""
        return cls(tree, loop, step) if tree is not None and loop is not None and step else None

    def that_train(self, names: Mapping[str, int]) -> Iterator[tuple[str, int]]:
        """Yield those of the names by which the loop trains, and which no shared value gives."""
        for name, line in self.own(names).items():
            if moves_training(self.loop, made_from(self.loop, {name})):
                yield name, line

    def own(self, names: Mapping[str, int]) -> dict[str, int]:
        """Return those of the names that no shared value gives.

        The source takes others from a step's number, ``committed_step`` or a step's metrics, or declares them
        global.
        """
        given = {name for x in of_kind(self.tree, ast.Global, ast.Nonlocal) for name in x.names}
        for node in of_kind(self.tree, ast.Assign, ast.AnnAssign, ast.NamedExpr):
            if node.value is not None and _is_shared(node.value):
                given |= set(stores([node])) - names_read(node.value)
        return {name: line for name, line in names.items() if name not in given}

    def unbound(self, bound: Iterable[str]) -> Iterable[tuple[str, int]]:
        """Return each name, with the line that reads it, which is certainly not set in a bare first step.

        ``bound``: the names that are set before the loop.
        """
        if calls(self.loop, "exec", "eval"):
            return ()
        declared = {name for x in of_kind(self.tree, ast.Global, ast.Nonlocal) for name in x.names}
        bare = _BareStep(self, {*bound, *declared, *stores([getattr(self.loop, "target", ast.Pass())])})
        bare.go_on(self.loop.body, quiet=False)
        return bare.unbound.items()


class _SharedParts:
    """The objects of the shared state, and the parts of their states."""

    def __init__(self, objects: Iterable[Any]) -> None:
        everything = list(objects)
        modules = [x for x in everything if isinstance(x, torch.nn.Module)]
        self.plain = {id(x) for x in everything} - {id(x) for x in modules}
        self.modules = {id(y) for x in modules for y in x.modules()}
        # Their attributes; numbers and None may be one object with others.
        values = [y for x in everything for y in attributes_of(x).values()]
        values = [x for x in values if not isinstance(x, int | float | str | None)]
        self.known = {id(x) for x in (*everything, *values)} | self.modules
        self._everything = everything

    @cached_property
    def parts(self) -> list[Any]:
        """The objects but for modules, and the containers and tensors in the states."""
        parts = [x for x in self._everything if not isinstance(x, torch.nn.Module)]
        pending = [x.state_dict() for x in self._everything]
        while pending:
            part = pending.pop()
            parts += [part] if not isinstance(part, int | float | str | None) else []
            if isinstance(part, Mapping | list | tuple):
                pending.extend(part.values() if isinstance(part, Mapping) else part)
        return parts


@dataclass(eq=False)
class _LoopReading:
    """A loop that runs now, with the objects of its names and the shared state."""

    source: StepLoop
    here: RunningSource
    shared: _SharedParts

    def refuse(self, findings: Iterable[Shown]) -> None:
        """Raise ConfigError for the first thing that the source shows."""
        for x in findings:
            place = f"{self.here.file}:{x.line}"
            raise ConfigError(_RULES[x.rule].format(name=x.name, place=place, by=x.by))

    def findings(self, bound: Iterable[str]) -> Iterator[Shown]:
        """Yield all that the source shows. ``bound``: the names that may be set before the loop."""
        for name, line in self.source.unbound(bound):
            yield Shown("unbound", name, line)
        yield from self.carried()
        for inner in self.source.inner:
            if line := early_change(inner):
                raise changed_early(f"{self.here.file}:{line} changes gradients")
        yield from (*self._judged(), *self._numbers(), *self._local(), *self._changed(), *self._later())
        loop, values = self.source.loop, self.here.values
        for name, line in drawn_from(loop, values):
            is_known = id(value_of(values, name)) in self.shared.known
            if not is_known and moves_training(loop, made_from(loop, {name})):
                yield Shown("draws", name, line)
        if kept := kept_by_loop(loop, values, self.shared.modules.union(map(id, self.shared.parts))):
            yield Shown("calls", kept, 0)

    def carried(self) -> Iterator[Shown]:
        for name, line in self.source.that_train(self.source.carried):
            if not self._is_kept(name):
                yield Shown("carried", name, line)

    def _lies_in(self, name: str, held: set[int]) -> bool:
        """Whether a name, or what holds the named attribute, is one of these objects."""
        path = name.split(".")
        values = [value_of(self.here.values, ".".join(path[: n + 1])) for n in range(len(path))]
        return any(x is not None and id(x) in held for x in values)

    def _is_kept(self, name: str) -> bool:
        """Whether an attribute lies in a shared object other than a module, or is a buffer."""
        owner, _, last = name.rpartition(".")
        buffers = getattr(value_of(self.here.values, owner), "_buffers", {}) if owner else {}
        return last in buffers or bool(owner and self._lies_in(owner, self.shared.plain))

    def _judged(self) -> Iterator[Shown]:
        """Yield carried names that steer a module, that a method reads for the training, or that choose the
        weights to keep.
        """
        loop, values = self.source.loop, self.here.values
        callees = {dotted(x.func) for x in of_kind(loop, ast.Call)} - {""}
        for name, line in self.source.own(self.source.carried).items():
            owner, _, attribute = name.rpartition(".")
            thing = value_of(values, owner) if owner else None
            if thing is not None and not self._is_kept(name):
                steers = isinstance(thing, torch.nn.Module) and steers_forward(thing, attribute)
                methods = [(x, method) for x in callees if (method := function_of(callee(values, x)))]
                methods = [(x, method) for x, method in methods if method.thing is thing]
                read = {x for x, y in methods if f"{y.me}.{attribute}" in names_read(y.node)}
                if steers or moves_training(loop, made_from(loop, read)):
                    yield Shown("carried", name, line)
            for kept, at in kept_weights(self.source.tree, loop, {name}):
                yield Shown("weights", kept, at, name)

    def _numbers(self) -> Iterator[Shown]:
        """Yield what a loop over the micro-batches gets beside them, an index or another iterable."""
        loop, step = self.source.loop, self.source.step
        for inner in self.source.inner:
            given = pairs(inner.target, inner.iter)
            beside = [x for x in given if len(given) > 1 and not _iterates(x[1], step)]
            for name in stores(target for target, _ in beside):
                made = made_from(loop, {name}, parts=True)
                if _chooses_batches(loop, made):
                    yield Shown("chosen", name, inner.lineno)
                elif moves_training(loop, made):
                    yield Shown("numbered", name, inner.lineno)

    def _local(self) -> Iterator[Shown]:
        """Yield each name that the micro-batches set, and the line of an update or an end that goes by it."""
        source, values = self.source, self.here.values
        if calls(source.loop, *_COLLECTIVES):
            return
        local = set(source.own(dict.fromkeys(stores(source.batch), 0)))
        asked = [x.func for x in of_kind(source.loop, ast.Call) if x in source.within]
        for x in (x.value for x in asked if isinstance(x, ast.Attribute)):
            kind: Any = type(value_of(values, dotted(x)))
            if not issubclass(kind, torch.nn.Module) and (issubclass(kind, list | deque) or methods_of(kind)):
                local.add(dotted(x))  # a list, or a meter of the user's, keeps what it gets
        rest = [x for x in source.loop.body if source.within.isdisjoint(walked(x))]
        local = made_from(ast.Module(rest, []), local)
        for node in (x for x in walked(source.loop) if x not in source.within):
            tests = steers_update(node, values)
            if isinstance(node, ast.If) and not asks_for_health(node.test):
                breaks = any(isinstance(x, ast.Break) and is_own for x, is_own in inside(node))
                tests += [node.test] if breaks else []
            for name in sorted({name for test in tests for name in names_read(test)} & local):
                yield Shown("local", name, getattr(node, "lineno", 0))

    def _changed(self) -> Iterator[Shown]:
        loop, values, parts = self.source.loop, self.here.values, self.shared.parts
        held, memory = {id(x) for x in parts}, {x.data_ptr() for x in parts if isinstance(x, torch.Tensor)}
        for name, line in self.source.that_train({**changed_names(loop), **moved_names(loop, values)}):
            value = value_of(values, name)
            is_kept = isinstance(value, torch.Tensor | np.ndarray | list | dict | deque | torch.nn.Module)
            is_module = isinstance(value, torch.nn.Module)
            tensors = [*value.parameters(), *value.buffers()] if is_module else [value]
            places = {x.data_ptr() for x in tensors if isinstance(x, torch.Tensor)}
            is_shared = self._lies_in(name, held) or not places.isdisjoint(memory)
            if isinstance(value, Iterator):
                yield Shown("moved on", name, line)
            elif (is_kept or (value is None and name in values)) and not is_shared:
                yield Shown("changed", name, line)

    def _later(self) -> Iterator[Shown]:
        """Yield the names by which a step trains before it sets them, and a joining replica sets otherwise.

        Their value goes by the micro-batches, or not every step sets it.
        """
        loop, batch = self.source.loop, set(stores(self.source.batch))
        heads = of_kind(loop, ast.For, ast.comprehension)
        targets = {name for x in heads for name in stores([x.target])}
        branched = {y for x in of_kind(loop, ast.If) for y in walked(x)}
        statements = of_kind(loop, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Expr)
        first: dict[str, ast.stmt] = {}
        for node in sorted(statements, key=lambda x: x.lineno):
            names = set(stores([node]))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                owner, _, method = dotted(node.value.func).rpartition(".")
                names |= {owner} if method == "load_state_dict" else set()
            for name in names - targets - {""}:
                first.setdefault(name, node)
        for name, put in first.items():
            is_alike = _is_shared(put) or not names_read(put) & (batch - {name})
            before = [x for x in statements if x.lineno < put.lineno]
            if (put not in branched and is_alike) or self._lies_in(name, self.shared.known):
                continue
            if any(trains_by_value(loop, x, name) for x in before):
                yield Shown("later", name, put.lineno)


# The refusals of a loop. A sentence has the name, its place and, for some, another name.
_ANOTHER = "and a replica that joins begins with another {name}: "
_OTHERS = "which goes by the micro-batches of one replica, and replicas have different ones: "
_DEPENDS = "the training depends on {name}"
_CARRIED = _DEPENDS + ", which {place} carries from step to step, " + _ANOTHER + "make it from "
_CARRIED += "session.committed_step, or keep it in a dict that attach(..., state=) names"
_RULES = {
    "unbound": "{place} reads {name}, which only the loop over the micro-batches sets, and a joining "
    "replica's first step has no micro-batches: use step.metrics, set {name} before the loops, or read it "
    "under `if step.contributed:`",
    "carried": _CARRIED,
    "weights": "{name} at {place} keeps weights by {by}, and a replica that joins has another {by}: "
    "save the weights in a file where session.is_writer is true, and keep {by} in a dict that "
    "attach(..., state=) names",
    "chosen": f"{_DEPENDS} ({{place}}), {_OTHERS}choose by step.number",
    "numbered": f"{_DEPENDS} ({{place}}), {_OTHERS}put it into the data set of session.loader",
    "local": "the update depends on {name} ({place}), " + _OTHERS + "add it up by session.metrics, and read "
    "step.metrics after the micro-batches",
    "moved on": "the training reads {name}, an iterator that {place} moves on, and each replica moves its "
    "own: put what it gives into the data set of session.loader",
    "changed": _DEPENDS + ", which {place} changes from step to step, and each replica changes its own: make "
    "it from the batch, or from step.metrics and keep it in a dict that attach(..., state=) names",
    "later": _DEPENDS + ", which {place} sets for later steps, " + _ANOTHER + "keep it in an object that "
    "attach(..., state=) names",
    "draws": _DEPENDS + ", a generator that {place} draws from, and each replica draws other numbers of it: "
    "draw from torch's own generator, which fabric seeds for each micro-batch and update, or keep one for "
    "the update in state=",
    "calls": _DEPENDS + ", and each replica makes other calls: make it from session.committed_step or from "
    "the batch, or keep it in an object of attach(..., state=)",
}


@search(None)
def check_source(frame: FrameType | None, shared: Iterable[object]) -> None:
    """Raise ConfigError for what a joining replica cannot do alike in the loop around ``session.steps``.

    ``frame``: that of ``steps`` itself. Generators that only pass steps on, as tqdm does, are left out.
    ``shared``: the objects of the shared state, whose attributes are equal on all replicas.
    """
    caller = frame.f_back if frame is not None else None
    while caller is not None:
        source = "".join(linecache.getlines(caller.f_code.co_filename, caller.f_globals))
        is_generator = caller.f_code.co_flags & inspect.CO_GENERATOR
        if not is_generator or not _passes_on(_loop_at(source, caller.f_lineno)):
            loop = StepLoop.at(source, caller.f_lineno)
            if loop is not None:
                code, here = caller.f_code, RunningSource.of(caller, loop.loop)
                unset = {*code.co_varnames, *code.co_cellvars}.difference(caller.f_locals)
                bound = {*here.values, *dir(builtins)} - unset
                reading = _LoopReading(loop, here, _SharedParts(shared))
                reading.refuse(reading.findings(bound))
            return
        caller = caller.f_back


@search(None)
def check_exchange_loop(frame: FrameType | None, shared: Iterable[object]) -> None:
    """Raise ConfigError for a name that the loops around a call of ``session.exchange`` carry, see above."""
    caller = frame.f_back if frame is not None else None
    tree = tree_of(caller) if caller is not None else None
    loops = loops_at(tree, caller.f_lineno) if caller is not None and tree is not None else []
    if caller is not None and tree is not None and loops:
        here = RunningSource.of(caller, loops[0])
        reading = _LoopReading(StepLoop(tree, loops[0], ""), here, _SharedParts(shared))
        reading.refuse(reading.carried())
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


def changed_names(loop: ast.stmt) -> dict[str, int]:
    """Return the names that the loop does not set and whose content it changes, with the line.

    Content that is written before it is read carries nothing, and a cache is filled where a test asks for it.
    """
    caches = [x for x in of_kind(loop, ast.If, ast.IfExp) if of_kind(x.test, ast.In, ast.NotIn, ast.Is)]
    # One that draws its item in a micro-batch has other items on each replica.
    left_out = {y for x in caches if not calls(x, *_DRAWS) for y in walked(x)}
    names = changed_in_place(loop)
    for put in sorted(of_kind(loop, ast.Assign), key=lambda x: x.lineno):
        for target in (x for x in put.targets if isinstance(x, ast.Subscript) and put not in left_out):
            left_out |= set(walked(target))
            reads = [x for x in of_kind(loop, ast.expr) if x not in left_out]
            if any(dotted(x) == dotted(target.value) != "" and x.lineno < put.lineno for x in reads):
                names.setdefault(dotted(target.value), put.lineno)
    # Only a first step sets what stands under ``if average is None:``.
    begins = [x for x in of_kind(loop, ast.If) if isinstance(x.test, ast.Compare)]
    once = Counter(stores(y for x in begins if "is None" in ast.unparse(x.test) for y in x.body))
    fresh = {name for name, count in Counter(stores([loop])).items() if count > once[name]}
    clearing = [x.func for x in calls(loop, "clear")]
    emptied = {dotted(x.value) for x in clearing if isinstance(x, ast.Attribute)}
    return {x: at for x, at in names.items() if x not in emptied and not {x, x.partition(".")[0]} & fresh}


def moved_names(loop: ast.stmt, values: Mapping[str, Any]) -> dict[str, int]:
    """Return the tensors, and modules with parameters, that torch's methods change in place, with the line.

    A tensor that a method overwrites carries nothing. A network into which another one is copied does, unless
    each step does so before it reads the network.
    """
    of = dict[str, str]()
    for inner in of_kind(loop, ast.For):
        for target, source in pairs(inner.target, inner.iter):
            name = _owner(source)
            of |= dict.fromkeys(stores([target]), name) if name else {}
    changing = [x for x in of_kind(loop, ast.Call) if called(x).endswith("_")]
    changes = [(x.func.value, called(x), x.lineno) for x in changing if isinstance(x.func, ast.Attribute)]
    changes += [(x.target, "", x.lineno) for x in of_kind(loop, ast.AugAssign)]
    data = [x for y in of_kind(loop, ast.Assign) for x in y.targets if isinstance(x, ast.Attribute)]
    changes += [(x, "copy_", x.lineno) for x in data if x.attr == "data"]
    written, moved = set[str](), dict[str, int]()
    body: list[ast.stmt] = getattr(loop, "body", [])
    for target, method, line in changes:
        name = of.get(held := holder(target), held)
        is_tensor, is_part = isinstance(value_of(values, name), torch.Tensor), held in of
        while is_tensor and isinstance(value_of(values, owner := name.rpartition(".")[0]), torch.nn.Module):
            name, is_part = owner, True
        # Each step may go through this line before another statement reads the name.
        before = [x for x in body if x.lineno <= line]
        is_sure = bool(before) and not isinstance(before[-1], ast.If | ast.While | ast.Try)
        fills = is_sure and not any(name in names_read(x) for x in before[:-1])
        is_copied = method == "copy_" and is_part and not fills
        if method in _OVERWRITES and not is_copied:
            written.add(name)
        elif method not in _KEEP and (is_tensor or held in of):
            moved.setdefault(name, line)
    return {name: line for name, line in moved.items() if name not in {*written, *stores([loop])}}


def _owner(source: ast.expr) -> str:
    """Return the name of the module whose parameters, buffers or state these are; empty for other things."""
    while isinstance(source, ast.Call) and called(source) in ("list", "tuple", "items", "values"):
        source = (
            source.func.value if isinstance(source.func, ast.Attribute) else [*source.args, source.func][0]
        )
    owner, _, method = dotted(getattr(source, "func", source)).rpartition(".")
    return owner if method in _PARTS else ""


def _chooses_batches(loop: ast.AST, made: set[str]) -> bool:
    """Whether a test of these names leaves a micro-batch out, or runs a backward pass."""
    for test in (x for x in of_kind(loop, ast.If) if names_read(x.test) & made):
        chosen = [(y, is_own) for part in test.body for y, is_own in ((part, True), *inside(part))]
        if any(isinstance(y, ast.Break | ast.Continue) and is_own for y, is_own in chosen):
            return True
        if any(isinstance(y, ast.Call) and called(y) == "backward" for y, _ in chosen):
            return True
    return False


# --- names that only the micro-batches set ------------------------------------------------------------------


class _BareStep:
    """Goes through the body of the loop over the steps as a step without micro-batches does."""

    def __init__(self, source: StepLoop, bound: set[str]) -> None:
        self.step = source.step
        self.bound = bound  # names that may be set by now
        self.unbound: dict[str, int] = {}  # name -> line of its first read
        self.over = False  # a bare step may not come to the statements that follow
        self.inner = source.inner
        self.candidates = set(stores(source.batch))
        held = [x for x in source.within if isinstance(x, ast.Attribute | ast.Subscript)]
        stored = [x for x in held if isinstance(x.ctx, ast.Store)]
        # Names whose value tells a bare step, and of objects that micro-batches may change without a name.
        puts = [x.value for x in stored if isinstance(x, ast.Subscript)]
        asked = [x.value for x in source.within if isinstance(x, ast.Expr)]
        touched = [*puts, *(x for x in asked if isinstance(x, ast.Call) and called(x) not in _OF_FABRIC)]
        self.answers = self.candidates.union(*map(_names, touched)) - {source.step}
        self.attributes = {x.attr for x in stored if isinstance(x, ast.Attribute)}
        self.counts: set[str] = set()  # names of step numbers
        assigned = of_kind(source.loop, ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)
        size = -1
        while size != len(self.answers) + len(self.counts):
            size = len(self.answers) + len(self.counts)
            for node in (x for x in assigned if x not in source.within and x.value is not None):
                assert node.value is not None
                if any(self._is_count(x) for x in walked(node.value)):
                    self.counts |= set(stores([node]))
                elif self.guards(node.value):
                    self.answers |= set(stores([node]))

    def go_on(self, parts: Iterable[ast.AST], quiet: bool) -> None:
        """Go through ``parts``. ``quiet``: a read here is not certain, or its error is caught."""
        for node in parts:
            if self.over:
                return
            self._enter(node, quiet)
            if isinstance(node, _EXITS):
                return

    def _enter(self, node: ast.AST, quiet: bool) -> None:
        if isinstance(node, ast.Name):
            is_unset = not isinstance(node.ctx, ast.Store) and node.id in self.candidates - self.bound
            if is_unset and not quiet:
                self.unbound.setdefault(node.id, node.lineno)
        elif node in self.inner:
            self.go_on(getattr(node, "orelse", ()), quiet)
        elif isinstance(node, COMPREHENSIONS):  # the rest is a scope of its own, and may not run
            self._enter(node.generators[0].iter, quiet)
        elif isinstance(node, SCOPES):
            self.bound |= set(stores([node]))
        elif isinstance(node, ast.If | ast.IfExp | LOOPS | ast.Match):
            self._branch(node, quiet)
        elif isinstance(node, ast.Try | ast.TryStar):
            self._try(node, quiet)
        elif isinstance(node, ast.With | ast.AsyncWith):
            for item in node.items:
                context = item.context_expr
                self.go_on([context], quiet)
                self.bound |= set(stores([item]))
                quiet = quiet or (isinstance(context, ast.Call) and called(context) == "suppress")
            self.go_on(node.body, quiet)
        elif isinstance(node, ast.BoolOp):
            for value in node.values:
                self._enter(value, quiet)
                quiet = quiet or self.guards(value)
        else:
            self._plain(node, quiet)

    def _plain(self, node: ast.AST, quiet: bool) -> None:
        self.bound |= {x.target.id for x in of_kind(node, ast.NamedExpr)}
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):  # ``x += 1`` reads x
            self._enter(ast.copy_location(ast.Name(node.target.id, ast.Load()), node), quiet)
        for child in ast.iter_child_nodes(node):
            self._enter(child, quiet)
        self.bound |= set(stores([node])) if isinstance(node, ast.stmt) else set()
        self.over = self.over or (isinstance(node, ast.Assert) and self.guards(node.test))

    def _branch(self, node: ast.If | ast.IfExp | LOOPS | ast.Match, quiet: bool) -> None:
        if isinstance(node, ast.Match):
            tests = [node.subject, *(x.guard for x in node.cases if x.guard is not None)]
            self.bound |= set(stores(x.pattern for x in node.cases))
            blocks = [x.body for x in node.cases]
        else:
            tests = [node.iter if isinstance(node, ast.For | ast.AsyncFor) else node.test]
            if isinstance(node, LOOPS):  # a later pass may read what an earlier one has set
                self.bound |= set(stores(x for x in of_kind(node, ast.stmt) if x not in self.inner))
            blocks = [node.body, node.orelse] if not isinstance(node, ast.IfExp) else []
        self._enter(tests[0], quiet)
        guarded = any(map(self.guards, tests))
        if isinstance(node, ast.IfExp):
            self.go_on([node.body, node.orelse], quiet or guarded)
        for statements in blocks:
            self.go_on(statements, quiet or guarded)
            self.over = self.over or (guarded and _leaves(statements))

    def _try(self, node: ast.Try | ast.TryStar, quiet: bool) -> None:
        catches = any(x.type is None or _names(x.type) & _CATCHES for x in node.handlers)
        self.go_on(node.body, quiet or catches)
        for handler in node.handlers:
            self.bound |= {handler.name} if handler.name else set()
            self.go_on(handler.body, quiet)
        self.go_on(node.orelse, quiet or catches)
        self.go_on(node.finalbody, quiet)
        self.over = self.over or (catches and any(_leaves(x.body) for x in node.handlers))

    def guards(self, test: ast.AST) -> bool:
        """Return whether ``test`` may tell a bare step from another one."""
        nodes = walked(test)
        plain = {id(x.value) for x in nodes if isinstance(x, ast.Attribute) and x.attr in _PLAIN_USES}
        # A joining replica's first step may pass a comparison with a multiple, or with a least number.
        periodic: list[ast.AST] = [x for x in nodes if isinstance(x, ast.BinOp) and isinstance(x.op, ast.Mod)]
        periodic += [x for x in nodes if isinstance(x, ast.Compare) and not set(map(type, x.ops)) - _LEAST]
        compared = {id(y) for x in periodic for y in walked(x)}
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


# --- the parts of a source ----------------------------------------------------------------------------------


def _loop_at(source: str, line: int) -> ast.For | None:
    """Return the one ``for`` statement whose head has this line."""
    tree = parsed(source)
    loops = of_kind(tree, ast.For) if tree is not None else []
    loops = [x for x in loops if x.lineno <= line <= (x.iter.end_lineno or x.lineno)]
    return loops[0] if len(loops) == 1 else None


def _passes_on(loop: ast.For | None) -> bool:
    """Return whether a loop yields what it iterates, as that of a progress bar does."""
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
    return {x.id for x in of_kind(node, ast.Name)}


def _leaves(statements: Iterable[ast.AST]) -> bool:
    return any(isinstance(x, _EXITS) for statement in statements for x in walked(statement))


def _is_shared(node: ast.AST) -> bool:
    """Whether a node reads a step's number or another value that is equal on all replicas."""
    return any(x.attr in _SHARED for x in of_kind(node, ast.Attribute))
