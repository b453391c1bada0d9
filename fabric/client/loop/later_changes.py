"""Reads the loops around a training for what they change after its first step, and the job cannot follow.

A loop that makes its optimizer again trains a second time. One that freezes or unfreezes a part of the model
in a later epoch changes what is exchanged. Both are refused before the first step, where the source shows
them. Where it does not, the watches of the training end it later.
"""

import ast
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch

from fabric.client.gradients.bucket_stream import changed_early
from fabric.client.loop.loop_flow import (
    LOOPS,
    called,
    calls,
    carry,
    dotted,
    early_change,
    holder,
    inside,
    made_from,
    names_read,
    of_kind,
    stores,
    walked,
)
from fabric.client.loop.unshared_objects import OptimizerWatch, belongs
from fabric.client.loop.user_functions import (
    RunningSource,
    UserFunction,
    attributes_of,
    callee,
    function_of,
    functions_in,
    functions_of,
    is_of_user,
    loops_around,
    search,
    value_of,
)
from fabric.errors import ConfigError
from fabric.model import Value

ONE_TRAINING = (
    "make it once before the loop, or run each training as a job of its own, in a process of its own"
)
SAME_PARAMETERS = (
    "let it require gradients all the time, and give it to the optimizer later or set the learning rate of "
    "its group to 0"
)
_LIBRARIES = ("fabric", "transformers", "trl", "lightning", "pytorch_lightning")  # that have a Trainer
_DEPTH = 3  # functions that call one another
# Methods of Lightning and transformers that run in a training, and attributes that count there.
_HOOKS = ("on_train", "on_epoch", "on_step", "training_step", "compute_loss", "optimizer_step")
_EARLY = ("backward", "on_after_backward")  # methods that run right after a backward pass
_COUNTS = ("current_epoch", "epoch", "global_step", "step", "batch_idx")
_LATE = "(late)"  # a name that no source has
_ALL = ("parameters", "named_parameters", "modules", "children", "named_children", "values", "items")


def made_each_pass(source: RunningSource) -> Iterator[tuple[ast.Assign, Any]]:
    """Yield each assignment of an object that a class or function makes in each pass, and the object.

    A loop that chooses its passes, as one that goes to one fold, has none.
    """
    if isinstance(source.node, LOOPS) and _chooses(source.node):
        return
    branches = of_kind(source.node, ast.If, ast.Match, ast.ExceptHandler)
    at_times = {y for x in branches for y in walked(x)}
    for x in (y for y in walked(source.node) if y not in at_times):
        if isinstance(x, ast.Assign) and isinstance(x.value, ast.Call):
            maker = callee(source.values, dotted(x.value.func))
            for name in stores(x.targets):
                value = value_of(source.values, name)
                if value is not None and makes(maker, type(value)):
                    yield x, value


def repeated(frame: FrameType | None) -> Iterator[list[RunningSource]]:
    """Yield, from ``frame`` outward, each loop that may run more than once, and the functions within it.

    Only the outermost loop of a frame counts. The functions are those that a ``for`` loop has called by now,
    because a ``while`` loop may be that of a server. The process that has forked this one has its own loops.
    """
    loops = {id(x): around for x, around in loops_around(frame)}
    within: list[RunningSource] = []
    for x in _frames_since_fork(frame):
        around = (RunningSource.of(x, loop) for loop in loops.get(id(x), ()))
        source = next((y for y in around if not _runs_once(y)), None)
        if source is not None:
            calls_each = isinstance(source.node, ast.For) and not _chooses(source.node, x.f_lineno)
            yield [source, *(within if calls_each else ())]
        code = x.f_code
        if is_of_user(code.co_filename) and code.co_flags & inspect.CO_NEWLOCALS:
            node = functions_of(code.co_filename).get(code.co_firstlineno)
            within += [RunningSource.of(x, node)] if node is not None else []


def _frames_since_fork(frame: FrameType | None) -> list[FrameType]:
    """Return the frames from this one outward that have begun in this process."""
    frames: list[FrameType] = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames[: len(frames) - _frames_at_fork[0]]


_frames_at_fork = [0]  # how many frames the forking process had


def _after_fork() -> None:
    _frames_at_fork[0] = 0
    _frames_at_fork[0] = len(_frames_since_fork(sys._getframe(1)))  # noqa: SLF001


os.register_at_fork(after_in_child=_after_fork)


@search(None)
def refuse_later_changes(frame: FrameType | None, model: torch.nn.Module, watch: OptimizerWatch) -> None:
    """Raise ConfigError where a loop around ``frame`` trains again, or changes what requires gradients.

    Also where it lets an optimizer make steps that ``watch`` would refuse later.
    """
    optimizers, states = watch.attached, _States({id(p) for p in model.parameters()})
    for sources in repeated(frame):
        for optimizer in _stepping(sources[0]):
            if not belongs(optimizer, optimizers):
                watch.refuse(optimizer, lasts=True)
        for source in sources:
            for statement, value in made_each_pass(source):
                if any(value is x for x in optimizers) or _trains(value, optimizers):
                    raise ConfigError(
                        f"{source.place(statement)} makes a new {type(value).__name__} in each pass of a "
                        f"loop, and a job is one training: {ONE_TRAINING}"
                    )
        loop = sources[0].node
        inner = of_kind(loop, ast.For, ast.AsyncFor)
        carried = dict[str, int]()
        carry([loop], set(), carried)  # type: ignore[list-item]
        counts = {name for x in inner for name in stores([x.target])} | set(carried)
        states.refuse(sources[0], made_from(loop, counts))


@search(None)
def refuse_later_hooks(things: Iterable[Any], given: Mapping[str, Any], model: torch.nn.Module) -> None:
    """Raise ConfigError where a hook of ``things`` changes in a later step what requires gradients.

    ``given``: names of the hooks' arguments with what they get.
    """
    states = _States({id(p) for p in model.parameters()})
    for function in (x for thing in things for x in functions_in(thing, given)):
        if function.name.startswith(_HOOKS):
            tests = [x.test for x in of_kind(function.node, ast.If)]
            counts = {x for x in names_read(function.node) if x.rpartition(".")[2] in _COUNTS}
            source = RunningSource(function.node, function.values, function.file)
            states.refuse(source, counts.union(*map(names_read, tests)))


def refuse_early_changes(things: Iterable[Any]) -> None:
    """Raise ConfigError where a hook of ``things`` changes gradients before all replicas' are averaged."""
    for function in (x for thing in things for x in functions_in(thing) if x.name in _EARLY):
        if line := early_change(function.node):
            where = f"{function} ({function.place(line)})"
            raise changed_early(f"{where} changes gradients", own_loop=False)


def refuse_changed_batches(things: Iterable[Any]) -> None:
    """Raise ConfigError where ``on_train_batch_start`` of ``things`` changes the batch in place."""
    for function in (x for thing in things for x in functions_in(thing) if x.name == "on_train_batch_start"):
        names = made_from(function.node, {"batch"})
        changing = [x.func for x in of_kind(function.node, ast.Call) if called(x).endswith("_")]
        changed = [x.value for x in changing if isinstance(x, ast.Attribute)]
        changed += [x for x in of_kind(function.node, ast.Subscript) if isinstance(x.ctx, ast.Store)]
        for x in (x for x in changed if holder(x).partition(".")[0] in names):
            raise ConfigError(
                f"{function} ({function.place(x.lineno)}) changes the batch, and does not run for what a "
                "replica computes of a dead one: change it in on_after_batch_transfer"
            )


def _stepping(loop: RunningSource) -> Iterator[torch.optim.Optimizer]:
    """Yield the optimizers that a loop lets make a step, and has not made itself."""
    own = set(stores([loop.node]))
    for x in calls(loop.node, "step"):
        if isinstance(x.func, ast.Attribute):
            value = value_of(loop.values, dotted(x.func.value))
            if isinstance(value, torch.optim.Optimizer) and dotted(x.func.value) not in own:
                yield value


def makes(maker: Any, kind: type, depth: int = 0) -> bool:
    """Return whether a call of ``maker`` makes an object of a class: it is this class, or calls it."""
    if isinstance(maker, type):
        return maker is not object and issubclass(kind, maker)
    function = function_of(maker) if depth < _DEPTH else None
    return function is not None and _makes_in(function, kind, depth + 1)


def _makes_in(function: UserFunction, kind: type, depth: int = 0) -> bool:
    calls = [dotted(x.func) for x in of_kind(function.node, ast.Call)]
    return any(makes(callee(function.values, name), kind, depth) for name in calls)


def _trains(value: Any, optimizers: list[torch.optim.Optimizer]) -> bool:
    """Whether an object is a framework's Trainer, or one of the user's that has made its optimizer itself."""
    kind: Any = type(value)
    if any(x.__name__ == "Trainer" and x.__module__.partition(".")[0] in _LIBRARIES for x in kind.__mro__):
        return True
    own = {id(x) for x in attributes_of(value).values()}
    kinds = {type(x) for x in optimizers if id(x) in own}
    return any(_makes_in(function, x) for x in kinds for function in functions_in(value))


def _chooses(loop: ast.stmt, line: int = 0) -> bool:
    """Whether a loop leaves passes out, or ends, by a test, or comes to ``line`` by one."""
    leaves = {x for x, is_own in inside(loop) if is_own and isinstance(x, ast.Continue | ast.Break)}
    tests = of_kind(loop, ast.If, ast.Match)
    return any(x.lineno <= line <= (x.end_lineno or 0) or leaves.intersection(walked(x)) for x in tests)


def _runs_once(source: RunningSource) -> bool:
    """Whether a loop has one pass: it goes over one thing, or ends its pass by ``break`` or ``return``."""
    loop = source.node
    for node, is_own in inside(loop):
        if isinstance(node, ast.Return) or (isinstance(node, ast.Break) and is_own):
            branches = of_kind(loop, ast.If, ast.Match, ast.ExceptHandler)
            if not any(node in walked(x) for x in branches):
                return True
    if not isinstance(loop, ast.For | ast.AsyncFor):
        return False
    over = loop.iter
    if isinstance(over, ast.List | ast.Tuple):
        return len(over.elts) == 1
    if isinstance(over, ast.Call) and called(over) == "range" and len(over.args) == 1:
        return bool(source.value(over.args[0]) == 1)
    given = value_of(source.values, dotted(over))
    return isinstance(given, list | tuple | dict) and len(given) == 1


# --- what requires gradients --------------------------------------------------------------------------------


class _States(Value):
    """Finds what freezes or unfreezes parts of a model. ``parameters``: the ids of those of the model."""

    parameters: set[int]

    def refuse(self, source: RunningSource, changing: set[str]) -> None:
        """Raise ConfigError where a source does so in a later pass. ``changing``: names that change by then.

        A loop that does both goes to and fro within a step, as that of a GAN.
        """
        sets = list(self._sets(source, changing))
        late = [(node, state) for node, state, is_later in sets if is_later]
        if late and len({state for _, state, _ in sets}) == 1:
            node, state = late[0]
            raise ConfigError(
                f"{source.place(node)} {'unfreezes' if state else 'freezes'} a part of the model in a later "
                f"step, and the job exchanges what requires gradients at its first step: {SAME_PARAMETERS}"
            )

    def _sets(
        self, source: RunningSource, changing: set[str], depth: int = 0
    ) -> Iterator[tuple[Any, bool, bool]]:
        """Yield each node that sets a state, the state, and whether it changes one in a later pass."""
        tests = [x for x in of_kind(source.node, ast.If) if names_read(x.test) & changing]
        under = {y for x in tests for part in (*x.body, *x.orelse) for y in walked(part)}
        for x in walked(source.node):
            target, value = _sets_state(x)
            if target is not None and value is not None:
                things = _things(source, target)
                parts = [list(x.parameters() if isinstance(x, torch.nn.Module) else [x]) for x in things]
                of_model = [own for own in parts if any(id(p) in self.parameters for p in own)]
                states = [p.requires_grad for own in of_model for p in own]
                given = source.value(value)
                is_late = x in under or bool(names_read(value) & changing)
                wants = not all(states) if names_read(value) & changing or given is None else bool(given)
                if states:
                    yield x, wants, is_late and any(state != wants for state in states)
            elif isinstance(x, ast.Call) and depth < _DEPTH and dotted(x.func):
                for inner, late in _entered(source, x, x in under, changing):
                    yield from ((x, wants, later) for _, wants, later in self._sets(inner, late, depth + 1))


def _entered(
    source: RunningSource, call: ast.Call, is_late: bool, changing: set[str]
) -> Iterator[tuple[RunningSource, set[str]]]:
    """Yield the user's function that a call runs, and its names that have another value in a later pass.

    ``is_late``: the call itself comes in a later pass, so that all of the function does.
    """
    function = function_of(callee(source.values, dotted(call.func)))
    if function is None:
        return
    given, names, defaults = function.given_by(call), function.arguments, function.function.__defaults__ or ()
    values = {**function.values, **dict(zip(names[len(names) - len(defaults) :], defaults, strict=False))}
    values |= {name: source.value(x) for name, x in given.items()}
    late = {name for name, x in given.items() if names_read(x) & changing}
    node = ast.If(ast.Name(_LATE, ast.Load()), function.node.body, []) if is_late else function.node
    yield RunningSource(node, values, function.file), late | {_LATE}


def _sets_state(node: ast.AST) -> tuple[ast.expr | None, ast.expr | None]:
    """Return the thing whose ``requires_grad`` a node sets, and the expression of the new value."""
    if isinstance(node, ast.Assign):
        target = node.targets[0]
        if isinstance(target, ast.Attribute) and target.attr == "requires_grad":
            return target.value, node.value
    elif (
        isinstance(node, ast.Call)
        and called(node) == "requires_grad_"
        and isinstance(node.func, ast.Attribute)
    ):
        given = [*node.args, *(x.value for x in node.keywords)]
        return node.func.value, given[0] if given else ast.Constant(True)
    return None, None


def _things(source: RunningSource, target: ast.expr) -> Iterator[Any]:
    """Yield the objects that an expression names: also those over which its name goes in a loop."""
    name = dotted(target)
    loops = [x for x in of_kind(source.node, ast.For) if name in set(stores([x.target]))]
    for loop in loops:
        over = loop.iter
        while isinstance(over, ast.Call) and called(over) in _ALL and isinstance(over.func, ast.Attribute):
            over = over.func.value
        yield from _things(source, over)
    while isinstance(target, ast.Subscript):
        target = target.value
    if not loops and (value := value_of(source.values, dotted(target))) is not None:
        yield value
