"""State that is not tensors, as JSON and back: lossless, canonical, and without running code.

``state_dict()`` gives nested containers. The walk turns each tensor and numpy array into a named blob and
everything else into JSON. A value that JSON lacks becomes an object with a single key that begins with ``$``.
A mapping with such a key, or with keys that are not strings, becomes ``$map``. The order is canonical, so
that equal states are equal bytes: mappings and module state are sorted by key. Lists, tuples and
``OrderedDict`` keep their order, because it is part of the value.

A value of a type that is not listed here is refused with its path. Subclasses of listed types are refused as
well, because the file would lose what they add.
"""

import base64
import math
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from fabric.ckpt_server.format.safetensors_file import DTYPES, canonical_json
from fabric.ckpt_server.state.dtensor import Shardings, describe_shard, is_sharded, local_part
from fabric.errors import StateError
from fabric.model import Value

MAX_DEPTH = 100
_DOUBLE = struct.Struct(">d")
_FACTORIES: Mapping[str, type | None] = {
    "none": None,
    "list": list,
    "dict": dict,
    "set": set,
    "int": int,
    "float": float,
}
PLAIN_TENSORS = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_NUMPY_KINDS = "biufcSUMm"
# The errors that the constructors of values raise for malformed arguments.
_MALFORMED = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RuntimeError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
)

# Tensors of other dtypes than those of the format are stored as raw bytes with one dimension more.
TORCH_DTYPE: Mapping[str, torch.dtype] = {word: getattr(torch, name) for word, (name, _) in DTYPES.items()}
FILE_DTYPE: Mapping[torch.dtype, str] = {dtype: word for word, dtype in TORCH_DTYPE.items()}
_RAW = ("complex32", "complex64", "complex128", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
RAW_DTYPE: Mapping[str, torch.dtype] = {name: getattr(torch, name) for name in _RAW}
DTYPE_BY_NAME: Mapping[str, torch.dtype] = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}


class StatePath(Value):
    """The place of a value: ``blob`` is its name in the file (``optimizer/state/0/exp_avg``)."""

    blob: str
    step: object
    parent: "StatePath | None" = None
    depth: int = 0

    def key(self, key: object) -> "StatePath":
        word = key.replace("~", "~0").replace("/", "~1") if isinstance(key, str) else key
        return StatePath(f"{self.blob}/{word}", key, self, self.depth + 1)

    @property
    def spoken(self) -> str:
        """As ``optimizer.state[0].exp_avg``; built only when a message needs it."""
        if self.parent is None:
            return str(self.step)
        if isinstance(self.step, str) and self.step.replace(".", "_").isidentifier():
            return f"{self.parent.spoken}.{self.step}"
        return f"{self.parent.spoken}[{self.step!r}]"

    @classmethod
    def root(cls, name: str) -> "StatePath":
        return cls(name.replace("~", "~0").replace("/", "~1"), name)


@dataclass(slots=True)
class Blobs:
    """The tensors met on a walk, by unique name, in the order met."""

    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    shardings: Shardings = field(default_factory=Shardings)

    def add(self, path: StatePath, tensor: torch.Tensor) -> str:
        """Keep ``tensor``; return its name. Keys 0 and "0" of one mapping get different names."""
        name, copies = path.blob, 1
        while name in self.tensors:
            copies += 1
            name = f"{path.blob}~{copies}"
        self.tensors[name] = tensor
        return name


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the storage of a contiguous ``tensor`` as flat uint8, without a copy."""
    return tensor.reshape(-1).view(torch.uint8)


_Ties = dict[object, str] | None
_Encoder = Callable[[Any, StatePath, Blobs, _Ties], Any]


def encode(value: object, path: StatePath, blobs: Blobs, ties: _Ties = None) -> Any:
    """Return ``value`` as JSON; tensors go to ``blobs``. Raises StateError with the path of a bad value.

    With ``ties``, a tensor that has the same memory as an earlier tensor is stored once.
    """
    if path.depth > MAX_DEPTH:
        raise StateError(
            f"{path.spoken[:200]} is nested deeper than {MAX_DEPTH} levels (does it contain itself?);"
            " it cannot be captured."
        )
    if value is None or type(value) in (bool, str, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": _DOUBLE.pack(value).hex()}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, path, blobs, ties)
    encoder = _ENCODERS.get(type(value))
    if encoder is not None:
        return encoder(value, path, blobs, ties)
    if isinstance(value, np.generic):
        return _encode_numpy(np.asarray(value), path, blobs, "$numpy")
    raise StateError(
        f"{path.spoken} is a {type(value).__module__}.{type(value).__qualname__} and cannot be serialised"
        " without pickle; leave it out of state_dict() or make it tensors, numbers, strings, lists or dicts."
    )


def memory_key(tensor: torch.Tensor) -> object:
    """Return a key that is equal for two tensors of the same elements of the same memory."""
    tensor = local_part(tensor)
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


def _encode_tensor(tensor: torch.Tensor, path: StatePath, blobs: Blobs, ties: _Ties) -> Any:
    if is_sharded(tensor):
        blobs.shardings.add(tensor)
        return {"$shard": [_encode_tensor(local_part(tensor), path, blobs, ties), describe_shard(tensor)]}
    if type(tensor) not in PLAIN_TENSORS:
        raise StateError(
            f"{path.spoken} is a tensor of type {type(tensor).__qualname__}, which cannot be captured as "
            "plain memory."
        )
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise StateError(
            f"{path.spoken} is a sparse or quantized tensor; only dense tensors can be captured."
        )
    if tensor.dtype not in FILE_DTYPE and tensor.dtype not in RAW_DTYPE.values():
        raise StateError(
            f"{path.spoken} has dtype {tensor.dtype}, which cannot be captured; use a plain one."
        )
    if tensor.device.type == "meta":
        raise StateError(
            f"{path.spoken} is on the meta device and has no values; materialise it before attaching."
        )
    plain = tensor.detach()
    if ties is None:
        name = blobs.add(path, _contiguous(plain))
    else:
        tie = memory_key(plain)
        name = ties.get(tie) or blobs.add(path, _contiguous(plain))
        if plain.numel():
            ties[tie] = name
    if plain.dtype in FILE_DTYPE:
        return {"$tensor": name}
    return {"$tensor": [name, str(plain.dtype).removeprefix("torch.")]}


def _encode_numpy(array: np.ndarray[Any, Any], path: StatePath, blobs: Blobs, word: str = "$array") -> Any:
    if array.dtype.kind not in _NUMPY_KINDS:
        raise StateError(f"{path.spoken} is a numpy value of dtype {array.dtype}, which cannot be captured.")
    raw = np.frombuffer(array.tobytes(), np.uint8).copy()
    name = blobs.add(path, torch.from_numpy(raw))
    return {word: [name, array.dtype.str, list(array.shape)]}


def _sorted_pairs(value: Mapping[Any, Any], path: StatePath, blobs: Blobs, ties: _Ties) -> list[list[Any]]:
    keyed = []
    for key, item in value.items():
        spelled = _encode_key(key, path)
        if type(key) is int:
            order: tuple[int, int, str] = (0, key, "")
        else:
            order = (1, 0, key) if isinstance(key, str) else (2, 0, canonical_json(spelled))
        keyed.append((order, spelled, key, item))
    keyed.sort(key=lambda entry: entry[0])
    return [[spelled, encode(item, path.key(key), blobs, ties)] for _, spelled, key, item in keyed]


def _encode_key(key: object, path: StatePath) -> Any:
    if type(key) in (str, int):
        return key
    if isinstance(key, (torch.Tensor, np.ndarray, np.generic)):
        raise StateError(
            f"{path.spoken} has a {type(key).__qualname__} as key; only plain values can be keys."
        )
    return encode(key, path.key("(key)"), Blobs())


def _encode_dict(value: Mapping[Any, Any], path: StatePath, blobs: Blobs, ties: _Ties) -> Any:
    pairs = _sorted_pairs(value, path, blobs, ties)
    if all(type(key) is str and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$map": pairs}


def _encode_ordered(value: "OrderedDict[Any, Any]", path: StatePath, blobs: Blobs, ties: _Ties) -> Any:
    metadata = getattr(value, "_metadata", None)
    if metadata is not None:  # a module's state: its names give the order, its metadata the versions
        extra = encode(dict(metadata), path.key("_metadata"), blobs)
        return {"$module": [_encode_dict(value, path, blobs, ties), extra]}
    return {
        "$ordered": [
            [_encode_key(key, path), encode(item, path.key(key), blobs, ties)] for key, item in value.items()
        ]
    }


def _encode_list(value: list[Any] | tuple[Any, ...], path: StatePath, blobs: Blobs, ties: _Ties) -> list[Any]:
    return [encode(item, path.key(index), blobs, ties) for index, item in enumerate(value)]


def _encode_defaultdict(value: "defaultdict[Any, Any]", path: StatePath, blobs: Blobs, ties: _Ties) -> Any:
    for word, factory in _FACTORIES.items():
        if value.default_factory is factory:
            return {"$defaultdict": [word, _sorted_pairs(value, path, blobs, ties)]}
    raise StateError(
        f"{path.spoken} is a defaultdict with a factory of its own and cannot be serialised; make it a dict."
    )


_MOST_ALIKE = 64  # the most keys of one set that may have equal hashes


def _encode_set(value: set[Any] | frozenset[Any], path: StatePath) -> list[Any]:
    return sorted((_encode_key(item, path) for item in value), key=canonical_json)


_ENCODERS: dict[type, _Encoder] = {
    dict: _encode_dict,
    OrderedDict: _encode_ordered,
    list: _encode_list,
    defaultdict: _encode_defaultdict,
    Counter: lambda v, p, b, t: {"$counter": _sorted_pairs(v, p, b, t)},
    tuple: lambda v, p, b, t: {"$tuple": _encode_list(v, p, b, t)},
    deque: lambda v, p, b, t: {"$deque": [v.maxlen, _encode_list(v, p, b, t)]},
    set: lambda v, p, b, t: {"$set": _encode_set(v, p)},
    frozenset: lambda v, p, b, t: {"$frozenset": _encode_set(v, p)},
    bytes: lambda v, p, b, t: {"$bytes": base64.b64encode(v).decode()},
    bytearray: lambda v, p, b, t: {"$bytearray": base64.b64encode(v).decode()},
    complex: lambda v, p, b, t: {"$complex": [_DOUBLE.pack(v.real).hex(), _DOUBLE.pack(v.imag).hex()]},
    torch.Size: lambda v, p, b, t: {"$size": list(v)},
    torch.dtype: lambda v, p, b, t: {"$dtype": str(v).removeprefix("torch.")},
    torch.device: lambda v, p, b, t: {"$device": str(v)},
    np.ndarray: lambda v, p, b, t: _encode_numpy(v, p, b),
}


@dataclass(slots=True)
class StateDecoder:
    """Turns the JSON of ``encode`` back into values; ``tensor`` gives the blob of a name.

    ``unused`` starts with all blob names and must be empty in the end. Nodes that name the same blob get the
    same tensor. ``shardings``: the placements of live tensors. Any malformed input raises StateError.
    """

    tensor: Callable[[str], torch.Tensor]
    unused: set[str]
    seen: dict[str, torch.Tensor] = field(default_factory=dict)
    shardings: Shardings = field(default_factory=Shardings)

    def decode(self, node: Any, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise StateError(f"The state is nested deeper than {MAX_DEPTH} levels; it is damaged.")
        if isinstance(node, list):
            return [self.decode(item, depth + 1) for item in node]
        if not isinstance(node, dict):
            return node
        words = [key for key in node if key.startswith("$")]
        if not words:
            return {key: self.decode(item, depth + 1) for key, item in node.items()}
        word = words[0]
        if len(node) != 1 or word not in _DECODERS:
            raise StateError(
                f"The state uses the unknown encoding {word[:40]!r}; it is damaged or of a newer version."
            )
        try:
            return _DECODERS[word](self, node[word], depth + 1)
        except _MALFORMED as error:
            reason = " ".join(str(error).split())[:200]
            raise StateError(
                f"A value in the state is not a valid {word} ({reason}); it is damaged."
            ) from error

    def pairs(self, items: Any, depth: int) -> list[tuple[Any, Any]]:
        """Decode key-value pairs with every key once."""
        decoded = [(self.decode(key, depth), self.decode(item, depth)) for key, item in items]
        if len(set(_spread([key for key, _ in decoded]))) != len(decoded):
            raise ValueError("a key occurs twice")
        return decoded

    def blob(self, name: Any) -> torch.Tensor:
        """Return the tensor called ``name``, and count it as used."""
        if not isinstance(name, str):
            raise TypeError("a tensor's name is a string")
        if name not in self.seen:
            self.seen[name] = self.tensor(name)
            self.unused.discard(name)
        return self.seen[name]


def _spread(keys: list[Any]) -> list[Any]:
    """Return ``keys``. Raises ValueError where many hashes collide: thousands of collisions take minutes."""
    hashes = sorted(map(hash, keys))
    if any(first == last for first, last in zip(hashes, hashes[_MOST_ALIKE:], strict=False)):
        raise ValueError(f"more than {_MOST_ALIKE} keys have the same hash")
    return keys


def _decode_tensor(decoder: StateDecoder, node: Any, depth: int) -> torch.Tensor:
    if isinstance(node, str):
        return decoder.blob(node)
    name, word = node
    dtype = RAW_DTYPE[word]
    raw = decoder.blob(name)
    if raw.dtype != torch.uint8 or raw.shape[-1] != dtype.itemsize:
        raise ValueError(f"raw bytes of dtype {word}")
    return raw.clone().view(dtype).reshape(raw.shape[:-1])  # the clone's memory is aligned


def _decode_array(decoder: StateDecoder, node: Any, depth: int) -> "np.ndarray[Any, Any]":
    name, word, shape = node
    dtype = np.dtype(word)
    if not isinstance(word, str) or dtype.kind not in _NUMPY_KINDS:
        raise ValueError(f"dtype {word}")
    raw = bytearray(decoder.blob(name).numpy().tobytes())
    array: np.ndarray[Any, Any] = np.ndarray(tuple(shape), dtype, raw)
    if array.nbytes != len(raw):
        raise ValueError(f"{len(raw)} bytes for shape {shape}")
    return array


def _decode_module(decoder: StateDecoder, node: Any, depth: int) -> "OrderedDict[str, Any]":
    tensors, metadata = node
    state = OrderedDict(decoder.decode(tensors, depth))
    state._metadata = OrderedDict(decoder.decode(metadata, depth))  # type: ignore[attr-defined]  # noqa: SLF001 - torch's name for the versions of a module's state
    return state


def _double(text: str) -> float:
    value: float = _DOUBLE.unpack(bytes.fromhex(text))[0]
    return value


_DECODERS: dict[str, Callable[[StateDecoder, Any, int], Any]] = {
    "$tensor": _decode_tensor,
    "$shard": lambda d, n, depth: d.shardings.build(d.decode(n[0], depth), n[1]),
    "$array": _decode_array,
    "$numpy": lambda d, n, depth: _decode_array(d, n, depth)[()],
    "$module": _decode_module,
    "$float": lambda d, n, depth: _double(n),
    "$dtype": lambda d, n, depth: DTYPE_BY_NAME[n],
    "$map": lambda d, n, depth: dict(d.pairs(n, depth)),
    "$ordered": lambda d, n, depth: OrderedDict(d.pairs(n, depth)),
    "$counter": lambda d, n, depth: Counter(dict(d.pairs(n, depth))),
    "$defaultdict": lambda d, n, depth: defaultdict(_FACTORIES[n[0]], d.pairs(n[1], depth)),
    "$tuple": lambda d, n, depth: tuple(d.decode(list(n), depth)),
    "$deque": lambda d, n, depth: deque(d.decode(list(n[1]), depth), n[0]),
    "$set": lambda d, n, depth: set(_spread(d.decode(list(n), depth))),
    "$frozenset": lambda d, n, depth: frozenset(_spread(d.decode(list(n), depth))),
    "$bytes": lambda d, n, depth: base64.b64decode(n, validate=True),
    "$bytearray": lambda d, n, depth: bytearray(base64.b64decode(n, validate=True)),
    "$complex": lambda d, n, depth: complex(_double(n[0]), _double(n[1])),
    "$size": lambda d, n, depth: torch.Size(n),
    "$device": lambda d, n, depth: torch.device(n),
}
