"""The encoding is reversible: every value of a state_dict comes back equal, with its type."""

import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fabric.ckpt_server.format.safetensors_file import parse_json, read_preamble
from fabric.ckpt_server.state.encoding import (
    FILE_DTYPE,
    RAW_DTYPE,
    Blobs,
    StateDecoder,
    StatePath,
    encode,
)
from fabric.ckpt_server.state.training_state import capture, host_bytes, restore
from fabric.errors import StateError


class Holder:
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return self.value

    def load_state_dict(self, value: Any) -> None:
        self.value = value


def there_and_back(value: Any) -> Any:
    view = capture({"x": Holder(value)}, 7)
    file = bytearray(view.header)
    for _, tensor in view.tensors:
        file += host_bytes(tensor)
    target = Holder()
    assert restore(memoryview(file), {"x": target}) == 7
    assert capture({"x": target}, 7).digest() == view.digest()
    return target.value


def same(a: Any, b: Any) -> bool:
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return struct.pack("d", a) == struct.pack("d", b)
    if isinstance(a, complex):
        return same(a.real, b.real) and same(a.imag, b.imag)
    if isinstance(a, torch.Tensor):
        raw = lambda t: host_bytes(t.resolve_conj().resolve_neg().contiguous()).tobytes()  # noqa: E731
        return a.dtype == b.dtype and a.shape == b.shape and raw(a) == raw(b)
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        in_order = not isinstance(a, OrderedDict) or list(a) == list(b)
        return in_order and set(a) == set(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


ATOMS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=8)
    | st.binary(max_size=8)
    | st.complex_numbers(allow_nan=True, allow_infinity=True)
    | st.sampled_from(
        [torch.float32, torch.bfloat16, torch.device("cuda:1"), torch.Size([2, 3]), b"", "$map"]
    )
    | st.sampled_from([np.float32(1.5), np.int64(-3), np.bool_(True), np.datetime64("2020-01-01", "ns")])
    | st.lists(st.integers(0, 9), max_size=3).map(lambda v: torch.tensor(v, dtype=torch.int32))
    | st.lists(st.floats(width=32), max_size=3).map(lambda v: np.array(v, np.float32))
)
PLAIN_KEYS = (
    st.text(max_size=4) | st.integers(-5, 5) | st.sampled_from(["$tensor", "$", "0", "1", "a/b", "a~1b"])
)
KEYS = PLAIN_KEYS | st.tuples(st.integers(0, 3), st.text(max_size=2)) | st.binary(max_size=2)


def containers(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    maps = st.dictionaries(KEYS, inner, max_size=4)
    lists = st.lists(inner, max_size=4)
    return (
        lists
        | lists.map(tuple)
        | lists.map(lambda v: deque(v, 9))
        | maps
        | maps.map(OrderedDict)
        | maps.map(lambda v: defaultdict(list, v))
        | st.dictionaries(st.text(max_size=2), st.integers(0, 5), max_size=3).map(Counter)
        | st.sets(st.integers(0, 9) | st.text(max_size=2), max_size=3)
        | st.frozensets(PLAIN_KEYS, max_size=3)
        | st.binary(max_size=4).map(bytearray)
    )


@settings(max_examples=300, deadline=None)
@given(st.recursive(ATOMS, containers, max_leaves=12))
def test_every_value_comes_back(value: Any) -> None:
    back = there_and_back({"value": value})
    assert same(back["value"], value), (value, back)


@pytest.mark.filterwarnings("ignore:ComplexHalf")
@pytest.mark.parametrize(
    "name", sorted({str(dtype).removeprefix("torch.") for dtype in FILE_DTYPE} | set(RAW_DTYPE))
)
@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (5,), (2, 3)])
def test_every_dtype_and_shape(name: str, shape: tuple[int, ...]) -> None:
    dtype = getattr(torch, name)
    count = math.prod(shape) * dtype.itemsize
    raw = bytearray(index % 2 for index in range(count))
    value = torch.frombuffer(raw, dtype=dtype).reshape(shape) if count else torch.empty(shape, dtype=dtype)
    assert same(there_and_back({"t": value})["t"], value)


def test_views_conjugates_and_strides() -> None:
    base = torch.arange(24, dtype=torch.float64).reshape(4, 6)
    z = torch.complex(torch.arange(3.0), torch.ones(3))
    values = {
        "transposed": base.t(),
        "strided": base[::2, 1::2],
        "expanded": torch.ones(1).expand(4),
        "conjugate": z.conj(),
        "negative": z.conj().imag,
        "parameter": torch.nn.Parameter(base[1]),
    }
    back = there_and_back(values)
    assert all(torch.equal(back[name], value) for name, value in values.items())
    assert type(back["parameter"]) is torch.Tensor


def test_numpy_arrays_in_any_layout() -> None:
    values = {
        "fortran": np.asfortranarray(np.arange(6, dtype=">i4").reshape(2, 3)),
        "strings": np.array(["a", "bcd"]),
        "none": np.zeros((0, 3), np.float16),
        "scalar": np.array(3.5),
        "random": np.random.RandomState(3).get_state(),
    }
    back = there_and_back(values)
    assert all(np.array_equal(back[name], values[name]) for name in ("fortran", "strings", "none", "scalar"))
    assert back["fortran"].dtype == values["fortran"].dtype
    assert same(back["random"], values["random"])


@pytest.mark.parametrize(
    "value", [np.array([object()]), np.zeros(2, [("a", "i4")]), defaultdict(lambda: 1), {torch.ones(1): 1}]
)
def test_a_tensor_without_a_plain_value_is_refused(value: Any) -> None:
    with pytest.raises(StateError, match=r"x\.value"):
        capture({"x": Holder({"value": value})}, 0)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_odd_tensors_are_refused() -> None:
    odd = {
        "half_a_byte": torch.empty(2, dtype=torch.uint4),
        "quantized": torch.quantize_per_tensor(torch.ones(2), 1, 0, torch.qint8),
    }
    for name, value in odd.items():
        with pytest.raises(StateError, match=rf"x\.{name} "):
            capture({"x": Holder({name: value})}, 0)


def test_subclasses_of_plain_types_are_refused() -> None:
    import enum

    class Mode(enum.IntEnum):
        A = 1

    with pytest.raises(StateError, match=r"x\.mode is a .*Mode"):
        capture({"x": Holder({"mode": Mode.A})}, 0)


def test_names_of_tensors_are_unique_and_readable() -> None:
    blobs = Blobs()
    encode(
        {0: torch.ones(1), "0": torch.ones(1), "a/b": torch.ones(1), "a": {"b": torch.ones(1)}},
        StatePath.root("x"),
        blobs,
    )
    assert sorted(blobs.tensors) == ["x/0", "x/0~2", "x/a/b", "x/a~1b"]


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_are_refused_in_one_sentence(data: bytes) -> None:
    for file in (data, len(data).to_bytes(8, "little") + data):
        with pytest.raises(StateError) as caught:
            restore(memoryview(file), {"x": Holder()})
        assert "\n" not in str(caught.value)


def test_a_header_that_would_exhaust_memory_or_stack_is_refused() -> None:
    for text in (b"[" * 100_000, b'{"a":' * 50_000, b'{"a":1,"a":2}', b'{"a":NaN}', b"9" * 5000):
        with pytest.raises(StateError):
            parse_json(text)
    with pytest.raises(StateError, match="no safetensors file"):
        read_preamble(memoryview((1 << 62).to_bytes(8, "little") + b"{}"))


@pytest.mark.parametrize("seed", range(6))
def test_a_headers_keys_may_stand_in_any_order(seed: int) -> None:
    keys = [("dtype", '"F32"'), ("shape", "[2,3]"), ("data_offsets", "[0,24]"), ("more", '{"a":1}')]
    random.Random(seed).shuffle(keys)
    header = read_preamble(memoryview(_file(keys)))
    assert [(span.name, span.dtype, span.shape) for span in header.tensors] == [("x", "F32", (2, 3))]


@pytest.mark.parametrize("key", ["dtype", "shape", "data_offsets"])
def test_a_header_with_a_repeated_key_is_refused(key: str) -> None:
    keys = [("data_offsets", "[0,24]"), ("dtype", '"F32"'), ("shape", "[2,3]")]
    with pytest.raises(StateError, match="a key occurs twice"):
        read_preamble(memoryview(_file([*keys, (key, dict(keys)[key])])))


def _file(keys: list[tuple[str, str]]) -> bytes:
    entry = ",".join(f'"{key}":{value}' for key, value in keys)
    text = f'{{"__metadata__":{{"fabric":"{{}}"}},"x":{{{entry}}}}}'.encode()
    return len(text).to_bytes(8, "little") + text + bytes(24)


@pytest.mark.parametrize("word", ["$set", "$frozenset", "$map", "$counter"])
def test_keys_that_were_chosen_to_collide_are_refused_before_a_set_is_made_of_them(word: str) -> None:
    prime = (1 << 61) - 1  # in Python all multiples of this prime have the hash 0
    keys = [prime * number for number in range(1, 201)]
    node = {word: keys if "set" in word else [[key, 1] for key in keys]}
    with pytest.raises(StateError, match="more than 64 keys have the same hash"):
        StateDecoder(lambda name: torch.zeros(0), set()).decode(node)
    spread = [number << 40 for number in range(200)]
    node = {word: spread if "set" in word else [[key, 1] for key in spread]}
    assert set(StateDecoder(lambda name: torch.zeros(0), set()).decode(node)) == set(spread)
