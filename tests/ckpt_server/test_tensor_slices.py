"""Slices of whole and of sharded tensors, compared with torch's own indexing."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from server_support import fetch, publish

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.format.safetensors_file import build_preamble
from fabric.ckpt_server.format.tensor_slices import (
    contiguous_from,
    find_shards,
    gather,
    parse_slice,
    slice_text,
)
from fabric.errors import ProtocolError
from fabric.protocol.rules.lanes import TensorRegion

STEP = 900
CUBE = torch.arange(40 * 30 * 50, dtype=torch.float64).reshape(
    40, 30, 50
)  # the slice spans two pieces of a gathered transfer
SHARD = torch.arange(20, dtype=torch.float32).reshape(4, 5)  # this rank's shard: rows 4 to 8 of ten
SHARDED = {"model": {"w": {"$shard": [{"$tensor": "shard"}, {"shape": [10, 5], "offset": [4, 0]}]}}}
TENSOR = f"/v1/snapshots/{STEP}/tensors"


@pytest.fixture(scope="module")
def url(served: ServerHandle) -> str:
    rows = [("cube", "F64", (40, 30, 50), CUBE.nbytes), ("shard", "F32", (4, 5), SHARD.nbytes)]
    rows.append(("scalar", "F32", (), 4))
    rows.sort(key=lambda row: (row[1] != "F64", row[0]))
    data = {"cube": CUBE, "shard": SHARD, "scalar": torch.tensor(1.0)}
    file = build_preamble(rows, json.dumps(SHARDED, separators=(",", ":")))
    publish(served, 5, file + b"".join(data[row[0]].numpy().tobytes() for row in rows), STEP)
    return served.url


CUTS = {
    "3:5": CUBE[3:5],
    "3:5,:": CUBE[3:5],
    "7,2:9": CUBE[7:8, 2:9],
    "7,3,10:20": CUBE[7:8, 3:4, 10:20],
    ":,2:9,:": CUBE[:, 2:9],
    ":,:,49": CUBE[:, :, 49:],
    "1:39,1:29,1:49": CUBE[1:39, 1:29, 1:49],
    "5:5": CUBE[5:5],
    ":,3:3": CUBE[:, 3:3],
    " 0 : 2 , 1 ": CUBE[0:2, 1:2],
}


@pytest.mark.parametrize("asked", CUTS)
def test_a_slice_equals_torchs(url, asked):
    answer, expected = fetch(url, f"{TENSOR}/cube?slice={asked.replace(' ', '%20')}"), CUTS[asked]
    assert answer.status == 200 and answer.body == expected.contiguous().numpy().tobytes()
    assert answer.headers["X-Fabric-Shape"] == ",".join(map(str, expected.shape))
    assert answer.headers["Content-Length"] == str(expected.nbytes)


@pytest.mark.parametrize("asked", ["2:29", ":,2:29,1:"], ids=["in one piece", "gathered"])
def test_ranges_and_conditions_count_in_the_slice(url, asked):
    path = f"{TENSOR}/cube?slice={asked}"
    whole = fetch(url, path)
    assert len(whole.body) > 100_000
    for begin, end in ((0, 1), (13, 14), (5, 100_000), (len(whole.body) - 3, len(whole.body))):
        answer = fetch(url, path, Range=f"bytes={begin}-{end - 1}")
        assert (answer.status, answer.body) == (206, whole.body[begin:end])
    assert fetch(url, path, Range=f"bytes={len(whole.body)}-").status == 416
    tag = whole.headers["ETag"]
    assert fetch(url, path, If_Match=f'"other", {tag}').status == 200
    assert fetch(url, path, If_None_Match=tag).status == 304
    assert fetch(url, f"{TENSOR}/cube", If_Match=tag).status == 412


def test_a_slice_outside_of_the_tensor_is_refused_with_its_shape(url):
    wrong = ["41", "0:41", "5:3", "-1:3", "::2", "a", "", ",", "0:1,0:1,0:1,0:1", "1e3", "0x1", "9" * 30]
    for asked in wrong:
        answer = fetch(url, f"{TENSOR}/cube?slice={asked}")
        assert answer.status == 400, asked
        assert "[40, 30, 50]" in answer.error
    assert fetch(url, f"{TENSOR}/scalar?slice=0").status == 400
    assert fetch(url, f"{TENSOR}/cube?slice=0&of=all").status == 400
    assert fetch(url, f"{TENSOR}/nobody?slice=0").status == 404


def test_a_slice_of_a_sharded_tensor_is_the_part_of_it_that_this_rank_holds(url):
    whole = torch.full((10, 5), torch.nan)
    whole[4:8] = SHARD
    answer = fetch(url, f"{TENSOR}/shard?slice=2:6,1:3&of=whole")
    assert answer.status == 200 and answer.body == whole[4:6, 1:3].contiguous().numpy().tobytes()
    assert answer.headers["X-Fabric-Slice"] == "4:6,1:3" and answer.headers["X-Fabric-Shape"] == "2,2"
    answer = fetch(url, f"{TENSOR}/shard?slice=2:4,1:3")
    assert answer.body == SHARD[2:4, 1:3].contiguous().numpy().tobytes()
    told = fetch(url, f"{TENSOR}/shard?slice=8:10&of=whole")
    assert told.status == 404 and "holds 4:8,0:5" in told.error
    assert fetch(url, f"{TENSOR}/shard?slice=0:11&of=whole").status == 400
    tensors = fetch(url, f"/v1/snapshots/{STEP}/manifest").json["tensors"]
    assert (
        tensors["shard"]["whole"] == {"shape": [10, 5], "offset": [4, 0]} and "whole" not in tensors["cube"]
    )


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    ends = [sorted((draw(st.integers(0, n)), draw(st.integers(0, n)))) for n in shape]
    return shape, TensorRegion(tuple(b for b, _ in ends), tuple(e - b for b, e in ends))


@settings(deadline=None)
@given(boxes(), st.data())
def test_every_box_equals_numpys_slice(found, data):
    shape, box = found
    array = np.arange(int(np.prod(shape)), dtype=np.uint16).reshape(shape)
    cut = array[tuple(slice(b, e) for b, e in zip(box.begin, box.end, strict=True))]
    assert parse_slice(slice_text(box), shape) == box
    assert box.elements == cut.size
    first, numbers = contiguous_from(box, shape), np.arange(array.size).reshape(shape)
    inside = numbers[box.within(TensorRegion.whole(shape))].ravel()
    assert (first is None) == bool((np.diff(inside) != 1).any())
    if first is not None:
        assert np.array_equal(array.ravel()[first : first + cut.size], cut.ravel())
    if cut.size:
        begin = data.draw(st.integers(0, cut.size - 1))
        end = data.draw(st.integers(begin + 1, cut.size))
        made = gather(memoryview(array.tobytes()), 2, shape, box, (begin, end))
        assert bytes(made) == cut.ravel()[begin:end].tobytes()


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="0123456789:, -x\u0663", max_size=20), st.lists(st.integers(0, 9), max_size=3))
def test_any_text_is_a_box_within_the_tensor_or_refused(text, shape):
    try:
        box = parse_slice(text, tuple(shape))
    except ProtocolError:
        return
    assert len(box.begin) == len(box.sizes) == len(shape)
    assert all(0 <= b <= e <= n for b, e, n in zip(box.begin, box.end, shape, strict=True))


WHAT_JSON_HAS = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["$shard", "$tensor", "shape", "offset"]), inner, max_size=4)
    ),
)


@settings(deadline=None)
@given(WHAT_JSON_HAS)
def test_any_description_of_shards_is_used_or_refused(described):
    for shard in find_shards(json.dumps({"$shard": described})).values():
        assert len(shard.shape) == len(shard.offset)
    assert find_shards('{"$shard"') == {}
