"""Finds what forward carries from one micro-batch to the next in plain attributes of modules.

The hidden state of a recurrent network, or a counter of calls, is often an attribute and no buffer. It is no
part of the shared state: each replica would carry the values of its own micro-batches, and a replica that
joins has none. The source of forward tells which attributes it reads before it sets them. The first forward
passes then show whether such a value comes from another micro-batch, or whether the loop resets it.
"""

import ast
import inspect
import textwrap
from collections import Counter
from collections.abc import Collection, Iterator
from types import FunctionType
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fabric.errors import ConfigError

_LOOKS = 8  # steps of this process that are looked at
_GROWTHS = 3  # a value that is set under a condition, such as a cache, must change in that many micro-batches
_BRANCHES = ast.If | ast.For | ast.While | ast.Try | ast.Match | ast.IfExp | ast.FunctionDef | ast.Lambda


def read_attributes(model: torch.nn.Module) -> Iterator[tuple[torch.nn.Module, str, str, int]]:
    """Yield each attribute that forward may carry: its module, name, full name, and the changes that show it.

    The full name begins with the module's place in ``model``.
    """
    by_kind: dict[type, dict[str, int]] = {}
    for place, module in model.named_modules():
        kind = type(module)
        if kind not in by_kind:
            by_kind[kind] = _ForwardSource(kind).carried()
        tensors = {*module._parameters, *module._buffers, *module._modules}  # noqa: SLF001
        for name, changes in by_kind[kind].items():
            if name not in tensors:
                yield module, name, f"{place}.{name}" if place else name, changes


class CarriedAttributes:
    """Watches the attributes of ``model`` that forward may carry, except those in ``named``."""

    def __init__(self, model: torch.nn.Module, named: Collection[str]) -> None:
        self._watched: dict[int, list[tuple[str, str]]] = {}
        self._needed: dict[str, int] = {}
        for module, name, full, changes in read_attributes(model):
            if full not in named:
                self._watched.setdefault(id(module), []).append((name, full))
                self._needed[full] = changes
        self._batch = self._looks = 0
        self._left: dict[str, tuple[int, list[Any]]] = {}  # the micro-batch of the last forward, its value
        self._came: dict[str, list[Any]] = {}  # values of another micro-batch with which a forward began
        self._changes: Counter[str] = Counter()
        # Hooks of all modules, because a module's own hooks go into copies of it and into files.
        self._hooks = [
            register_module_forward_pre_hook(self._before),
            register_module_forward_hook(self._after),
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
                    f"forward carries {name!r} from one micro-batch to the next, and each replica would "
                    "carry another value: reset it in each micro-batch, make it a buffer (register_buffer) "
                    f'with a choice in buffers=, or say buffers={{"{name}": "ignore"}} where each may keep '
                    "its own"
                )
        self._looks += 1
        if self._looks == _LOOKS:
            self._end()

    def _end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._left.clear()
        self._came.clear()

    def _before(self, module: torch.nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling() or not module.training:
            return
        for name, full in self._watched.get(id(module), ()):
            batch, value = self._left.get(full, (self._batch, []))
            if batch < self._batch and _is_same(value, _parts(module.__dict__.get(name))):
                self._came[full] = value

    def _after(self, module: torch.nn.Module, *_: Any) -> None:
        if torch.compiler.is_compiling() or not module.training:
            return
        for name, full in self._watched.get(id(module), ()):
            value, came = _parts(module.__dict__.get(name)), self._came.pop(full, None)
            if came and value:
                self._changes[full] += not _is_same(came, value)
            self._left[full] = (self._batch, value)


def _parts(value: Any) -> list[Any]:
    """Return the numbers and tensors in ``value``, with the tensors' versions; for another value none."""
    if isinstance(value, torch.Tensor):
        return [value, 0 if value.is_inference() else value._version]  # noqa: SLF001
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
        self._me = ""
        self._fresh: set[str] = set()  # attributes that the method has set to a value without its old one
        self.method("forward", guarded=False)

    def carried(self) -> dict[str, int]:
        """Return the attributes that forward may carry, with the changes that show it."""
        return {name: 1 if name in self._set else _GROWTHS for name in sorted(self._read)}

    def method(self, name: str, guarded: bool) -> None:
        """Go through a method. ``guarded``: its call depends on a condition."""
        function = getattr(self._kind, name, None)
        function = inspect.unwrap(function) if function is not None else None
        if name in self._seen or not isinstance(function, FunctionType):
            return
        self._seen.add(name)
        if (function.__module__ or "").partition(".")[0] == "torch":
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
        elif isinstance(node, ast.Attribute) and (name := self._own(node)):
            if not isinstance(node.ctx, ast.Store):
                self._read_of(name, guarded)
            elif not guarded:
                self._set.add(name)
                self._fresh.add(name)
        elif isinstance(node, _BRANCHES):
            first = node.test if isinstance(node, ast.If | ast.While | ast.IfExp) else None
            for child in ast.iter_child_nodes(node):
                self._visit(child, guarded or child is not first)
        else:
            for child in ast.iter_child_nodes(node):
                self._visit(child, guarded)

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
            return
        for part in (node.value, *targets):
            if part is not None:
                self._visit(part, guarded)

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
