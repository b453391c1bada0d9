"""Robust statistics and small linear systems, for samples of a few hundred."""

from collections.abc import Sequence
from statistics import median

Row = list[float]


def spread(values: Sequence[float], centre: float) -> float:
    """The standard deviation, estimated from the median distance to ``centre`` (1.4826 MAD)."""
    return 1.4826 * median([abs(value - centre) for value in values])


def solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> Row | None:
    """The solution of a small system, or None where it is singular."""
    size = len(right)
    rows = [[*matrix[i], right[i]] for i in range(size)]
    for column in range(size):
        pivot = max(range(column, size), key=lambda i: abs(rows[i][column]))
        if abs(rows[pivot][column]) < 1e-12:
            return None
        rows[column], rows[pivot] = rows[pivot], rows[column]
        for i in range(column + 1, size):
            factor = rows[i][column] / rows[column][column]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[column], strict=True)]
    solution = [0.0] * size
    for i in reversed(range(size)):
        rest = sum(rows[i][j] * solution[j] for j in range(i + 1, size))
        solution[i] = (rows[i][size] - rest) / rows[i][i]
    return solution


def inverse(matrix: Sequence[Sequence[float]]) -> list[Row] | None:
    """The inverse of a small symmetric matrix, or None where it is singular."""
    size = len(matrix)
    columns = [solve(matrix, [float(i == j) for i in range(size)]) for j in range(size)]
    if any(column is None for column in columns):
        return None
    return [list(column) for column in columns if column is not None]


def dot(a: Sequence[float], b: Sequence[float]) -> float:
    """The scalar product."""
    return sum(x * y for x, y in zip(a, b, strict=True))
