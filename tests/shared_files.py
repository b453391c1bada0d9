"""Divides the files of tests among several runs: each run takes the next file that no other run has begun."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def begun_here(items: Iterable[pytest.Item], folder: Path) -> Iterator[pytest.Item]:
    """Yield the tests of each file that no other run has begun."""
    own: dict[Path, bool] = {}
    for item in items:
        if item.path not in own:
            mark = folder / str(item.path.relative_to(TESTS)).replace("/", "+")
            try:
                mark.touch(exist_ok=False)
            except FileExistsError:
                own[item.path] = False
            else:
                own[item.path] = True
        if own[item.path]:
            yield item
