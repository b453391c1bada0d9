"""Every parser of text that another process or person wrote: any text is read, or refused in a sentence."""

import copy
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from fabric.audit.journal import parse_journal, read_recoveries
from fabric.ckpt_server.durable.reader import FORMAT as DURABLE
from fabric.ckpt_server.durable.reader import parse_manifest, parse_rank_shard, rank_shard_name
from fabric.ckpt_server.format.manifest import BlockDigests, digest_of_blocks, make_manifest
from fabric.ckpt_server.format.tensor_slices import find_shards, parse_slice
from fabric.ckpt_server.server.debug_probe import parse_dump, parse_flight
from fabric.ckpt_server.state.training_state import FORMAT as STATE
from fabric.ckpt_server.state.training_state import parse_description
from fabric.cli.drill import read_plan
from fabric.cli.launch.command import parse_ranks
from fabric.client.collectives.calls import Call, CallFrame, Payload
from fabric.collectives.recording import Process, parse_recording
from fabric.drill.injection.injector import read_answer
from fabric.drill.judge.expectations import parse_expectation
from fabric.errors import FabricError
from fabric.ftar.device.device_ring import read_offer
from fabric.lighthouse.diagnosis.rank_probe import ProbeTarget, of_answers
from fabric.lighthouse.http.node_meeting import words_of
from fabric.lighthouse.http.operator_routes import _decoded, _FaultRequest
from fabric.lighthouse.jobs.drills import InjectorRequest
from fabric.model import SnapshotRef
from fabric.plan.failures import phases_of, read_trace
from fabric.protocol.messages.rank_messages import decode_command, decode_outcomes
from fabric.protocol.messages.wire import decode_line, decode_value
from fabric.protocol.nodes import NodeOrder
from fabric.runtime import config
from fabric.runtime.drill_orders import PointOrder, read_order
from fabric.runtime.http import parse_ports
from fabric.runtime.rank_layout import parse_layout, parse_order
from fabric.transport.greeting import CHALLENGE_BYTES, Greeting, _proof, read_hello
from fabric.transport.link import FrameParser
from fabric.transport.tcp import parse_address

EXAMPLES = 150
_blocks = BlockDigests()
_blocks.update(memoryview(b"x" * 100))
DIGEST = digest_of_blocks(100, _blocks.blocks())
SNAPSHOT = make_manifest(SnapshotRef(1, 5, DIGEST), 100, _blocks.blocks(), job="j", replica="r0", created=1.0)
MANIFEST = {
    "format": DURABLE,
    "generation": 1,
    "step": 5,
    "digest": DIGEST,
    "job": "j",
    "ranks": 1,
    "files": {name: {"nbytes": 100, "digest": DIGEST} for name in (rank_shard_name(0), "data-0")},
}
SHARD = {"$shard": [{"$tensor": "w"}, {"shape": [4, 2], "offset": [0, 0]}]}
TARGET = ProbeTarget("r0", 0, "http://127.0.0.1:1", frozenset())
GREETING = asdict(Greeting("j", "s", "r0", 1, "control"))
LINE = {"replica": "r0", "event": "commit", "step": 1, "epoch": 1, "t": 1.0, "digest": "d", "global_batch": 4}
GOOD_SETTINGS = {
    "FABRIC_REPLICAS": "1:3",
    "FABRIC_DURABLE_EVERY": "10m keep 3 required",
    "FABRIC_SNAPSHOT_EVERY": "2% 10m",
    "FABRIC_ON_ABORT": "retry 3",
    "FABRIC_BIND": "[::1]:1-2",
    "FABRIC_DURABLE": "s3://bucket/x",
    "FABRIC_LIGHTHOUSE": "http://127.0.0.1:8600",
    "FABRIC_LAYOUT": "tp=2,layers=5+7",
}


@dataclass(frozen=True)
class Parser:
    """A parser of bytes, and a document of the form that it reads."""

    name: str
    parse: Callable[[bytes, Path], object]
    good: Any
    also: tuple[type[Exception], ...] = ()  # what its callers turn into a sentence


def of_text(parse: Callable[[str], object]) -> Callable[[bytes, Path], object]:
    return lambda data, folder: parse(data.decode("utf-8", "replace"))


def of_file(parse: Callable[[Path], object]) -> Callable[[bytes, Path], object]:
    def read(data: bytes, folder: Path) -> object:
        (folder / "file").write_bytes(data)
        return parse(folder / "file")

    return read


def of_value(parse: Callable[[Any], object]) -> Callable[[bytes, Path], object]:
    """The parser gets JSON that a client has decoded."""

    def read(data: bytes, folder: Path) -> object:
        try:
            body = json.loads(data)
        except (ValueError, RecursionError):
            return None
        return parse(body)

    return read


def of_list(parse: Callable[[list[Any]], object]) -> Callable[[bytes, Path], object]:
    return of_value(lambda body: parse(body if isinstance(body, list) else [body]))


def proven(body: bytes) -> bytes:
    """Return the hello of a dialler that has the token, with any greeting."""
    nonce = b"n" * CHALLENGE_BYTES
    return nonce + _proof(b"t", b"dial", b"c", nonce, body) + body


def setting(name: str) -> Callable[[bytes, Path], object]:
    others = {"FABRIC_DISABLE": "1", "FABRIC_LIGHTHOUSE": "http://h:1"}
    return of_text(lambda text: config.settings({**others, name: text}))


PARSERS = (
    Parser("journal", lambda data, _: parse_journal("r0", data), LINE),
    Parser(
        "trace",
        of_file(read_trace),
        [{"event_time": 1.0, "node_id": "n", "event_type": "fault_start"}],
        (ValueError, OSError),
    ),
    Parser(
        "recovery records of a plan",
        of_list(phases_of),
        [{"detected": 1.0, "step_committed": 2.0, "lost": {}}],
        (ValueError,),
    ),
    Parser("plan file", of_file(read_plan), {"faults": [{"at": "5s", "fault": "kill", "replica": "r0"}]}),
    Parser(
        "description of a state",
        of_text(parse_description),
        {"format": STATE, "step": 5, "state": {"m": SHARD}},
    ),
    Parser("shards of a state", of_text(find_shards), {"format": STATE, "step": 5, "state": {"m": SHARD}}),
    Parser("manifest of a durable checkpoint", lambda data, _: parse_manifest(data, "m"), MANIFEST),
    Parser(
        "part of a durable checkpoint",
        lambda data, _: parse_rank_shard(data, "m", MANIFEST, 0),
        {"format": DURABLE, "rank": 0, "snapshot": SNAPSHOT, "segments": [["data-0", 0, 100]]},
    ),
    Parser(
        "order of a drill",
        lambda data, _: read_order(data),
        structs.asdict(PointOrder("d", "step-begin", "kill")),
    ),
    Parser(
        "recovery records of a drill",
        of_list(read_recoveries),
        [{"kind": "death", "about": "r0", "detected": 1.0, "lost": {}}],
    ),
    Parser(
        "stacks of a trainer",
        of_text(parse_dump),
        'Thread 0x1 [main] (most recent call first):\n  File "a", line 1 in f',
    ),
    Parser("flight recording", of_text(parse_flight), {"entries": []}),
    Parser(
        "recording of collectives",
        of_value(lambda body: parse_recording(body, Process("h", 0), "s")),
        {"version": "2.5", "entries": [{"record_id": 1, "profiling_name": "a", "input_sizes": [[1]]}]},
    ),
    Parser(
        "frame of a collective", lambda data, _: CallFrame.unpack(data), [[1, 0, 2], "barrier", None, "", 0]
    ),
    Parser(
        "result of a collective",
        lambda data, _: Payload.unpacked(Call("all_gather", "float32", (2,)), data),
        '\0\0\0\0\0\0\0\x06["r0"]12345678',
    ),
    Parser("hello of a link", lambda data, _: read_hello(data, b"c", b"t"), "n" * 64 + "{}"),
    Parser("greeting of a link", lambda data, _: read_hello(proven(data), b"c", b"t"), GREETING),
    Parser("frames of a link", lambda data, _: FrameParser().feed(data), "\0\0\0\x02ab"),
    Parser(
        "request of an injector",
        lambda data, _: _decoded(data, InjectorRequest),
        {
            "replica": "r0",
            "id": "i",
            "pid": 1,
            "host": "h",
            "restarts": True,
            "reports": {"1": {"observed": "x"}},
        },
    ),
    Parser(
        "fault of a drill",
        lambda data, _: _decoded(data, _FaultRequest),
        {"drill": "d", "fault": "kill", "replica": "r0", "seconds": 1.5},
    ),
    Parser(
        "answer to an injector",
        of_value(read_answer),
        {"drill": "d", "faults": [{"number": 1, "fault": "kill", "seconds": 0.0}]},
    ),
    Parser(
        "answers to a probe",
        of_value(lambda body: of_answers(TARGET, body, body, body) if isinstance(body, dict) else None),
        {
            "trainer": {"state": "running", "pid": 1, "silent": "", "says": {"step": 1}},
            "how": "interpreter",
            "threads": [{"stack": ["f"]}],
            "kernel": [{"state": "S", "wchan": "poll"}],
            "entries": [{"record_id": 1, "profiling_name": "a", "input_sizes": [[1]]}],
            "error": "none",
        },
    ),
    Parser(
        "words of a launcher",
        of_value(lambda body: words_of(body) if isinstance(body, dict) else None),
        {
            "says": {
                "id": "i",
                "host": "h",
                "number": 1,
                "nodes": 2,
                "shape": "s",
                "address": "h:1",
                "end": {"codes": {"0": 1}, "first": [0], "lost": ["its host"]},
            },
            "knows": ["wait", "", ""],
        },
    ),
    Parser(
        "order to a launcher",
        lambda data, _: decode_value(NodeOrder, data, "order"),
        {"do": "start", "why": "all are there", "attempt": 1, "ended": None},
    ),
    Parser("line of a trainer", lambda data, _: decode_line(data), {"kind": "attach", "job": "j"}),
    Parser("frame of device memory", lambda data, _: read_offer(data), {"device": 0, "size": 1}),
    Parser("command of a rank", lambda data, _: decode_command(data), {"kind": "Commit", "value": {}}),
    Parser(
        "outcomes of ranks", lambda data, _: decode_outcomes(data, (0, 1)), {"kind": "Prepared", "value": {}}
    ),
    Parser("address", of_text(parse_address), "127.0.0.1:80"),
    Parser("ports", of_text(parse_ports), "8600-8610"),
    Parser("slice", of_text(lambda text: parse_slice(text, (4, 2))), "0:1,0:2"),
    Parser("expectation", of_text(parse_expectation), "steps_lost<=1"),
    Parser("ranks", of_text(parse_ranks), "0/2"),
    Parser("layout", of_text(parse_layout), "dp=2,tp=2"),
    Parser("order of a layout", of_text(parse_order), {"layout": "dp=2"}),
    *(
        Parser(name, setting(name), GOOD_SETTINGS.get(name, "1"))
        for name in sorted(f"FABRIC_{name.upper()}" for name in config.Settings.__struct_fields__)
    ),
)

# Values that have ended a parser with a traceback.
NASTY = st.sampled_from(
    [
        *(10**400, -(10**400), 1e308, float("inf"), float("nan"), -1, 2**63, True, None, 0.5),
        *("", "\x1b[2J", "\ud800", "9" * 5000, "x" * 200_000, [], {}, [[]], {"": 1}),
    ]
)


def places(node: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a document."""
    if isinstance(node, dict):
        return [(node, key) for key in node] + [p for child in node.values() for p in places(child)]
    if isinstance(node, list):
        return [(node, i) for i in range(len(node))] + [p for child in node for p in places(child)]
    return []


@st.composite
def texts(draw: st.DrawFn, good: Any) -> bytes:
    """Return any bytes, or a good document with one value or a few bytes changed."""
    way = draw(st.sampled_from(["bytes", "deep", "value", "cut", "digits"]))
    if way == "bytes":
        return draw(st.binary(max_size=200))
    if way == "deep":
        return draw(st.sampled_from([b"[", b'{"a":', b"[{}"])) * 60_000
    document = copy.deepcopy(good)
    if way == "value" and (spots := places(document)):
        holder, key = draw(st.sampled_from(spots))
        holder[key] = draw(NASTY)
    text = document if isinstance(document, str) else json.dumps(document)
    data = text.encode("utf-8", "replace")
    if way == "digits":
        at = draw(st.integers(0, len(data)))
        return data[:at] + draw(st.sampled_from([b"9" * 5000, b"1e999", b"\xd9\xa3", b"\0"])) + data[at:]
    if way == "cut":
        begin = draw(st.integers(0, len(data)))
        return data[:begin] + draw(st.binary(max_size=3)) + data[draw(st.integers(begin, len(data))) :]
    return data


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_any_text_is_read_or_refused_in_a_sentence(parser, tmp_path):
    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(texts(parser.good))
    def check(data: bytes) -> None:
        try:
            parser.parse(data, tmp_path)
        except (FabricError, *parser.also) as error:
            assert 0 < len(str(error)) < 4000, error

    check()


@pytest.mark.parametrize("key", ["", "\ud800", "\x1b[2J", "9" * 5000, "x" * 200_000], ids=len)
@pytest.mark.parametrize("parser", [x for x in PARSERS if not isinstance(x.good, str)], ids=lambda x: x.name)
def test_any_key_is_read_or_refused_in_a_sentence(parser, key, tmp_path):
    """Half of a character as the number of a rank was an internal error of the lighthouse."""
    for at, (holder, _) in enumerate(places(parser.good)):
        if not isinstance(holder, dict):
            continue
        document = copy.deepcopy(parser.good)
        changed, before = places(document)[at]
        changed[key] = changed.pop(before)
        try:
            parser.parse(json.dumps(document).encode(), tmp_path)
        except (FabricError, *parser.also) as error:
            assert 0 < len(str(error)) < 4000, error


def test_a_password_in_the_storages_url_is_refused_and_not_repeated():
    """It once reached the log of every replica."""
    with pytest.raises(FabricError) as refused:
        config.settings({"FABRIC_DISABLE": "1", "FABRIC_DURABLE": "sftp://ann:secret-word@host/folder"})
    assert "FABRIC_DURABLE holds a password" in str(refused.value) and "secret-word" not in str(refused.value)
    assert config.settings({"FABRIC_DISABLE": "1", "FABRIC_DURABLE": "sftp://ann@host/a:b@c"}).durable
