"""The file that training state travels in: how its preamble is written, read and distrusted.

A snapshot is a complete safetensors file: eight bytes of length, a JSON header, then every tensor's
bytes without a gap. The header is canonical, so equal states are equal files: JSON with sorted keys
and no spaces, padded with spaces until the data begin at a multiple of 64. Tensors lie in the order
of falling element size, then name, which keeps each one aligned to its own elements. What is not a
tensor is the canonical JSON under ``__metadata__["fabric"]``.

Reading believes nothing. Lengths are bounded before memory is taken, types are exact, and the
tensors must cover the data from the first byte to the last, once. This module needs no torch, so
that a process which only moves bytes can check them.
"""

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, NamedTuple

from fabric.errors import StateError

ALIGNMENT_BYTES = 64
MAX_HEADER_BYTES = 100_000_000  # what readers of the format accept
MAX_FILE_BYTES = 1 << 46
METADATA_KEY = "fabric"
_NO_METADATA = f'"__metadata__":{{"{METADATA_KEY}":""}}'
_LENGTH = struct.Struct("<Q")
_MAX_DIMENSIONS = 64
_MAX_SIZE = 1 << 62
_MAX_NAME_CHARACTERS = 4096

ELEMENT_BYTES: Mapping[str, int] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


class TensorSpan(NamedTuple):
    """One tensor's place: ``begin`` and ``end`` count bytes from the first byte of the *file*."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


_place = itemgetter(3, 4)  # a span's begin and end


@dataclass(frozen=True, slots=True)
class Header:
    """A checked preamble: ``nbytes`` of it, then ``tensors`` in file order, which end at ``end``."""

    nbytes: int
    tensors: tuple[TensorSpan, ...]
    metadata: str

    @property
    def end(self) -> int:
        return self.tensors[-1].end if self.tensors else self.nbytes


def canonical_json(value: object) -> str:
    """The one spelling of ``value``: sorted keys, no spaces, ASCII, no NaN. ValueError otherwise."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def file_order(name: str, dtype: str) -> tuple[int, str]:
    """Sort key that puts tensors in file order."""
    return -ELEMENT_BYTES[dtype], name


def build_preamble(tensors: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: str) -> bytes:
    """The bytes before the data, for (name, dtype, shape, nbytes) given in file order.

    Raises StateError where the header would be longer than readers accept.
    """
    return Preamble(tensors).with_metadata(metadata)


class Preamble:
    """The bytes before the data of files whose tensors are the same and whose metadata is not.

    ``tensors`` are (name, dtype, shape, nbytes) in file order.
    """

    def __init__(self, tensors: Sequence[tuple[str, str, tuple[int, ...], int]]) -> None:
        entries: dict[str, object] = {"__metadata__": {METADATA_KEY: ""}}
        offset = 0
        for name, dtype, shape, nbytes in tensors:
            end = offset + nbytes
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        # Inside a name every quote stands behind a backslash, so that this is found once.
        self._before, self._after = canonical_json(entries).split(_NO_METADATA)

    def with_metadata(self, metadata: str) -> bytes:
        """The preamble. Raises StateError where it would be longer than readers accept."""
        told = canonical_json({"__metadata__": {METADATA_KEY: metadata}})[1:-1]
        text = (self._before + told + self._after).encode()
        padding = -(len(text) + _LENGTH.size) % ALIGNMENT_BYTES
        if len(text) + padding > MAX_HEADER_BYTES:
            raise StateError(
                f"The training state needs a header of {len(text)} bytes and at most {MAX_HEADER_BYTES} are"
                " allowed; keep large lists in tensors."
            )
        return _LENGTH.pack(len(text) + padding) + text + b" " * padding


def read_header(file: memoryview) -> Header:
    """Parses and checks the preamble of ``file`` (flat bytes, exactly the whole file).

    Raises StateError that names what is wrong; takes no memory beyond the header's own size.
    """
    return read_preamble(file, len(file))


def read_preamble(begin: memoryview, nbytes: int) -> Header:
    """As ``read_header``, of a file of ``nbytes`` of which at least the preamble is in ``begin``."""
    if len(begin) < _LENGTH.size:
        raise StateError(f"The state is {len(begin)} bytes long, too short to be a snapshot file.")
    (length,) = _LENGTH.unpack(begin[: _LENGTH.size])
    if length > MAX_HEADER_BYTES or length > min(nbytes, len(begin)) - _LENGTH.size:
        raise StateError(
            f"this is no safetensors file: its first eight bytes are no length of a header in {nbytes} bytes"
            " (or it is damaged)"
        )
    data_begin = _LENGTH.size + length
    entries = _parse(bytes(begin[_LENGTH.size : data_begin]))
    metadata = _metadata(entries.pop("__metadata__", None))
    spans = [_span(name, entry, data_begin) for name, entry in entries.items()]
    spans.sort(key=_place)
    _check_cover(spans, data_begin, nbytes)
    return Header(data_begin, tuple(spans), metadata)


def parse_json(text: str | bytes) -> Any:
    """JSON from outside, without duplicate keys, NaN or endless depth. Raises StateError otherwise."""
    return _load_json(text, _unique)


def _load_json(text: str | bytes, make_object: Callable[[list[tuple[str, Any]]], Any]) -> Any:
    try:
        return json.loads(text, object_pairs_hook=make_object, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise StateError(f"The state's description is not valid JSON ({error}); it is damaged.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _parse(text: bytes) -> dict[str, Any]:
    entries = _load_json(text, _entry)
    if not isinstance(entries, dict):
        raise StateError("The state's header is not a JSON object; it is damaged.")
    return entries


def _entry(pairs: list[tuple[str, Any]]) -> Any:
    """An object of the header; of a tensor spelled as we do it only (dtype, shape, begin, end), so that
    little of a long header is kept."""
    if len(pairs) == 3:
        (first, offsets), (second, dtype), (third, shape) = pairs
        if first == "data_offsets" and second == "dtype" and third == "shape" and _is_pair(offsets):
            return dtype, shape, offsets[0], offsets[1]
    return _unique(pairs)


def _is_pair(offsets: object) -> bool:
    return type(offsets) is list and len(offsets) == 2


def _metadata(value: object) -> str:
    if not isinstance(value, dict) or not isinstance(value.get(METADATA_KEY), str):
        raise StateError("The file carries no fabric metadata, so it is not a snapshot of training state.")
    text: str = value[METADATA_KEY]
    return text


def is_count(value: object, most: int) -> bool:
    """Whether ``value`` is an integer (no bool) from 0 to ``most``."""
    return type(value) is int and 0 <= value <= most


def _span(name: str, entry: object, data_begin: int) -> TensorSpan:
    # Once for each of perhaps a hundred thousand tensors, before a newcomer can load any.
    if isinstance(entry, dict):
        entry = entry.get("dtype"), entry.get("shape"), *_offsets(name, entry.get("data_offsets"))
    if not name or len(name) > _MAX_NAME_CHARACTERS or not isinstance(entry, tuple):
        raise _bad(name, "has no usable name or description; the state is damaged")
    dtype, shape, begin, end = entry
    nbytes = ELEMENT_BYTES.get(dtype, 0) if isinstance(dtype, str) else 0
    if not nbytes:
        raise _bad(name, f"has the unknown dtype {str(dtype)[:40]!r}")
    if type(shape) is not list or len(shape) > _MAX_DIMENSIONS:
        raise _bad(name, "has an impossible shape")
    for size in shape:
        if type(size) is not int or not 0 <= size <= _MAX_SIZE:
            raise _bad(name, "has an impossible shape")
        nbytes *= size
    if nbytes > MAX_FILE_BYTES:
        raise _bad(name, "has an impossible shape")
    if type(begin) is not int or type(end) is not int or not (0 <= begin <= MAX_FILE_BYTES >= end >= 0):
        raise _bad(name, "has impossible offsets")
    if end - begin != nbytes:
        raise _bad(name, f"has {end - begin} bytes where its shape needs {nbytes}")
    return TensorSpan(name, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _offsets(name: str, value: object) -> list[object]:
    if not _is_pair(value):
        raise _bad(name, "has impossible offsets")
    assert isinstance(value, list)
    return value


def _bad(name: str, what: str) -> StateError:
    return StateError(f"Tensor {name[:200]!r} of the state {what}.")


def _check_cover(spans: list[TensorSpan], begin: int, end: int) -> None:
    for span in spans:
        if span.begin != begin:
            raise StateError(
                f"The bytes before tensor {span.name[:200]!r} overlap or leave a gap; the state is damaged."
            )
        begin = span.end
    if begin != end:
        raise StateError(f"The state's tensors end at byte {begin} of a file of {end}; it is damaged.")
