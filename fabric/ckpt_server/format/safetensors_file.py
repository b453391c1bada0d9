"""The file format of training state: its preamble, written, read and checked.

A snapshot is a complete safetensors file: eight bytes of length, a JSON header, then every tensor's
bytes without a gap. The header is canonical, so equal states are equal files: JSON with sorted keys
and no spaces, padded with spaces until the data begin at a multiple of 64. Tensors lie in the order
of falling element size, then name, which keeps each one aligned to its own elements. All other
values are canonical JSON under ``__metadata__["fabric"]``.

A reader trusts no byte of a file. It checks lengths before it allocates memory, types must be exact, and the
tensors must cover each byte of the data once. This module needs no torch, so that a process which only moves
bytes can check them.
"""

import json
import struct
from collections.abc import Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeGuard

from fabric.errors import StateError
from fabric.model import Value

ALIGNMENT_BYTES = 64
MAX_HEADER_BYTES = 100_000_000  # the longest header that other readers of the format accept
MAX_FILE_BYTES = 1 << 46
METADATA_KEY = "fabric"
_NO_METADATA = f'"__metadata__":{{"{METADATA_KEY}":""}}'
_LENGTH = struct.Struct("<Q")
_MAX_DIMENSIONS = 64
_MAX_SIZE = 1 << 62
_MAX_NAME_CHARACTERS = 4096

# The format's dtypes: torch's name of each, and the bytes of an element.
DTYPES: Mapping[str, tuple[str, int]] = {
    "BOOL": ("bool", 1),
    "U8": ("uint8", 1),
    "I8": ("int8", 1),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "U16": ("uint16", 2),
    "I16": ("int16", 2),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "U32": ("uint32", 4),
    "I32": ("int32", 4),
    "F32": ("float32", 4),
    "U64": ("uint64", 8),
    "I64": ("int64", 8),
    "F64": ("float64", 8),
}
ELEMENT_BYTES: Mapping[str, int] = {word: nbytes for word, (_, nbytes) in DTYPES.items()}


class TensorSpan(NamedTuple):
    """One tensor's place: ``begin`` and ``end`` count bytes from the first byte of the *file*."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorEntry(NamedTuple):
    """One tensor of a file that is yet to be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


class FileHeader(Value):
    """A checked preamble: ``nbytes`` of it, then ``tensors`` in file order."""

    nbytes: int
    tensors: tuple[TensorSpan, ...]
    metadata: str


def canonical_json(value: object) -> str:
    """Return the one spelling of ``value``: sorted keys, no spaces, ASCII, no NaN. ValueError otherwise."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def file_order(name: str, dtype: str) -> tuple[int, str]:
    """Return the key that sorts tensors into file order."""
    return -ELEMENT_BYTES[dtype], name


def build_preamble(tensors: Sequence[TensorEntry], metadata: str) -> bytes:
    """Return the bytes before the data of a file with these ``tensors``, which are in file order.

    Raises StateError where the header would be longer than readers accept.
    """
    return Preamble(tensors).with_metadata(metadata)


class Preamble:
    """The bytes before the data, for files with equal ``tensors`` (in file order) and any metadata."""

    def __init__(self, tensors: Sequence[TensorEntry]) -> None:
        entries: dict[str, object] = {"__metadata__": {METADATA_KEY: ""}}
        offset = 0
        for name, dtype, shape, nbytes in tensors:
            end = offset + nbytes
            entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
            offset = end
        # In JSON a quote in a name follows a backslash, so the text _NO_METADATA occurs only once.
        self._before, self._after = canonical_json(entries).split(_NO_METADATA)

    def with_metadata(self, metadata: str) -> bytes:
        """Return the preamble. Raises StateError where it would be longer than readers accept."""
        entry = canonical_json({"__metadata__": {METADATA_KEY: metadata}})[1:-1]
        text = (self._before + entry + self._after).encode()
        padding = -(len(text) + _LENGTH.size) % ALIGNMENT_BYTES
        if len(text) + padding > MAX_HEADER_BYTES:
            raise StateError(
                f"The training state needs a header of {len(text)} bytes and at most {MAX_HEADER_BYTES} are"
                " allowed; keep large lists in tensors."
            )
        return _LENGTH.pack(len(text) + padding) + text + b" " * padding


def read_preamble(begin: memoryview, nbytes: int | None = None) -> FileHeader:
    """Parse and check the preamble of a file of ``nbytes``, by default that of ``begin`` (flat bytes).

    Raises StateError that names what is wrong; takes no memory beyond the header's own size.
    """
    nbytes = len(begin) if nbytes is None else nbytes
    if len(begin) < _LENGTH.size:
        raise StateError(f"The state is {len(begin)} bytes long, too short to be a snapshot file.")
    (length,) = _LENGTH.unpack(begin[: _LENGTH.size])
    if length > MAX_HEADER_BYTES or length > min(nbytes, len(begin)) - _LENGTH.size:
        raise StateError(
            f"this is no safetensors file: its first eight bytes are no length of a header in {nbytes} bytes"
            " (or it is damaged)"
        )
    data_begin = _LENGTH.size + length
    text = bytes(begin[_LENGTH.size : data_begin])
    entries = parse_json(text)
    if not isinstance(entries, dict):
        raise StateError("The state's header is not a JSON object; it is damaged.")
    metadata = entries.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(METADATA_KEY), str):
        raise StateError("The file carries no fabric metadata, so it is not a snapshot of training state.")
    spans = [_span(name, entry, data_begin) for name, entry in entries.items()]
    spans.sort(key=itemgetter(3, 4))  # by begin and end
    at = data_begin
    for span in spans:
        if span.begin != at:
            raise StateError(
                f"The bytes before tensor {span.name[:200]!r} overlap or leave a gap; the state is damaged."
            )
        at = span.end
    if at != nbytes:
        raise StateError(f"The state's tensors end at byte {at} of a file of {nbytes}; it is damaged.")
    return FileHeader(data_begin, tuple(spans), metadata[METADATA_KEY])


def parse_json(text: str | bytes) -> Any:
    """Parse JSON of another process. Raises StateError, also for duplicate keys, NaN and too much depth."""
    try:
        return json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise StateError(f"The state's description is not valid JSON ({error}); it is damaged.") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise ValueError("a key occurs twice")
    return mapping


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def is_count(value: object, most: int) -> TypeGuard[int]:
    """Whether ``value`` is an integer (no bool) from 0 to ``most``."""
    return type(value) is int and 0 <= value <= most


def _span(name: str, entry: object, data_begin: int) -> TensorSpan:
    """Return the place that the header's ``entry`` gives to a tensor. Raises StateError."""

    def bad(what: str) -> StateError:
        return StateError(f"Tensor {name[:200]!r} of the state {what}.")

    if not name or len(name) > _MAX_NAME_CHARACTERS or not isinstance(entry, dict):
        raise bad("has no usable name or description; the state is damaged")
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    item = ELEMENT_BYTES.get(dtype, 0) if isinstance(dtype, str) else 0
    if not item:
        raise bad(f"has the unknown dtype {str(dtype)[:40]!r}")
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        raise bad("has an impossible shape")
    extent = item  # without the empty dimensions, because torch multiplies the others too
    for size in shape:
        if not is_count(size, _MAX_SIZE):
            raise bad("has an impossible shape")
        extent *= size or 1
    if extent > MAX_FILE_BYTES:
        raise bad("has an impossible shape")
    nbytes = 0 if 0 in shape else extent
    if not isinstance(offsets, list) or len(offsets) != 2:
        raise bad("has impossible offsets")
    begin, end = offsets
    if not is_count(begin, MAX_FILE_BYTES) or not is_count(end, MAX_FILE_BYTES):
        raise bad("has impossible offsets")
    if end - begin != nbytes:
        raise bad(f"has {end - begin} bytes where its shape needs {nbytes}")
    return TensorSpan(name, str(dtype), tuple(shape), data_begin + begin, data_begin + end)
