"""Tests that only ``make long`` runs, because a cheaper test in ``make test`` protects the same thing."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_here(protected_by: str, cases: Iterable[Any]) -> list[Any]:
    """Return the cases of a parametrized test: only ``make long`` runs the cases after the first one."""
    first, *others = cases
    mark = pytest.mark.long(protected_by)
    return [first, *(pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=mark) for x in others)]
