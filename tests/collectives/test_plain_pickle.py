"""From untrusted pickles the reader accepts plain data, as Python reads it, and refuses everything else."""

import pickle
import pickletools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_dumps import dump, entry, pickled

from fabric.collectives import plain_pickle
from fabric.collectives.plain_pickle import BadRecording, load_plain

TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
NUMBERS = st.integers(-(2**80), 2**80) | st.floats(allow_nan=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | TEXTS,
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(TEXTS, inner),
    max_leaves=30,
)


class Bomb:
    ran = False

    def __reduce__(self):
        return (setattr, (Bomb, "ran", True))


@given(VALUES, st.integers(2, 5))
def test_plain_values_are_read_as_python_reads_them(value, protocol):
    data = pickle.dumps(value, protocol)
    assert load_plain(data) == value
    assert load_plain(pickletools.optimize(data)) == value


def test_shared_parts_stay_shared():
    frame = {"line": 1}
    read = load_plain(pickle.dumps([frame, frame], 2))
    assert read[0] is read[1]


@pytest.mark.parametrize("protocol", range(2, 6))
@pytest.mark.parametrize("value", [Bomb(), Bomb, print, {"entries": [Bomb()]}, {1, 2}, b"bytes", 1j])
def test_objects_are_refused_and_nothing_runs(value, protocol):
    with pytest.raises(BadRecording, match="makes objects or is unknown"):
        load_plain(pickle.dumps(value, protocol))
    assert not Bomb.ran


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x02cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02(S'true'\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93.",
        b"\x80\x02\x82\x01.",
        b"\x80\x02U\x01a\x81.",
        b"\x80\x02PX.",
        b"\x80\x02}}b.",
    ],
    ids=["GLOBAL", "INST", "STACK_GLOBAL", "EXT1", "NEWOBJ", "PERSID", "BUILD"],
)
def test_every_way_to_call_code_is_refused(data):
    with pytest.raises(BadRecording):
        load_plain(data)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "breaks off"),
        (b"\x80", "breaks off or is damaged at byte 0"),
        (b"\x80\x09N.", "damaged"),
        (b"\x80\x02.", "in the middle of a value"),
        (b"\x80\x02NN.", "in the middle of a value"),
        (b"\x80\x02(.", "in the middle of a value"),
        (b"\x80\x02e.", "breaks off or is damaged"),
        (b"\x80\x02(e.", "breaks off or is damaged"),
        (b"\x80\x02N(Ne.", "damaged"),
        (b"\x80\x02}K\x01K\x02s.", "damaged"),
        (b"\x80\x02}(Nu.", "damaged"),
        (b"\x80\x02h\x07.", "damaged"),
        (b"\x80\x02(q\x00.", "damaged"),
        (b"\x80\x02\x8d" + b"\xff" * 8 + b".", "breaks off or is damaged"),
        (b"\x80\x02X\x01\x00\x00\x00\xff.", "damaged"),
        (b"\x80\x02}(K\x01NX\x01\x00\x00\x00aNu.", "damaged"),
    ],
)
def test_a_damaged_pickle_is_refused_in_one_sentence(data, why):
    with pytest.raises(BadRecording, match=why):
        load_plain(data)


def test_a_small_pickle_cannot_take_much_memory(monkeypatch):
    monkeypatch.setattr(plain_pickle, "MAX_VALUES", 1000)
    with pytest.raises(BadRecording, match="more than 1000 values"):
        load_plain(b"\x80\x02" + b"]" * 2000 + b".")


def test_a_place_in_the_memo_takes_no_memory_up_to_that_place():
    tracemalloc.start()
    try:
        assert load_plain(b"\x80\x02Nr\xff\xff\xff\x7f.") is None
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@settings(max_examples=300)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data):
    try:
        load_plain(b"\x80\x02" + data)
    except BadRecording as error:
        assert "\n" not in str(error)


DUMP = pickled(dump([entry(1), entry(2, state="started")], {"0": ("default_pg", [0, 1])}))


@settings(max_examples=300)
@given(st.data())
def test_a_dump_with_flipped_bytes_is_read_or_refused(data):
    broken = bytearray(DUMP)
    for _ in range(data.draw(st.integers(1, 4))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    try:
        load_plain(bytes(broken))
    except BadRecording as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize("size", range(0, len(DUMP), 37))
def test_a_truncated_dump_is_refused(size):
    with pytest.raises(BadRecording):
        load_plain(DUMP[:size])
