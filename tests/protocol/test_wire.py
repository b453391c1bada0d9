"""The codec: every message survives the trip, and nothing from outside gets past it."""

import json
from dataclasses import MISSING, fields
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fabric.errors import ProtocolError
from fabric.model import Base, Fence, Member, Record
from fabric.protocol import messages, wire

TEXT = st.text(max_size=20)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(int, st.integers(-(2**63) + 1, 2**63 - 1))
KINDS = list(get_args(messages.Message))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_message_survives_the_trip(kind):
    @given(st.from_type(kind))
    def check(message):
        assert wire.decode(wire.encode(message)) == message

    check()


@given(st.from_type(Record))
def test_a_record_survives_the_store(record):
    assert wire.decode_record(wire.encode_record(record)) == record


@given(st.sampled_from(KINDS).flatmap(st.from_type), st.dictionaries(TEXT, TEXT, max_size=3))
def test_unknown_fields_are_ignored(message, extra):
    body = json.loads(wire.encode(message))
    body = {**{f"x-{k}": v for k, v in extra.items()}, **body}
    assert wire.decode(json.dumps(body)) == message


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from(KINDS), st.data())
def test_wrong_values_raise_protocol_errors_only(kind, data):
    body = json.loads(wire.encode(data.draw(st.from_type(kind))))
    name = data.draw(st.sampled_from([f.name for f in fields(kind)]))
    body[name] = data.draw(JSON)
    try:
        wire.decode(json.dumps(body))
    except ProtocolError as error:
        assert name in str(error)


@given(st.binary(max_size=200))
def test_random_bytes_raise_protocol_errors_only(data):
    with pytest.raises(ProtocolError):
        wire.decode(data)


def test_a_missing_field_is_named():
    for kind in KINDS:
        required = [f for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]
        with pytest.raises(ProtocolError, match=required[0].name):
            wire.decode(json.dumps({"kind": kind.__name__, "version": 1}))


@pytest.mark.parametrize("version", [None, -1, 7, True, "1"])
def test_another_version_is_refused_with_a_remedy(version):
    body = json.loads(wire.encode(messages.BeatReply(3))) | {"version": version}
    with pytest.raises(ProtocolError, match="upgrade one step at a time"):
        wire.decode(json.dumps(body))


def test_the_version_before_is_accepted():
    body = json.loads(wire.encode(messages.BeatReply(3))) | {"version": 0}
    assert wire.decode(json.dumps(body)) == messages.BeatReply(3)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "1e999", "1" * 400])
def test_non_finite_numbers_never_pass(number):
    text = wire.encode(messages.Contribution(Fence("s", 1, 1), 0, 1.5, ())).decode()
    with pytest.raises(ProtocolError, match="weight"):
        wire.decode(text.replace("1.5", number))


def test_deep_nesting_is_refused():
    with pytest.raises(ProtocolError):
        wire.decode("[" * 200_000)


def test_oversized_messages_are_refused_before_parsing():
    with pytest.raises(ProtocolError, match="over the limit"):
        wire.decode(b" " * (wire.MAX_BYTES + 1))


def test_the_stored_record_of_another_version_is_refused():
    record = Record("s", 1, 1, 1, 1, "n", (Member("a", 1, "l", "c"),), Base(0, 0))
    data = wire.encode_record(record).replace(b'"version":1', b'"version":9')
    with pytest.raises(ProtocolError, match="version 9"):
        wire.decode_record(data)
