"""When which fragment of the model is exchanged. Pure.

An outer step is a step of the job. Outer step s exchanges fragment s % fragments, and comes after every
``every / fragments`` inner steps, so each fragment is exchanged once in ``every`` inner steps (streaming
DiLoCo, arXiv 2501.18512, with fragments of consecutive parameters).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from fabric.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OuterSchedule:
    """The numbers given to ``fabric.client.diloco``. Raises ConfigError for those that do not fit."""

    every: int  # inner steps between two exchanges of the same parameter
    fragments: int = 1
    delay: int = 0  # inner steps from a contribution to the use of its result
    alpha: float = 0.0  # share of the local parameters in the mix after an outer step

    def __post_init__(self) -> None:
        for name, value, least in (("every", self.every, 1), ("fragments", self.fragments, 1)):
            if not is_whole(value) or value < least:
                raise ConfigError(f"{name} is {value!r}: give a whole number from {least}")
        if self.every % self.fragments:
            raise ConfigError(
                f"every is {self.every} and fragments is {self.fragments}: give an every that is a multiple "
                "of fragments, because fragments take turns at equal distances"
            )
        if not is_whole(self.delay) or not 0 <= self.delay < self.span:
            raise ConfigError(
                f"delay is {self.delay!r}: give a whole number from 0 to {self.span - 1}, so that one "
                f"fragment's exchange ends before the next begins (every / fragments is {self.span})"
            )
        if not isinstance(self.alpha, int | float) or not 0 <= self.alpha <= 1:
            raise ConfigError(
                f"alpha is {self.alpha!r}: give a number from 0 (global) to 1 (local parameters)"
            )

    @property
    def span(self) -> int:
        """The inner steps of one outer step."""
        return self.every // self.fragments

    def describe(self) -> dict[str, object]:
        """Return what must be equal on all members."""
        return {
            "loop": "diloco",
            "every": self.every,
            "fragments": self.fragments,
            "delay": self.delay,
            "alpha": float(self.alpha),
        }


def cut_fragments(sizes: Sequence[int], fragments: int) -> list[int]:
    """Return the fragment of each parameter: consecutive parameters, of about equal total size.

    ``sizes``: the elements of each parameter. Each fragment gets a parameter. Raises ConfigError.
    """
    if fragments > len(sizes):
        raise ConfigError(
            f"fragments is {fragments} and the model has {len(sizes)} trainable parameters: give at most one "
            "fragment per parameter"
        )
    chosen: list[int] = []
    total, before, fragment = sum(sizes), 0, 0
    for place, size in enumerate(sizes):
        left = len(sizes) - place
        must = left == fragments - fragment - 1  # each parameter that is left begins a fragment
        full = before + size / 2 > total * (fragment + 1) / fragments
        if place and chosen[-1] == fragment and fragment + 1 < fragments and (must or full):
            fragment += 1
        chosen.append(fragment)
        before += size
    return chosen


def is_whole(value: object) -> bool:
    """Whether ``value`` is a whole number."""
    return isinstance(value, int) and not isinstance(value, bool)
