"""The codec returns every message unchanged, and refuses malformed input."""

import json
import math
import random
import zlib
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import fields, replace

from fabric.errors import ProtocolError
from fabric.model import PROTOCOL_VERSION, Base, DataPlan, Fence, Member, Record, StepTimes, Value
from fabric.protocol.messages import network, wire
from fabric.protocol.messages.rank_messages import RankEffect, RankEvent
from fabric.store.base import MAX_VALUE_BYTES

TEXT = st.text(max_size=20)
st.register_type_strategy(float, st.floats(allow_nan=False, allow_infinity=False))
st.register_type_strategy(int, st.integers(-(2**63) + 1, 2**63 - 1))
KINDS = list(get_args(network.Message))

# Hypothesis takes a field's default from its signature, and a factory has none.
st.register_type_strategy(StepTimes, st.builds(StepTimes, waiting_s=..., work=..., sending_s=...))


@pytest.mark.parametrize("kind", KINDS, ids=lambda k: k.__name__)
def test_every_message_is_decoded_as_it_was_encoded(kind):
    # The kinds share their types of fields, so each kind needs few examples.
    @settings(max_examples=settings().max_examples // 3)
    @given(st.from_type(kind))
    def check(message):
        assert wire.decode(wire.encode(message)) == message

    check()


@given(st.from_type(Record))
def test_a_record_is_decoded_as_it_was_stored(record):
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
    name = data.draw(st.sampled_from(kind.__struct_fields__))
    body[name] = data.draw(JSON)
    text = json.dumps(body)
    try:
        wire.decode(text)
    except ProtocolError as error:
        # JSON has no such words, so the decoder refuses them and names the place
        no_json = "NaN" in text or "Infinity" in text
        assert name in str(error) or (no_json and "not a JSON message: " in str(error))


@given(st.binary(max_size=200))
def test_random_bytes_raise_protocol_errors_only(data):
    with pytest.raises(ProtocolError):
        wire.decode(data)


def test_a_missing_field_is_named():
    for kind in KINDS:
        required = [f for f in fields(kind) if f.required]
        with pytest.raises(ProtocolError, match=required[0].name):
            wire.decode(json.dumps({"kind": kind.__name__, "version": PROTOCOL_VERSION}))


@pytest.mark.parametrize("version", [None, -1, PROTOCOL_VERSION - 2, PROTOCOL_VERSION + 2, True, "3"])
def test_another_version_is_refused_with_a_remedy(version):
    body = json.loads(wire.encode(network.HeartbeatAck(3))) | {"version": version}
    with pytest.raises(ProtocolError, match="upgrade one step at a time"):
        wire.decode(json.dumps(body))


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_a_neighbouring_version_is_accepted(version):
    body = json.loads(wire.encode(network.HeartbeatAck(3))) | {"version": version}
    assert wire.decode(json.dumps(body)) == network.HeartbeatAck(3)


def test_a_record_from_before_the_renaming_is_refused_and_not_read_without_its_fields():
    """Version 1 had the fields fresh, awaited and seat; a reader that ignored them would let a newcomer
    commit.
    """
    old = {"version": 1, "store_id": "s", "roster": [["r0", 7, "a:1", "http://a", True]]}
    with pytest.raises(ProtocolError, match="version 1 cannot talk to version 3"):
        wire.decode_record(json.dumps(old).encode())


def test_a_refusal_is_understood_in_every_version():
    body = json.loads(wire.encode(network.Rejected("why"))) | {"version": 99}
    assert wire.decode(json.dumps(body)) == network.Rejected("why")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        ("NaN", "not a JSON message"),
        ("-Infinity", "not a JSON message"),
        ("1e999", r"Contribution\.weight must be a number of 64 bits"),
        ("1" * 400, r"Contribution\.weight"),
        ("null", r"Contribution\.weight must be a number, not null"),
    ],
)
def test_non_finite_numbers_never_pass(number, words):
    text = wire.encode(network.Contribution(Fence("s", 1, 1), 0, 1.5, ())).decode()
    with pytest.raises(ProtocolError, match=words):
        wire.decode(text.replace("1.5", number))


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("metrics", [(), (("null", 1.0),)])
def test_a_non_finite_number_is_not_sent(number, metrics):
    contribution = network.Contribution(Fence("s", 1, 1), 0, 1.5, (), metrics=metrics)
    assert wire.decode(wire.encode(contribution)) == contribution
    with pytest.raises(ProtocolError, match="weight"):
        wire.encode(replace(contribution, weight=number))
    with pytest.raises(ProtocolError, match="metrics"):
        wire.encode(replace(contribution, metrics=(("loss", number),)))
    with pytest.raises(ProtocolError, match="not a JSON message"):
        wire.encode(replace(contribution, layout="\udc80", weight=number))


def test_an_unpaired_surrogate_is_sent_as_a_question_mark():
    failed = network.LoopFailed(Fence("s", 1, 1), 3, "no file \udcff \N{BULLET}")
    assert wire.decode(wire.encode(failed)) == replace(failed, why="no file ? \N{BULLET}")


@pytest.mark.parametrize("data", ["[" * 200_000, '{"kind": "Heartbeat", "version": 3, "x": ' + "[" * 200_000])
def test_deep_nesting_is_refused(data):
    with pytest.raises(ProtocolError):
        wire.decode(data)


def test_text_that_is_not_utf_8_is_refused():
    data = wire.encode(network.LoopFailed(Fence("s", 1, 1), 3, "because"))
    with pytest.raises(ProtocolError, match="not a JSON message"):
        wire.decode(data.replace(b"because", b"bec\xffuse"))


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("step", "7", "Report.step must be an integer, not a string"),
        ("step", 7.0, "Report.step must be an integer, not a number"),
        ("step", True, "Report.step must be an integer, not true or false"),
        ("step", 2**63, "Report.step must be an integer <= 9223372036854775807"),
        ("step", -(2**70), "Report.step must be an integer >= -9223372036854775807"),
        ("prepared", 1, "Report.prepared must be true or false, not an integer"),
        ("have", [1, "x"], "Report.have[1] must be an integer, not a string"),
        ("round_lacked", "r1", "Report.round_lacked must be a list, not a string"),
        ("fence", [], "Report.fence must be an object, not a list"),
        ("fence", {"store_id": "s", "generation": 1}, "Report.fence.epoch is missing"),
    ],
)
def test_a_wrong_value_is_named_in_a_sentence(field, value, sentence):
    report = network.Report(Fence("s", 1, 1), 1, 2, "d", 1, 2, ("r0",), True, "g", (0, 1), DataPlan(4))
    with pytest.raises(ProtocolError) as refused:
        wire.decode(json.dumps(json.loads(wire.encode(report)) | {field: value}))
    assert str(refused.value) == sentence


def test_keys_of_a_map_are_integers_of_64_bits():
    beat = network.Heartbeat(1, 2, 3, 4, times=StepTimes(work={5: 0.5}))
    data = wire.encode(beat)
    assert wire.decode(data) == beat
    for key in (b"x", b"05", b"1.0", b"%d" % 2**63):
        with pytest.raises(ProtocolError, match=r"^Heartbeat.times.work must be an integer"):
            wire.decode(data.replace(b'{"5":', b'{"%b":' % key))


def annotations_of(kind):
    """Return the types of the fields of a message of ``kind``."""
    if isinstance(kind, type) and issubclass(kind, Value):
        for hint in get_type_hints(kind, include_extras=True).values():
            yield from annotations_of(hint)
    elif get_origin(kind) is Annotated:
        yield kind
    elif arguments := get_args(kind):
        for argument in arguments:
            yield from annotations_of(argument)
    else:
        yield kind


@pytest.mark.parametrize(
    "kind", [*KINDS, Record, *get_args(RankEffect), *get_args(RankEvent)], ids=lambda k: k.__name__
)
def test_every_integer_of_a_message_is_bounded(kind):
    assert int not in set(annotations_of(kind))


def test_oversized_messages_are_refused_before_parsing():
    with pytest.raises(ProtocolError, match="over the limit"):
        wire.decode(b" " * (wire.MAX_BYTES + 1))


def test_the_stored_record_of_another_version_is_refused():
    record = Record("s", 1, 1, 1, 1, "n", (Member("a", 1, "l", "c"),), Base(0, 0))
    data = wire.encode_record(record).replace(b'"version":%d' % PROTOCOL_VERSION, b'"version":9')
    with pytest.raises(ProtocolError, match="version 9"):
        wire.decode_record(data)


def roster_of(count):
    """Return the members of a large job, with unlike addresses, ports and times."""
    numbers = random.Random(1)
    hosts = [f"10.{numbers.randrange(256)}.{numbers.randrange(256)}.{i % 256}" for i in range(count)]
    return tuple(
        Member(
            f"replica-{i:05d}",
            1_763_717_000_000 + numbers.randrange(10**9),
            f"{host}:{numbers.randrange(32768, 60999)}",
            f"http://{host}:{numbers.randrange(32768, 60999)}",
            layout="0123456789abcdef" * 2,
        )
        for i, host in enumerate(hosts)
    )


def test_a_record_of_ten_thousand_replicas_fits_into_one_value_of_a_store():
    record = Record("s", 1, 1, 1, 1, "n", roster_of(10_000), Base(0, 0), "a large job")
    data = wire.encode_record(record)
    assert len(data) < MAX_VALUE_BYTES // 2
    assert wire.decode_record(data) == record


def test_a_short_record_is_plain_json_in_the_store_and_a_long_plain_one_is_read():
    record = Record("s", 1, 1, 1, 1, "n", roster_of(100), Base(0, 0))
    assert json.loads(wire.encode_record(record))["epoch"] == 1
    long = Record("s", 1, 1, 1, 1, "n", roster_of(1000), Base(0, 0))
    packed = wire.encode_record(long)
    assert len(packed) < wire.PLAIN_BYTES < len(zlib.decompress(packed))
    assert wire.decode_record(zlib.decompress(packed)) == long


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-5],
        lambda data: data[:100] + b"\0\0\0\0" + data[104:],
        lambda data: b"\x78",
        lambda data: zlib.compress(b"x" * (wire.MAX_BYTES + 1)),
        lambda data: zlib.compress(b"no json"),
    ],
)
def test_a_compressed_record_that_is_damaged_is_refused(damage):
    record = Record("s", 1, 1, 1, 1, "n", roster_of(1000), Base(0, 0))
    with pytest.raises(ProtocolError):
        wire.decode_record(damage(wire.encode_record(record)))


def test_a_long_message_is_decoded_packed_and_unpacked():
    message = network.Epoch(Record("s", 1, 1, 1, 1, "n", roster_of(1000), Base(0, 0)))
    plain = wire.encode(message)
    packed = wire.packed(plain)
    assert len(packed) < len(plain) // 3
    assert wire.decode(packed) == wire.decode(plain) == message
    assert wire.packed(wire.encode(network.HeartbeatAck(1))) == wire.encode(network.HeartbeatAck(1))


@pytest.mark.parametrize("cut", [1, 5, -1])
def test_a_packed_message_that_is_cut_off_or_too_long_is_refused(cut):
    packed = zlib.compress(b" " * (wire.MAX_BYTES + 1))
    with pytest.raises(ProtocolError, match="over the limit"):
        wire.decode(packed)
    with pytest.raises(ProtocolError, match="compressed"):
        wire.decode(zlib.compress(b"{}" * 1000)[:cut])
