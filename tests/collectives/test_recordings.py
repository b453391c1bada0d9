"""Recordings are checked field by field: what is damaged is refused as a whole, with one sentence."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from nccl_dumps import dump, entry, pickled

from fabric.collectives import recording
from fabric.collectives.plain_pickle import BadRecording
from fabric.collectives.recording import Group, Process, read_recording
from fabric.collectives.report import explain

RANK = Process("", 0)
GROUPS = {"0": ("default_pg", [0, 1])}


def read(body: object) -> recording.Recording:
    return read_recording(json.dumps(body).encode(), RANK, "rank0.json")


def test_both_forms_give_the_same_recording():
    body = dump([entry(1), entry(2, "broadcast", state="started"), entry(3, state="scheduled")], GROUPS)
    by_pickle = read_recording(pickled(body), RANK, "x")
    assert by_pickle == read_recording(json.dumps(body).encode(), RANK, "x")
    assert by_pickle.groups == {"0": Group("0", "default_pg", (0, 1))}
    done, started, scheduled = by_pickle.collectives
    assert [call.is_pending for call in (done, started, scheduled)] == [False, True, True]
    assert started.words == "broadcast (number 2 of group 0 (default_pg))"
    assert done.at == "/home/user/train.py:41 train", "frames of the library are left out"


def test_a_retired_call_of_nccl_that_is_not_completed_was_given_up():
    [call] = read(dump([entry(1, state="started", retired=True)], GROUPS)).collectives
    assert (call.is_pending, call.has_failed) == (False, True)


def test_calls_of_a_coalesced_launch_have_its_state():
    calls = [
        entry(1, "send 0->1", state="scheduled", p2p_seq_id=1),
        entry(2, "recv 0<-1", state="scheduled", p2p_seq_id=1),
        entry(3, "coalesced", p2p_seq_id=1, is_p2p=True),
        entry(4, "send 0->1", state="scheduled", p2p_seq_id=2),
    ]
    send, receive, _, lone = read(dump(calls, GROUPS)).collectives
    assert [call.is_pending for call in (send, receive, lone)] == [False, False, True]
    assert (send.peer, receive.operation, receive.words) == (
        1,
        "recv",
        "recv from rank 1 of group 0 (default_pg)",
    )


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"profiling_name": None}, "its entry 0 is damaged: it has no profiling_name"),
        ({"collective_seq_id": "1"}, "its collective_seq_id is no number"),
        ({"collective_seq_id": 2**70}, "its collective_seq_id is no number"),
        ({"collective_seq_id": True}, "its collective_seq_id is no number"),
        ({"process_group": []}, "it names no process_group"),
        ({"process_group": "0"}, "it names no process_group"),
        ({"state": "lost"}, "its state is 'lost'"),
        ({"state": None}, "its state is ''"),
        ({"input_sizes": [[-1]]}, "its input_sizes is no list of the sizes of at most 10000 tensors"),
        ({"input_sizes": [4]}, "its input_sizes is no list of the sizes of at most 10000 tensors"),
        ({"output_sizes": {}}, "its output_sizes is no list"),
        ({"input_dtypes": [1]}, "its input_dtypes is no list of at most 10000 names"),
        ({"duration_ms": "long"}, "its duration_ms is no number"),
        ({"time_created_ns": []}, "its time_created_ns is no number"),
    ],
)
def test_a_damaged_entry_is_refused_with_its_place(change, why):
    with pytest.raises(BadRecording) as error:
        read(dump([entry(1) | change, entry(2)], GROUPS))
    assert str(error.value).startswith("rank0.json: ") and why in str(error.value)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "it is empty"),
        (b"  \n", "it is empty"),
        (b"hello", "neither JSON nor a pickle"),
        (b"\x1f\x8b\x08", "neither JSON nor a pickle"),
        (b'{"entries": [', "its JSON breaks off or is damaged"),
        (b'{"entries": 1' + b"0" * 5000 + b"}", "its JSON breaks off or is damaged"),
        (b'{"a":' * 100_000, "nested too deeply|breaks off"),
        (b"{}", "lacks entries and pg_config"),
        (b'{"entries": {}}', "its entries are no list"),
        (b'{"entries": [3]}', "its entry 0 is damaged: it is not a table of fields"),
        (b'{"pg_config": []}', "its pg_config is not a table"),
        (b'{"pg_config": {"0": 1}}', "its group 0 is not described"),
        (b'{"pg_config": {"0": {"ranks": "[0, 99999999]"}}}', "lists '?99999999'? as a rank"),
        (b'{"pg_config": {"0": {"ranks": "[0, x]"}}}', "as a rank"),
        (b'{"pg_config": {"0": {"ranks": 7}}}', "in no known form"),
        (b"\x80\x02K\x01.", "it holds no table of fields"),
        (b"\x80\x02cos\nsystem\n.", "makes objects or is unknown"),
    ],
)
def test_a_file_that_is_not_a_recording_is_refused_with_one_sentence(data, why):
    with pytest.raises(BadRecording, match=f"^rank0: .*{why}") as error:
        read_recording(data, RANK, "rank0")
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_huge_file_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr(recording, "MAX_BYTES", 1 << 20)
    with pytest.raises(BadRecording, match="more than 1 MiB"):
        read_recording(b"{" + b" " * (1 << 20) + b"}", RANK, "x")
    monkeypatch.setattr(recording, "MAX_VALUES", 100)
    with pytest.raises(BadRecording, match="more than 100 values"):
        read_recording(b'{"entries": [' + b"[]," * 200 + b"[]]}", RANK, "x")


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_dump_with_any_value_in_any_place_is_explained_or_refused(data):
    body = dump([entry(1), entry(2, "send 0->1", state="started"), entry(3, state="scheduled")], GROUPS)
    tables = [body, *body["entries"], body["pg_config"]["0"]]
    for _ in range(data.draw(st.integers(1, 3))):
        table = data.draw(st.sampled_from(tables))
        table[data.draw(st.sampled_from(sorted(table)))] = data.draw(JSON_VALUES)
    try:
        left = read(body)
    except BadRecording as error:
        assert "\n" not in str(error)
        return
    right = read_recording(json.dumps(dump([entry(1)], GROUPS)).encode(), Process("", 1), "x")
    report = explain([left, right])
    json.dumps(report.to_json())
    assert all(conclusion.why for conclusion in report.conclusions)


@pytest.mark.parametrize("shared", ["input_sizes", "output_dtypes", "frames"])
def test_entries_that_share_one_long_list_are_refused_before_they_are_copied(shared):
    """A pickle of some KiB can name one list in each of its entries."""
    long = {
        "input_sizes": [[1] * 64] * 10_000,
        "output_dtypes": ["Float"] * 10_000,
        "frames": [{"name": "f", "filename": "/x/site-packages/y", "line": 1}] * 10_000,
    }[shared]
    body = dump([entry(number, **{shared: long}) for number in range(1, 1001)], GROUPS)
    with pytest.raises(BadRecording, match="more than 5000000 sizes, names and frames"):
        recording.parse_recording(body, RANK, "x")


@pytest.mark.parametrize("long", ["[" + ",".join(["0"] * 10_000) + "]", [0] * 10_000], ids=["text", "list"])
def test_groups_that_share_one_long_list_of_members_are_refused_before_they_are_copied(long):
    """A pickle of some KiB can name one list in each of its groups."""
    body = dump([entry(1)], GROUPS)
    body["pg_config"] = {str(number): {"desc": "", "ranks": long} for number in range(1000)}
    data = pickled(body)
    assert len(data) < 100_000
    with pytest.raises(BadRecording, match="its pg_config names members in more than 5000000"):
        read_recording(data, RANK, "x")
