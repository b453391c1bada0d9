"""Where the states of members differ. Small entries of a state (learning rates, counters) go with its digest.

If a small entry differs, the script is nearly always wrong there. If none differs, a tensor does.
"""

from collections.abc import Mapping

Entries = tuple[tuple[str, str], ...]

# The most entries that go with a state's digest, their longest texts, and the most differences in a sentence.
MAX_ENTRIES = 64
MAX_PATH = 100
MAX_VALUE = 32
_NAMED = 3


def bounded(entries: Entries) -> Entries:
    """Cut ``entries``, each a (path, value), to the size that may be sent."""
    return tuple((_clean(path, MAX_PATH), _clean(value, MAX_VALUE)) for path, value in entries[:MAX_ENTRIES])


def differences(entries: Mapping[str, Entries]) -> str:
    """Name the first entries that differ, with every value; empty for fewer than two members."""
    states = {name: dict(bounded(pairs)) for name, pairs in sorted(entries.items()) if pairs}
    if len(states) < 2:
        return ""
    parted = []
    for path in dict.fromkeys(path for state in states.values() for path in state):
        by_value: dict[str, list[str]] = {}
        for name, state in states.items():
            by_value.setdefault(state.get(path, "nothing"), []).append(name)
        if len(by_value) > 1:
            values = ", ".join(f"{value} on {_names(names)}" for value, names in by_value.items())
            parted.append(f"{path}: {values}")
    if not parted:
        return "their learning rates and other numbers are equal, so a tensor differs"
    more = f", and {len(parted) - _NAMED} more" if len(parted) > _NAMED else ""
    return f"they differ in {'; '.join(parted[:_NAMED])}{more}"


def _names(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _clean(text: str, length: int) -> str:
    return "".join(c if c.isprintable() else "?" for c in text[:length])
