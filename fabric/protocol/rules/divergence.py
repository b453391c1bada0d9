"""Where the states of members differ. Numbers and samples of tensors go with the digest of a state.

If a number differs, the script is nearly always wrong there. A tensor that differs in its samples was
computed in another way. If no sample differs, only a few bytes do, as after a fault of a host's memory.
"""

from collections.abc import Mapping

from fabric.model import first_of, printable

Entries = tuple[tuple[str, str], ...]

# The most numbers and the most groups of tensors that go with a state's digest, their longest texts, and the
# most differences in a sentence.
MAX_NUMBERS = 64
MAX_TENSORS = 64
MAX_ENTRIES = MAX_NUMBERS + MAX_TENSORS
MAX_PATH = 100
MAX_VALUE = 32
_NAMED = 3
# The path of a tensor's entry begins with this mark and the tensor's kind.
TENSOR_MARK = "~"
_SOURCES = {
    "parameter": "likely an update with random numbers of each replica's own, or code that writes to a"
    " parameter outside of the update: draw from a generator that all replicas share",
    "buffer": "likely forward changes this buffer by each replica's own data: choose how buffers are shared"
    " (buffers=), or do not keep it in the state (persistent=False)",
    "optimizer": "likely a schedule, a scaler or random numbers that are not shared state steer the update:"
    " share the object",
    "object": "likely a callback, a counter or a generator that each replica changes by its own data: change"
    " it by what all replicas have alike, or keep it out of the shared state",
}
MEMORY = "only a few bytes differ: check these hosts' memory"


def bounded(entries: Entries) -> Entries:
    """Cut ``entries``, each a (path, value), to the size that may be sent."""
    return tuple(
        (printable(path[:MAX_PATH]), printable(value[:MAX_VALUE])) for path, value in entries[:MAX_ENTRIES]
    )


def differences(entries: Mapping[str, Entries]) -> str:
    """Name the first entries that differ, with every value; empty for fewer than two members."""
    states = {name: dict(bounded(pairs)) for name, pairs in sorted(entries.items()) if pairs}
    if len(states) < 2:
        return ""
    parted: list[str] = []
    places: list[str] = []
    for path in dict.fromkeys(path for state in states.values() for path in state):
        by_value: dict[str, list[str]] = {}
        for name, state in states.items():
            by_value.setdefault(state.get(path, "nothing"), []).append(name)
        if len(by_value) > 1 and path.startswith(TENSOR_MARK):
            places.append(path)
        elif len(by_value) > 1:
            values = ", ".join(f"{value} on {first_of(names)}" for value, names in by_value.items())
            parted.append(f"{path}: {values}")
    if parted:
        more = f", and {len(parted) - _NAMED} more" if len(parted) > _NAMED else ""
        kind = "optimizer" if parted[0].startswith("optimizer") else "object"
        return f"they differ in {'; '.join(parted[:_NAMED])}{more}; {_SOURCES[kind]}"
    if places:
        kind, _, name = places[0].removeprefix(TENSOR_MARK).partition(" ")
        more = f" (and {len(places) - 1} more)" if len(places) > 1 else ""
        return f"the first tensor that differs is {name}{more}; {_SOURCES.get(kind, _SOURCES['object'])}"
    if all(any(path.startswith(TENSOR_MARK) for path in state) for state in states.values()):
        return f"their numbers and the samples of their tensors are equal, so {MEMORY}"
    return "their learning rates and other numbers are equal, so a tensor differs"
