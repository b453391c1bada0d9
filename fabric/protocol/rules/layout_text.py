"""A replica's layout as one line of text, which sessions announce and the record carries.

The text is JSON, packed: a model has thousands of parameters, and their names and parts repeat each other.
"""

import base64
import binascii
import json
import zlib
from functools import lru_cache
from typing import Any

from fabric.errors import ConfigError, ProtocolError
from fabric.protocol.rules.lanes import HeldParameter, ReplicaLayout, lanes_of
from fabric.protocol.rules.tensor_region import TensorRegion

# The longest packed text, and the longest JSON in it.
MAX_CHARACTERS = 64 * 1024
_MAX_JSON_BYTES = 16 << 20
_MAX_SIZE = 1 << 48


def layout_text(layout: ReplicaLayout) -> str:
    """The text of ``layout``. Raises ProtocolError where it does not fit into a message."""
    numbers: dict[tuple[str, str, tuple[int, ...]], int] = {}
    ranks = [
        [
            [
                numbers.setdefault((p.name, p.dtype, p.shape), len(numbers)),
                *(() if p.region == TensorRegion.whole(p.shape) else (p.region.begin, p.region.sizes)),
            ]
            for p in row
        ]
        for row in layout.ranks
    ]
    body = json.dumps({"parameters": list(numbers), "ranks": ranks}, separators=(",", ":"))
    text = base64.b64encode(zlib.compress(body.encode(), 9)).decode()
    if len(text) > MAX_CHARACTERS or len(body) > _MAX_JSON_BYTES:
        raise ProtocolError(
            f"the layout of {len(layout.ranks)} ranks takes {len(text)} characters and at most "
            f"{MAX_CHARACTERS} are sent: turn FABRIC_UNEQUAL off"
        )
    return text


@lru_cache(maxsize=64)
def read_layout(text: str) -> ReplicaLayout:
    """The layout in ``text``. Raises ProtocolError for text that is not a layout."""
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), _MAX_JSON_BYTES)
        if not unpacker.eof:
            raise ValueError("too long")
        body = json.loads(data)
        parameters = [(_word(name), _word(dtype), _sizes(shape)) for name, dtype, shape in body["parameters"]]
        return ReplicaLayout(tuple(tuple(_held(parameters, entry) for entry in row) for row in body["ranks"]))
    except (
        ValueError,
        TypeError,
        LookupError,
        RecursionError,
        zlib.error,
        binascii.Error,
    ) as error:
        raise ProtocolError(f"a member announced a layout that cannot be read ({error})") from error


def check_layout(replica: str, text: str, ranks: int) -> None:
    """Raises ProtocolError unless ``text`` lays the whole model out over ``ranks`` ranks of ``replica``."""
    layout = read_layout(text)
    if len(layout.ranks) != ranks:
        raise ProtocolError(f"{replica} has {ranks} ranks and announced the layout of {len(layout.ranks)}")
    try:
        lanes_of({replica: layout})
    except ConfigError as error:
        raise ProtocolError(f"{replica} announced a layout that cannot be: {error}") from error


def _held(parameters: list[tuple[str, str, tuple[int, ...]]], entry: list[Any]) -> HeldParameter:
    name, dtype, shape = parameters[_size(entry[0])]
    if len(entry) == 1:
        return HeldParameter(name, dtype, shape, TensorRegion.whole(shape))
    _, begin, sizes = entry
    return HeldParameter(name, dtype, shape, TensorRegion(_sizes(begin), _sizes(sizes)))


def _word(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("a name is a string")
    return value


def _sizes(values: object) -> tuple[int, ...]:
    if not isinstance(values, list):
        raise TypeError("a shape is a list")
    return tuple(map(_size, values))


def _size(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_SIZE:
        raise ValueError("a size is a count")
    return value
