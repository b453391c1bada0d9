"""Finds living objects of this process without harm to its other threads.

A tuple that another thread is just building is among all objects. While anybody else holds it, Python fails
in that thread with a SystemError, and its empty places must not be read. So no line of Python runs while all
objects are held, and a caller gets the contents of tuples in place of the tuples.
"""

import gc
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Set
from functools import partial
from itertools import chain, compress, repeat
from operator import not_
from typing import Any, TypeVar

T = TypeVar("T")
_GENERATIONS = range(3)  # of the collector


def living(*kinds: type) -> list[Any]:
    """Return all living objects of these types. Reading an attribute of others could import a module."""
    return of_types({x for kind in kinds for x in subtypes(kind)})


def subtypes(kind: type) -> set[type]:
    """Return this type and all that inherit from it."""
    return {kind}.union(*map(subtypes, kind.__subclasses__()))


def of_types(types: Set[type]) -> list[Any]:
    """Return all living objects of exactly these types, none of which is ``tuple``."""
    return _at_once(lambda: _those(map(gc.get_objects, _GENERATIONS), type, types.__contains__))


def contents_of_tuples(lengths: range, types: Set[type]) -> list[tuple[int, list[Any]]]:
    """Return the id and the values, the last value first, of each living tuple of such a length that has a
    value of exactly one of ``types``."""
    return _at_once(lambda: _rows_of_tuples(lengths, types))


def _at_once(walk: Callable[[], Iterator[Iterable[T]]]) -> list[T]:
    # A collection within the walk could run finalizers, which are lines of Python.
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        return list(deque(chain.from_iterable(walk())))  # a list would be among the objects that it gets
    finally:
        if was_enabled:
            gc.enable()


def _rows_of_tuples(lengths: range, types: Set[type]) -> Iterator[Iterable[tuple[int, list[Any]]]]:
    tuples = _those(map(gc.get_objects, _GENERATIONS), type, {tuple}.__contains__)
    fitting = _those(tuples, len, lengths.__contains__)
    chosen = _each_twice(_those(fitting, gc.get_referents, partial(map, type), types.isdisjoint, not_))
    return map(zip, map(partial(map, id), chosen), map(partial(map, gc.get_referents), chosen))


def _those(lists: Iterator[list[Any]], *functions: Callable[[Any], Any]) -> Iterator[list[Any]]:
    """Yield of each list the values for which the last function is true of what those before it return."""
    each_twice = _each_twice(lists)
    results: Iterator[Any] = each_twice
    for function in functions:
        results = map(partial(map, function), results)
    return map(list, map(compress, each_twice, results))


def _each_twice(values: Iterator[Any]) -> Iterator[Any]:
    """Yield each value two times in turn (``tee`` would hold values for longer)."""
    return chain.from_iterable(map(repeat, values, repeat(2)))
