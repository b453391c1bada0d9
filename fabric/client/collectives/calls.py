"""The agreement of the members on a collective, before its bytes move. Pure.

Each member sends one frame of a fixed size. All members see the same frames, so all of them reach the same
verdict, and a mistake is the same sentence everywhere. A member that has the result of a collective keeps it:
if another member has lost that result, its repeated call gets the kept one.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

from fabric.errors import ConfigError
from fabric.protocol.messages.wire import decode_value

FRAME_BYTES = 1024
# The place of a collective in the job: committed steps, whether the step's gradient is computed, and the
# number of the collective since then.
Key = tuple[int, int, int]
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Words: type[tuple[Key | None, str, Key | None, str, int]] = tuple[Key | None, str, Key | None, str, _Size]


@dataclass(frozen=True, slots=True)
class Call:
    """One collective, as the user's code calls it. Members with unequal calls have unequal programs."""

    kind: str  # all_reduce, broadcast, all_gather or barrier
    dtype: str = ""
    shape: tuple[int, ...] = ()
    option: str = ""  # the operation of an all_reduce, or the source of a broadcast

    def __str__(self) -> str:
        option = f" ({self.option})" if self.option else ""
        return f"{self.kind}{option}" + (f" of {self.dtype} {list(self.shape)}" if self.dtype else "")


@dataclass(frozen=True, slots=True)
class CallFrame:
    """One member's part of the agreement."""

    key: Key | None  # the collective that the member calls; None: it only answers repeated calls
    call: str = ""  # the call, in words
    held: Key | None = None  # the newest collective whose result the member has
    held_call: str = ""
    held_bytes: int = 0  # the size of that result

    def pack(self) -> bytes:
        """Return FRAME_BYTES bytes. Raises ConfigError for a call that is too long."""
        words = [self.key, self.call, self.held, self.held_call, self.held_bytes]
        data = json.dumps(words, separators=(",", ":")).encode()
        if len(data) > FRAME_BYTES:
            raise ConfigError(f"{self.call[:40]}... has too long a name or shape: reshape the tensor")
        return data.ljust(FRAME_BYTES)

    @classmethod
    def unpack(cls, data: bytes) -> "CallFrame":
        """Return the frame in ``data``. Raises ProtocolError for anything else."""
        return cls(*decode_value(_Words, data, "frame of a collective"))


@dataclass(frozen=True, slots=True)
class Go:
    """All members make the same call: move its bytes."""


@dataclass(frozen=True, slots=True)
class Supply:
    """Members repeat a collective whose result ``source`` (a position) has: it sends ``nbytes`` to all."""

    source: int
    nbytes: int
    key: Key


@dataclass(frozen=True, slots=True)
class Refuse:
    """Those that call ``key`` get this sentence. ``may_retry``: a repeated call may have a result."""

    why: str
    key: Key
    may_retry: bool


@dataclass(frozen=True, slots=True)
class Again:
    """Some members have not called yet: exchange frames again."""


Verdict = Go | Supply | Refuse | Again


def judge(names: Sequence[str], frames: Sequence[CallFrame]) -> Verdict:
    """Return what follows from the frames of all members, in the order of ``names``."""
    lowest = min((x.key for x in frames if x.key is not None), default=None)
    if lowest is None:
        return Again()
    callers = [i for i, x in enumerate(frames) if x.key == lowest]
    others = [i for i, x in enumerate(frames) if x.key != lowest]
    first = callers[0]
    for i in callers:
        if frames[i].call != frames[first].call:
            return _unequal(names, lowest, {first: frames[first].call, i: frames[i].call})
    holder = next((i for i in others if frames[i].held == lowest), None)
    if holder is not None:
        if frames[holder].held_call != frames[first].call:
            return _unequal(names, lowest, {holder: frames[holder].held_call, first: frames[first].call})
        return Supply(holder, frames[holder].held_bytes, lowest)
    ahead = next((i for i in others if frames[i].key is not None), None)
    if ahead is not None:
        why = f"{names[ahead]} has gone on without {describe(lowest, frames[first].call)}: go on too"
        return Refuse(why, lowest, may_retry=True)
    return Again() if others else Go()


def describe(key: Key, call: str) -> str:
    """Name a collective for a person."""
    return f"{call} (collective {key[2]} at step {key[0]})"


def _unequal(names: Sequence[str], key: Key, calls: Mapping[int, str]) -> Refuse:
    """Name two members' unequal calls, given by the members' positions."""
    both = " and ".join(f"{call} on {names[i]}" for i, call in calls.items())
    why = f"collective {key[2]} at step {key[0]} is {both}: call the same collectives in the same order on "
    return Refuse(why + "every replica", key, may_retry=False)
