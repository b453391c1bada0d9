"""Reads the plain part of the pickle format: containers, texts and numbers, and nothing that calls code.

Python's own unpickler makes any object that the bytes ask for. This reader knows no instruction that names a
class or a function, so a dump from a stranger is data and nothing else. Torch's dumps need no more.
"""

import struct
from collections.abc import Callable
from typing import Any, Final

from fabric.errors import ProtocolError

# A dump of torch has fewer values than this. One byte can make a value, so a limit of bytes is not enough.
MAX_VALUES: Final = 5_000_000
_MARK: Final = object()
_MAX_PROTOCOL = 5


class BadRecording(ProtocolError):
    """A dump cannot be read, or is not a recording; the message says at which place."""


def load_plain(data: bytes) -> Any:
    """Return the value that ``data`` holds. Raises BadRecording."""
    return _Machine(data).run()


class _Machine:
    """The stack machine of the pickle format, for one dump."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        size, steps = len(self._data), 0
        while self._at < size:
            begin = self._at
            code = self._data[begin]
            self._at += 1
            if code == _STOP:
                if len(self._stack) != 1 or self._stack[0] is _MARK:
                    raise BadRecording(f"its pickle ends at byte {begin} in the middle of a value")
                return self._stack[0]
            steps += 1
            if steps > MAX_VALUES:
                raise BadRecording(f"its pickle has more than {MAX_VALUES} values: it is no recording")
            perform = _INSTRUCTIONS.get(code)
            if perform is None:
                raise BadRecording(
                    f"its pickle has the instruction {bytes([code])!r} at byte {begin}, which makes objects"
                    " or is unknown, and a recording needs none"
                )
            try:
                perform(self)
            except (struct.error, IndexError):
                raise BadRecording(f"its pickle breaks off or is damaged at byte {begin}") from None
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise BadRecording(
                    f"its pickle is damaged at byte {begin} ({type(error).__name__})"
                ) from None
        raise BadRecording(f"its pickle breaks off after {size} bytes, without an end")

    # --- arguments ----------------------------------------------------------------------------------

    def number(self, form: str) -> Any:
        layout = struct.Struct(form)
        (value,) = layout.unpack_from(self._data, self._at)
        self._at += layout.size
        return value

    def text(self, size: int) -> str:
        return self._bytes(size).decode("utf-8", "surrogatepass")

    def long(self) -> int:
        return int.from_bytes(self._bytes(self.number("<B")), "little", signed=True)

    def skip(self, size: int) -> None:
        self._bytes(size)

    def _bytes(self, size: int) -> bytes:
        if size > len(self._data) - self._at:
            raise IndexError
        self._at += size
        return self._data[self._at - size : self._at]

    # --- the stack ----------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        self._stack.append(value)

    def pop(self) -> Any:
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError
        return value

    def pop_to_mark(self) -> list[Any]:
        at = len(self._stack) - 1
        while self._stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise IndexError
        items = self._stack[at + 1 :]
        del self._stack[at:]
        return items

    def push_tuple(self, count: int) -> None:
        items = [self.pop() for _ in range(count)]
        self.push(tuple(reversed(items)))

    def append(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2 or not all(type(key) is str for key in items[::2]):
            raise TypeError
        target.update(zip(items[::2], items[1::2], strict=True))

    def set_item(self) -> None:
        value, key = self.pop(), self.pop()
        self.set_items([key, value])

    def put(self, place: int) -> None:
        if self._stack[-1] is _MARK:
            raise ValueError
        self._memo[place] = self._stack[-1]

    def memoize(self) -> None:
        self.put(len(self._memo))

    def get(self, place: int) -> None:
        self.push(self._memo[place])

    def check_protocol(self) -> None:
        if self.number("<B") > _MAX_PROTOCOL:
            raise ValueError


_STOP = ord(".")
_INSTRUCTIONS: Final[dict[int, Callable[[_Machine], None]]] = {
    0x80: _Machine.check_protocol,
    0x95: lambda m: m.skip(8),  # skips the eight bytes of a frame's size
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number("<B")),
    ord("M"): lambda m: m.push(m.number("<H")),
    ord("J"): lambda m: m.push(m.number("<i")),
    0x8A: lambda m: m.push(m.long()),
    ord("G"): lambda m: m.push(m.number(">d")),
    0x8C: lambda m: m.push(m.text(m.number("<B"))),
    ord("X"): lambda m: m.push(m.text(m.number("<I"))),
    0x8D: lambda m: m.push(m.text(m.number("<Q"))),
    ord("}"): lambda m: m.push({}),
    ord("]"): lambda m: m.push([]),
    ord(")"): lambda m: m.push(()),
    ord("("): lambda m: m.push(_MARK),
    ord("t"): lambda m: m.push(tuple(m.pop_to_mark())),
    0x85: lambda m: m.push_tuple(1),
    0x86: lambda m: m.push_tuple(2),
    0x87: lambda m: m.push_tuple(3),
    ord("a"): lambda m: m.append([m.pop()]),
    ord("e"): lambda m: m.append(m.pop_to_mark()),
    ord("s"): _Machine.set_item,
    ord("u"): lambda m: m.set_items(m.pop_to_mark()),
    ord("q"): lambda m: m.put(m.number("<B")),
    ord("r"): lambda m: m.put(m.number("<I")),
    0x94: _Machine.memoize,
    ord("h"): lambda m: m.get(m.number("<B")),
    ord("j"): lambda m: m.get(m.number("<I")),
}
