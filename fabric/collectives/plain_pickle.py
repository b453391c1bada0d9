"""Reads the plain part of the pickle format: containers, texts and numbers, and nothing that calls code.

Python's own unpickler makes any object that the bytes ask for. This reader performs no instruction that names
a class or a function, so a dump from a stranger is data and nothing else. Torch's dumps need no more.
"""

import io
import pickletools
from typing import Any, Final

from fabric.errors import ProtocolError

# A dump of torch has fewer values than this. One byte can make a value, so a limit of bytes is not enough.
MAX_VALUES: Final = 5_000_000
_MARK: Final = object()
_MAX_PROTOCOL = 5

_NAMES = {ord(x.code): x.name for x in pickletools.opcodes}  # of the instructions, by their bytes
# Instructions whose value is their argument, or is always the same.
_LITERALS = {"BININT1", "BININT2", "BININT", "LONG1", "BINFLOAT"}
_LITERALS |= {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_EMPTY = {"EMPTY_DICT": dict, "EMPTY_LIST": list}
_PUTS, _GETS = ("BINPUT", "LONG_BINPUT", "MEMOIZE"), ("BINGET", "LONG_BINGET")
# How many values an instruction takes from the stack; 0: all above the newest mark.
_TAKEN = {"TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_TAKEN |= {"APPEND": 1, "APPENDS": 0, "SETITEM": 2, "SETITEMS": 0}
_KNOWN = {"PROTO", "FRAME", "STOP", *_LITERALS, *_CONSTANTS, *_EMPTY, *_PUTS, *_GETS, *_TAKEN}


class BadRecording(ProtocolError):
    """A dump cannot be read, or is not a recording; the message says at which place."""


def load_plain(data: bytes) -> Any:
    """Return the value that ``data`` holds. Raises BadRecording."""
    stream, stack, memo = io.BytesIO(data), list[Any](), dict[int, Any]()
    instructions = pickletools.genops(stream)
    for _ in range(MAX_VALUES):
        begin = stream.tell()
        if begin == len(data):
            raise BadRecording(f"its pickle breaks off after {begin} bytes, without an end")
        name = _NAMES.get(data[begin])
        if name not in _KNOWN:
            raise BadRecording(
                f"its pickle has the instruction {data[begin : begin + 1]!r} at byte {begin}, which makes "
                "objects or is unknown, and a recording needs none"
            )
        try:
            _, argument, _ = next(instructions)
            if name == "STOP":
                break
            _perform(name, argument, stack, memo)
        except (IndexError, TypeError, ValueError, KeyError):
            raise BadRecording(f"its pickle breaks off or is damaged at byte {begin}") from None
    else:
        raise BadRecording(f"its pickle has more than {MAX_VALUES} values: it is no recording")
    if len(stack) != 1 or stack[0] is _MARK:
        raise BadRecording(f"its pickle ends at byte {begin} in the middle of a value")
    return stack[0]


def _perform(name: str, argument: Any, stack: list[Any], memo: dict[int, Any]) -> None:
    """Perform one instruction. Raises an error of Python for one that does not fit the stack."""
    if name in _LITERALS:
        stack.append(argument)
    elif name in _CONSTANTS:
        stack.append(_CONSTANTS[name])
    elif name in _EMPTY:
        stack.append(_EMPTY[name]())
    elif name in _GETS:
        stack.append(memo[argument])
    elif name in _PUTS:
        if stack[-1] is _MARK:
            raise ValueError("a mark is no value")
        memo[len(memo) if argument is None else argument] = stack[-1]
    elif name in _TAKEN:
        _build(name, _take(stack, _TAKEN[name]), stack)
    elif name == "PROTO" and argument > _MAX_PROTOCOL:
        raise ValueError("this protocol is not known")


def _take(stack: list[Any], count: int) -> list[Any]:
    """Take ``count`` values from the stack; 0: all above the newest mark, and the mark."""
    if count:
        values = stack[-count:]
        if len(values) < count or any(value is _MARK for value in values):
            raise IndexError("the stack holds too few values")
        del stack[-count:]
        return values
    places = range(len(stack) - 1, -1, -1)
    mark = next((place for place in places if stack[place] is _MARK), -1)
    if mark < 0:
        raise IndexError("the stack holds no mark")
    values = stack[mark + 1 :]
    del stack[mark:]
    return values


def _build(name: str, values: list[Any], stack: list[Any]) -> None:
    """Make a tuple of these values, or add them to the list or table on top of the stack."""
    if name.startswith("TUPLE"):
        stack.append(tuple(values))
        return
    target = stack[-1]
    if name.startswith("APPEND") and type(target) is list:
        target.extend(values)
    elif name.startswith("SETITEM") and type(target) is dict and all(type(x) is str for x in values[::2]):
        target.update(zip(values[::2], values[1::2], strict=True))
    else:
        raise TypeError("these values do not fit there")
