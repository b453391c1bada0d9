"""Deliberate bugs as small changes of a rule's source. The changed rule runs in place of the rule, wherever
it was imported, until the end of the test.
"""

import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType
from typing import Any

import pytest


@dataclass(frozen=True)
class Mutant:
    """A rule, the part of its source that changes, and what notices the bug."""

    name: str  # what goes wrong
    rule: Any  # a function, method or property
    before: str
    after: str
    noticed_by: str  # a test below ``tests/``; or a kind of worlds with a seed, as in "order 3"

    @property
    def function(self) -> Callable[..., object]:
        return inspect.unwrap(self.rule.fget if isinstance(self.rule, property) else self.rule)

    def code(self) -> CodeType:
        """Return the code of the changed rule."""
        function = self.function
        source = textwrap.dedent(inspect.getsource(function))
        found = source.count(self.before)
        assert found == 1, f"{function.__qualname__} has {found} times: {self.before}; write the mutant again"
        tree = ast.parse(source.replace(self.before, self.after))
        tree.body[0].decorator_list = []
        names = dict(function.__globals__)
        flags = __future__.annotations.compiler_flag
        exec(compile(tree, function.__code__.co_filename, "exec", flags), names)
        return names[function.__name__].__code__

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Put the changed rule in the place of the rule."""
        patch.setattr(self.function, "__code__", self.code())
