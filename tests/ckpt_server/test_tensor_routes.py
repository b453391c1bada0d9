"""One tensor by name, its statistics, and the document of all routes, compared with the routes and torch."""

import json
import re
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from openapi_document import DOCUMENT
from server_support import fetch, publish

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.format.safetensors_file import build_preamble
from fabric.ckpt_server.server import routes
from fabric.ckpt_server.server.statistics import summarise, values

SHAPES = {"weights/0.bias": (7, 3), "w": (1000,), "step count": (), "none": (0, 4)}
TENSORS = {
    "weights/0.bias": torch.linspace(-2, 3, 21, dtype=torch.float64).reshape(7, 3),
    "w": torch.randn(1000, generator=torch.Generator().manual_seed(1)),
    "step count": torch.tensor(41, dtype=torch.float32),
    "none": torch.zeros(0, 4, dtype=torch.float32),
}
NAMES = {torch.float64: "F64", torch.float32: "F32"}


def file_of(tensors: dict[str, torch.Tensor]) -> bytes:
    ordered = sorted(tensors.items(), key=lambda kv: (-kv[1].element_size(), kv[0]))
    rows = [(n, NAMES[t.dtype], tuple(t.shape), t.numel() * t.element_size()) for n, t in ordered]
    return build_preamble(rows, "{}") + b"".join(t.numpy().tobytes() for _, t in ordered)


@pytest.fixture(scope="module")
def url(served: ServerHandle) -> Iterator[str]:
    publish(served, 4, file_of(TENSORS), 500)
    yield served.url


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_is_served_by_its_name(url, name):
    answer = fetch(url, f"/v1/snapshots/500/tensors/{name.replace(' ', '%20')}")
    assert answer.status == 200 and answer.body == TENSORS[name].numpy().tobytes()
    assert answer.headers["X-Fabric-Dtype"] == NAMES[TENSORS[name].dtype]
    assert answer.headers["X-Fabric-Shape"] == ",".join(map(str, TENSORS[name].shape))


def test_the_manifest_without_tensors_equals_the_full_one_in_all_else(url):
    whole = fetch(url, "/v1/snapshots/latest/manifest").json
    short = fetch(url, "/v1/snapshots/latest/manifest?tensors=0").json
    assert set(whole.pop("tensors")) == set(SHAPES)
    assert short == whole
    assert fetch(url, "/v1/snapshots/latest/manifest?tensors=2").status == 400


def test_a_range_of_a_tensor_counts_from_its_own_first_byte(url):
    whole = TENSORS["w"].numpy().tobytes()
    answer = fetch(url, "/v1/snapshots/latest/tensors/w", Range="bytes=400-799")
    assert (answer.status, answer.body) == (206, whole[400:800])
    assert answer.headers["Content-Range"] == "bytes 400-799/4000"
    assert fetch(url, "/v1/snapshots/500/tensors/w", Range="bytes=4000-").status == 416
    tag = answer.headers["ETag"]
    assert fetch(url, "/v1/snapshots/500/tensors/w", If_Match=tag).status == 200
    assert fetch(url, "/v1/snapshots/500/tensors/none", If_Match=tag).status == 412


def test_no_such_tensor_names_those_that_are_like_it(url):
    answer = fetch(url, "/v1/snapshots/500/tensors/weights/0.bia")
    assert answer.status == 404 and "weights/0.bias" in answer.error
    for path in ("..%2f..%2fetc%2fpasswd", "%00", "a" * 3000):
        assert fetch(url, f"/v1/snapshots/500/tensors/{path}").status in (400, 404)
    assert fetch(url, "/v1/snapshots/77777/tensors/w").status == 409


@pytest.mark.parametrize("name", TENSORS)
def test_statistics_equal_torchs(url, name):
    tensor = TENSORS[name].double()
    found = fetch(url, f"/v1/snapshots/500/statistics/{name.replace(' ', '%20')}").json
    assert (found["shape"], found["elements"]) == (list(tensor.shape), tensor.numel())
    assert (found["nan"], found["inf"]) == (0, 0)
    if not tensor.numel():
        assert found["min"] is found["max"] is found["mean"] is found["norm"] is None
        return
    for key, expected in (
        ("min", tensor.min()),
        ("max", tensor.max()),
        ("mean", tensor.mean()),
        ("norm", tensor.norm()),
    ):
        assert found[key] == pytest.approx(float(expected), rel=1e-12)


def test_values_that_are_not_finite_are_counted_and_left_out():
    data = np.array([1.0, np.nan, np.inf, -np.inf, 3.0, np.nan], dtype=np.float32)
    found = summarise(memoryview(data.tobytes()), "F32", (6,))
    assert (found["nan"], found["inf"], found["min"], found["max"], found["mean"]) == (2, 2, 1.0, 3.0, 2.0)
    huge = np.full(4, 1.7e308)
    assert summarise(memoryview(huge.tobytes()), "F64", (4,))["mean"] is None, "JSON has no infinity"
    json.dumps(found, allow_nan=False)


def test_statistics_of_a_tensor_end_when_the_slot_is_withdrawn():
    assert summarise(memoryview(bytes(8)), "F64", (1,), lambda: True) is None


EIGHT_BITS = [("F8_E4M3", torch.float8_e4m3fn), ("F8_E5M2", torch.float8_e5m2)]


@pytest.mark.parametrize("name, dtype", EIGHT_BITS, ids=str)
def test_eight_bit_floats_equal_torchs(name, dtype):
    codes = torch.arange(256, dtype=torch.uint8)
    expected = codes.view(dtype).float().numpy()
    np.testing.assert_array_equal(values(memoryview(codes.numpy().tobytes()), name), expected)


@given(st.binary(min_size=2, max_size=200))
def test_bfloat16_values_equal_torchs(data):
    data = data[: len(data) // 2 * 2]
    expected = torch.frombuffer(bytearray(data), dtype=torch.bfloat16).float().numpy()
    np.testing.assert_array_equal(values(memoryview(data), "BF16"), expected)


def test_the_document_of_the_refusals_lists_every_route_and_no_other():
    app = routes.make_app(None, None, None)  # type: ignore[arg-type]
    found = {re.sub(r":[^}]*}", "}", r.canonical) for r in app.router.resources()}
    paths = {path.removeprefix("/ranks/{rank}") for path in found}
    assert found == paths | {f"/ranks/{{rank}}{path}" for path in paths - routes.OPEN_PATHS}
    assert set(DOCUMENT["paths"]) == paths
    for path, operations in DOCUMENT["paths"].items():
        (operation,) = operations.values()
        named = {p["name"] for p in operation["parameters"] if p["in"] == "path"}
        assert named == set(re.findall(r"{(\w+)}", path))
        assert (operation.get("security") == []) == (path in routes.OPEN_PATHS)
