"""A replica's layout as one line of text, which sessions announce and the record carries.

The text is JSON, packed: a model has thousands of parameters, and their names and parts repeat each other.
"""

import base64
import hashlib
import json
import zlib
from functools import lru_cache
from typing import Annotated

import msgspec

from fabric.errors import ConfigError, FabricError, ProtocolError
from fabric.model import Value
from fabric.protocol.rules.lanes import HeldParameter, ReplicaLayout, TensorRegion, lanes_of

# The longest packed text, and the longest JSON in it, with the most lists and objects in this JSON.
MAX_CHARACTERS = 64 * 1024
MAX_JSON_BYTES = 1 << 20
MAX_CONTAINERS = 1 << 17
_Size = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]
_Sizes = Annotated[tuple[_Size, ...], msgspec.Meta(max_length=16)]
# The number of layouts whose summaries are kept.
MOST_KNOWN = 512
# The difference between two layouts is named if they have at most this many parts.
MOST_NAMED = 2048


class LayoutSummary(Value):
    """The facts that a leader needs of a layout that lays out a whole model."""

    ranks: int
    parts: int
    model: str  # hash of the names, dtypes and shapes of the parameters


class _LayoutBody(msgspec.Struct):
    """The JSON of a layout. An entry of a rank is the number of a parameter, perhaps with begin and sizes."""

    parameters: list[tuple[str, str, _Sizes]]
    ranks: list[list[list[_Size | _Sizes]]]


_DECODER = msgspec.json.Decoder(_LayoutBody)
_known: dict[str, LayoutSummary] = {}  # text -> its summary; only texts that were accepted


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
    if len(text) > MAX_CHARACTERS or len(body) > MAX_JSON_BYTES:
        raise ProtocolError(
            f"the layout of {len(layout.ranks)} ranks takes {len(text)} characters and at most "
            f"{MAX_CHARACTERS} are sent: turn FABRIC_UNEQUAL off"
        )
    return text


@lru_cache(maxsize=64)
def read_layout(text: str) -> ReplicaLayout:
    """The layout in ``text``. Raises ProtocolError for text that is not a layout."""
    return _read(text)


def _read(text: str) -> ReplicaLayout:
    try:
        unpacker = zlib.decompressobj()
        data = unpacker.decompress(base64.b64decode(text, validate=True), MAX_JSON_BYTES)
        if not unpacker.eof or data.count(b"[") + data.count(b"{") > MAX_CONTAINERS:
            raise ValueError("too long")
        body = _DECODER.decode(data)
        return ReplicaLayout(tuple(tuple(_held(body, entry) for entry in row) for row in body.ranks))
    except (ValueError, TypeError, LookupError, RecursionError, zlib.error) as error:
        raise ProtocolError(f"a member announced a layout that cannot be read ({error})") from error


def known_layout(text: str) -> LayoutSummary | None:
    """The summary of this layout if it has been read before."""
    return _known.get(text)


def layout_summary(text: str) -> LayoutSummary:
    """Read this layout once. Raises ProtocolError for text that does not lay out a whole model."""
    summary = _known.get(text)
    if summary is None:
        layout = _read(text)
        try:
            lanes_of({"this replica": layout})
        except ConfigError as error:
            raise ProtocolError(f"a member announced a layout that cannot be: {error}") from error
        parameters = sorted({(p.name, p.dtype, p.shape) for row in layout.ranks for p in row})
        model = hashlib.blake2b(repr(parameters).encode(), digest_size=16).hexdigest()
        summary = LayoutSummary(len(layout.ranks), sum(map(len, layout.ranks)), model)
        while len(_known) >= MOST_KNOWN:
            _known.pop(next(iter(_known)), None)
        _known[text] = summary
    return summary


def check_layout(replica: str, text: str, ranks: int) -> None:
    """Raises ProtocolError unless ``text`` lays the whole model out over ``ranks`` ranks of ``replica``."""
    summary = layout_summary(text)
    if summary.ranks != ranks:
        raise ProtocolError(f"{replica} has {ranks} ranks and announced the layout of {summary.ranks}")


def difference(a: str, layout_of_a: str, b: str, layout_of_b: str) -> str:
    """How the model of replica ``a`` differs from that of ``b``, in a sentence; empty: they are equal."""
    try:
        ours, theirs = layout_summary(layout_of_a), layout_summary(layout_of_b)
        if ours.model == theirs.model:
            return ""
        if max(ours.parts, theirs.parts) <= MOST_NAMED:
            lanes_of({a: _read(layout_of_a), b: _read(layout_of_b)})
    except FabricError as error:
        return str(error)
    return f"{a} and {b} have other parameters: start every replica with the same model"


def _held(body: _LayoutBody, entry: list[int | _Sizes]) -> HeldParameter:
    """The parameter of an entry: its number alone where the rank holds it whole, else with the part."""
    match entry:
        case [int(number)]:
            name, dtype, shape = body.parameters[number]
            return HeldParameter(name, dtype, shape, TensorRegion.whole(shape))
        case [int(number), tuple(begin), tuple(sizes)]:
            return HeldParameter(*body.parameters[number], TensorRegion(begin, sizes))
    raise TypeError("a rank holds a parameter by its number, perhaps with a begin and sizes")
