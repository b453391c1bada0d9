"""Where the states of members part. Small entries travel with the digests, to be compared where they differ.

A learning rate or a counter that differs is nearly always a mistake in the script, and names itself. Where no
small entry differs, a tensor does.
"""

from collections.abc import Mapping

Entries = tuple[tuple[str, str], ...]

# So much is said of a state, and so many differences are named.
MAX_ENTRIES = 64
MAX_PATH = 100
MAX_VALUE = 32
_NAMED = 3


def bounded(entries: Entries) -> Entries:
    """What may travel of ``entries``, (path, value) each."""
    return tuple((_clean(path, MAX_PATH), _clean(value, MAX_VALUE)) for path, value in entries[:MAX_ENTRIES])


def differences(said: Mapping[str, Entries]) -> str:
    """The first entries that differ, with every value and whose it is; empty where fewer than two members
    have said anything."""
    known = {name: dict(bounded(entries)) for name, entries in sorted(said.items()) if entries}
    if len(known) < 2:
        return ""
    parted = []
    for path in dict.fromkeys(path for entries in known.values() for path in entries):
        by_value: dict[str, list[str]] = {}
        for name, entries in known.items():
            by_value.setdefault(entries.get(path, "nothing"), []).append(name)
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
