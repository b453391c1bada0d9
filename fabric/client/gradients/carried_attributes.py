"""Finds what forward carries from one micro-batch to the next in plain attributes of modules.

The hidden state of a recurrent network, or a counter of calls, is often an attribute and no buffer. It is no
part of the shared state: each replica would carry the values of its own micro-batches, and a replica that
joins has none. The source of forward tells which attributes it reads before it sets them. The first forward
passes then show whether an operation gets such a value of another micro-batch, or whether the loop resets
it.
"""

import ast
import contextlib
import inspect
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric.errors import ConfigError
from fabric.model import Value

_LOOKS = 8  # steps of this process that are looked at
_GROWTHS = 3  # a value that is set under a condition, such as a cache, must change in that many micro-batches
_FRAMEWORKS = {"torch", "lightning", "pytorch_lightning", "torchmetrics"}  # their methods carry nothing
_BRANCHES = ast.If | ast.For | ast.While | ast.Try | ast.Match | ast.IfExp | ast.FunctionDef | ast.Lambda


class ReadAttribute(Value):
    """An attribute of ``module`` that forward may carry."""

    module: torch.nn.Module
    name: str
    full_name: str  # with the module's place in the model
    changes: int  # so many changes show that it is carried
    counts: bool  # forward sets it to a value made of its old one: numbers count too


def read_attributes(model: torch.nn.Module) -> Iterator[ReadAttribute]:
    """Yield the attributes that forward may carry."""
    by_kind: dict[type, _ForwardSource] = {}
    for place, module in model.named_modules():
        kind = type(module)
        if kind not in by_kind:
            by_kind[kind] = _ForwardSource(kind)
        source, tensors = by_kind[kind], {*module._parameters, *module._buffers, *module._modules}  # noqa: SLF001
        for name, changes in source.carried().items():
            if name not in tensors:
                full_name = f"{place}.{name}" if place else name
                yield ReadAttribute(module, name, full_name, changes, name in source.updated)


class _Uses(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which of ``tensors`` the operations of torch get."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors = {id(x): x for x in tensors}
        self.used: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            if id(value) in self._tensors:
                self.used.add(id(value))
        return func(*args, **(kwargs or {}))


class CarriedAttributes:
    """Watches the attributes of ``model`` that forward may carry, except those in ``named``."""

    def __init__(self, model: torch.nn.Module, named: Collection[str]) -> None:
        self._watched: dict[int, list[ReadAttribute]] = {}
        self._needed: dict[str, int] = {}
        for x in read_attributes(model):
            if x.full_name not in named:
                self._watched.setdefault(id(x.module), []).append(x)
                self._needed[x.full_name] = x.changes
        self._batch = self._looks = 0
        self._outer: torch.nn.Module | None = None  # the module whose training_step runs
        self._left: dict[str, tuple[int, list[Any]]] = {}  # the micro-batch of the last forward, its value
        self._came: dict[str, list[Any]] = {}  # values of another micro-batch with which a forward began
        self._uses: dict[int, _Uses] = {}  # by module: the uses of such tensors in the forward under way
        self._changes: Counter[str] = Counter()
        # Hooks of all modules, because a module's own hooks go into copies of it and into files.
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after, always_call=True),
        ]
        if not self._watched:
            self._end()

    def next_batch(self) -> None:
        """Note that the forward passes of another micro-batch follow."""
        self._batch += 1

    def check(self) -> None:
        """Raise ConfigError for the first attribute that forward has carried."""
        for name, changes in self._changes.items():
            if changes >= self._needed[name]:
                self._end()
                raise ConfigError(
                    f"the model carries {name!r} from one micro-batch to the next, and each replica would "
                    "carry another value: reset it in each micro-batch, make it a buffer (register_buffer) "
                    f'with a choice in buffers=, or say buffers={{"{name}": "ignore"}} where each may keep '
                    "its own"
                )
        self._looks += 1
        if self._looks == _LOOKS:
            self._end()

    @contextlib.contextmanager
    def method_of(self, module: torch.nn.Module) -> Iterator[None]:
        """Enclose a call of ``training_step``, which no hook of torch sees."""
        self._before(module, None)
        self._outer = module
        try:
            yield
        finally:
            self._outer = None
            self._after(module)

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._watched.clear()
        self._left.clear()
        self._came.clear()

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not module.training or module is self._outer:
            return
        tensors: list[torch.Tensor] = []
        for x in self._watched.get(id(module), ()):
            batch, value = self._left.get(x.full_name, (self._batch, []))
            if batch < self._batch and value and _is_same(value, _value_of(x)):
                self._came[x.full_name] = value
                tensors += [part for part in value if isinstance(part, torch.Tensor)]
        if tensors and id(module) not in self._uses:  # a module may call itself
            self._uses[id(module)] = _Uses(tensors)
            self._uses[id(module)].__enter__()  # type: ignore[no-untyped-call]

    def _after(self, module: torch.nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or module is self._outer:
            return
        uses = self._uses.pop(id(module), None)
        if uses is not None:
            uses.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        for x in self._watched.get(id(module), ()) if module.training else ():
            value, came = _value_of(x), self._came.pop(x.full_name, [])
            used = uses is not None and any(id(part) in uses.used for part in came)
            if came and value and not _is_same(came, value):
                self._changes[x.full_name] += used or all(isinstance(part, int | float) for part in came)
            self._left[x.full_name] = (self._batch, value)


def _value_of(attribute: ReadAttribute) -> list[Any]:
    value = attribute.module.__dict__.get(attribute.name)
    parts = _parts(value)
    # A tuple of whole numbers is the size for which a module has made its cache.
    is_size = isinstance(value, tuple) and all(isinstance(x, int) for x in parts)
    return [] if (is_size or isinstance(value, int | float)) and not attribute.counts else parts


def _parts(value: Any) -> list[Any]:
    """Return the numbers and tensors in ``value``, with versions and sums of tensors; for others none."""
    if isinstance(value, torch.Tensor):
        has_sum = value.is_floating_point() and value.element_size() > 1  # torch has none for 8 bits
        is_plain = value.layout == torch.strided and has_sum and not value.is_meta
        total = float(value.detach().sum()) if is_plain else 0.0  # a write through .data counts no version
        return [value, 0 if value.is_inference() else value._version, total]  # noqa: SLF001
    if isinstance(value, bool) or not isinstance(value, int | float | list | tuple | dict):
        return []
    if isinstance(value, int | float):
        return [value]
    return [x for part in (value.values() if isinstance(value, dict) else value) for x in _parts(part)]


def _is_same(left: list[Any], right: list[Any]) -> bool:
    return len(left) == len(right) and all(
        x is y if isinstance(x, torch.Tensor) or isinstance(y, torch.Tensor) else x == y
        for x, y in zip(left, right, strict=True)
    )


class _ForwardSource:
    """The source of a module's forward, and of the methods that forward calls."""

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self._seen: set[str] = set()
        self._read: set[str] = set()  # attributes that are read before they are surely set
        self._set: set[str] = set()  # attributes that every call sets
        self._changed: set[str] = set()  # attributes that a call may set or change
        self.updated: set[str] = set()  # attributes that are set to a value made of their old one
        self._me = ""
        self._fresh: set[str] = set()  # attributes that the method has set to a value without its old one
        for entry in ("forward", "training_step"):
            self.method(entry, guarded=False)

    def carried(self) -> dict[str, int]:
        """Return the attributes that forward may carry, with the changes that show it."""
        return {name: 1 if name in self._set else _GROWTHS for name in sorted(self._read & self._changed)}

    def method(self, name: str, guarded: bool) -> None:
        """Go through a method. ``guarded``: its call depends on a condition."""
        function = getattr(self._kind, name, None)
        function = inspect.unwrap(function) if function is not None else None
        if name in self._seen or not isinstance(function, FunctionType):
            return
        self._seen.add(name)
        if (function.__module__ or "").partition(".")[0] in _FRAMEWORKS:
            return
        try:
            tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
        except (OSError, TypeError, SyntaxError, ValueError):
            return
        if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
            return
        outer = self._me, self._fresh
        self._me, self._fresh = tree.args.args[0].arg, set()
        for statement in tree.body:
            self._visit(statement, guarded)
        self._me, self._fresh = outer

    def _visit(self, node: ast.AST, guarded: bool) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
            self._assignment(node, guarded)
        elif isinstance(node, ast.Expr) and (call := self._change(node.value)) is not None:
            for part in (*call.args, *call.keywords):
                self._visit(part, guarded)
        elif isinstance(node, ast.Attribute) and (name := self._own(node)):
            if not isinstance(node.ctx, ast.Store):
                self._read_of(name, guarded)
                return
            self._changed.add(name)
            self._fresh.add(name)
            if not guarded:
                self._set.add(name)
        elif isinstance(node, _BRANCHES):
            first = node.test if isinstance(node, ast.If | ast.While | ast.IfExp) else None
            if first is not None:
                self._visit(first, guarded)
            self._branches([x for x in ast.iter_child_nodes(node) if x is not first], node)
        else:
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                self._changed.add(self._root(node))
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                # A call of an attribute's method may change it where torch's names say so: ``copy_``.
                self._changed |= {self._root(node.func.value)} if node.func.attr.endswith("_") else set()
            for child in ast.iter_child_nodes(node):
                self._visit(child, guarded)

    def _branches(self, parts: list[ast.AST], node: ast.AST) -> None:
        """Go through what may be left out; what both branches of an ``if`` set is set after it."""
        blocks = [node.body, node.orelse] if isinstance(node, ast.If) else [parts]
        before, after = self._fresh, []
        for block in blocks:
            self._fresh = set(before)
            for part in block:
                self._visit(part, guarded=True)
            after.append(self._fresh)
        self._fresh = set.intersection(*after) if isinstance(node, ast.If) else before

    def _assignment(self, node: ast.Assign | ast.AnnAssign | ast.AugAssign, guarded: bool) -> None:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        own = self._own(targets[0]) if len(targets) == 1 else ""
        inside = [self._own(x) for x in ast.walk(node.value)] if node.value is not None else []
        if own and (isinstance(node, ast.AugAssign) or own in inside):
            # ``self.calls += 1`` alone moves no weight: a later read of the attribute counts.
            for name in inside:
                if name != own:
                    self._read_of(name, guarded)
            self._set |= set() if guarded else {own}
            self._changed.add(own)
            self.updated.add(own)
            return
        for part in (node.value, *targets):
            if part is not None:
                self._visit(part, guarded)

    def _change(self, node: ast.AST) -> ast.Call | None:
        """Return a call that only changes an attribute, as ``self.losses.append(x)`` does as a statement."""
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = self._root(node.func.value)
            self._changed.add(name)
            return node if name else None
        return None

    def _root(self, node: ast.AST) -> str:
        """Return the attribute in which ``self.hidden[0].data`` lies; empty for another expression."""
        while isinstance(node, ast.Attribute | ast.Subscript) and not self._own(node):
            node = node.value
        return self._own(node)

    def _read_of(self, name: str, guarded: bool) -> None:
        if isinstance(getattr(self._kind, name, None), FunctionType):
            self.method(name, guarded)
        elif name and name not in self._fresh:
            self._read.add(name)

    def _own(self, node: ast.AST) -> str:
        """Return the name of an attribute of the module; empty for another expression."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return node.attr if node.value.id == self._me else ""
        return ""
