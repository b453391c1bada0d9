"""``fabric pull``, ``inspect`` and ``diff`` against a real checkpoint server and real files."""

import json
import resource
from contextlib import closing
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from server_support import end, fetch, publish, snapshot_file, start_server
from test_tensor_routes import TENSORS, file_of

from fabric.ckpt_server.attach import ServerHandle
from fabric.ckpt_server.format.manifest import BLOCK_BYTES, file_digest
from fabric.ckpt_server.reading import RemoteState, SnapshotAddress
from fabric.cli import states
from fabric.cli.states import diff, fetch_into, inspect_state, pull
from fabric.errors import FabricError, IntegrityError
from fabric.runtime.http.lighthouse_client import Lighthouses

NBYTES = 3 * BLOCK_BYTES + 1001
BIG = snapshot_file(NBYTES, seed=5)


@pytest.fixture(scope="module")
def url(served: ServerHandle) -> str:
    publish(served, 5, BIG, 9000)
    publish(served, 6, file_of(TENSORS), 600)
    return served.url


def call(command, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments])


def error_of(result: Result) -> str:
    assert isinstance(result.exception, FabricError), result.exception
    return str(result.exception)


def test_a_snapshot_is_pulled_whole(url, tmp_path):
    target = tmp_path / "state.safetensors"
    result = call(pull, f"{url}/v1/snapshots/9000", "-o", target)
    assert result.exit_code == 0, result.output
    assert target.read_bytes() == BIG and not (tmp_path / "state.safetensors.part").exists()
    assert "step 9000" in result.output and file_digest(memoryview(BIG)) in result.output


def test_a_pull_goes_on_where_it_was_cut_off(url, tmp_path):
    """Half of the file exists with one damaged block: the pull fetches the rest and this block."""
    part = tmp_path / "x.part"
    half = bytearray(BIG[: 2 * BLOCK_BYTES + 100])
    half[BLOCK_BYTES + 7] ^= 1
    part.write_bytes(half)
    state = RemoteState(f"{url}/v1/snapshots/9000", "")
    progress: list[int] = []
    fetched = fetch_into(part, state, progress.append)
    state.close()
    assert part.read_bytes() == BIG
    assert fetched == len(BIG) - BLOCK_BYTES, "the first block was right"
    assert sum(progress) == len(BIG)


def test_a_longer_partial_file_is_cut(url, tmp_path):
    part = tmp_path / "x.part"
    part.write_bytes(BIG + b"more")
    state = RemoteState(f"{url}/v1/snapshots/9000", "")
    assert fetch_into(part, state) == 0 and part.read_bytes() == BIG
    state.close()


def test_a_block_with_wrong_bytes_is_refused(url, tmp_path):
    state = RemoteState(f"{url}/v1/snapshots/9000", "")
    state.manifest["blocks"][1] = "0" * 16
    with pytest.raises(IntegrityError, match="block 1 "):
        fetch_into(tmp_path / "x.part", state)
    state.close()


@pytest.mark.parametrize(
    "address, sentence",
    [
        ("http://127.0.0.1:1", "does not answer"),
        ("{url}/v1/snapshots/12345678", "is not held"),
        ("{url}/v1/snapshots/../../etc", "names no step"),
    ],
)
def test_a_state_that_cannot_be_pulled_is_one_sentence(url, tmp_path, address, sentence):
    target = tmp_path / "state"
    assert sentence in error_of(call(pull, address.format(url=url), "-o", target))
    assert not target.exists()


def test_a_full_or_missing_folder_is_one_sentence(url, tmp_path):
    assert "cannot be written" in error_of(call(pull, url, "-o", tmp_path / "no" / "folder"))


@pytest.mark.parametrize("where", ["file", "url"])
def test_inspect_lists_the_tensors(url, tmp_path, where):
    file = tmp_path / "state.safetensors"
    file.write_bytes(file_of(TENSORS))
    name = file if where == "file" else f"{url}/v1/snapshots/600"
    body = json.loads(call(inspect_state, name, "--json").output)
    assert body["digest"] == file_digest(memoryview(file.read_bytes()))
    assert {n: tuple(t["shape"]) for n, t in body["tensors"].items()} == {
        n: tuple(t.shape) for n, t in TENSORS.items()
    }
    shown = call(inspect_state, name)
    assert shown.exit_code == 0 and "step count" in shown.output and "scalar" in shown.output


def test_inspect_refuses_a_file_that_is_not_a_state(tmp_path):
    file = tmp_path / "state"
    file.write_bytes(b"not a state at all")
    assert f"{file}: this is no safetensors file" in error_of(call(inspect_state, file))
    file.write_bytes(b"")
    assert "cannot be read" in error_of(call(inspect_state, file))
    assert "cannot be read" in error_of(call(inspect_state, tmp_path / "missing"))


def changed(tmp_path: Path) -> Path:
    other = {name: tensor.clone() for name, tensor in TENSORS.items()}
    other["w"][3] += 0.5
    other["w"][10] = float("nan")
    other["new"] = torch.ones(2)
    other["step count"] = torch.ones(1)
    del other["none"]
    file = tmp_path / "other.safetensors"
    file.write_bytes(file_of(other))
    return file


def test_diff_names_the_tensors_that_differ_and_by_how_much(url, tmp_path):
    file = changed(tmp_path)
    result = call(diff, f"{url}/v1/snapshots/600", file, "--json")
    assert result.exit_code == 1
    rows = {row["tensor"]: row for row in json.loads(result.output)["different"]}
    assert set(rows) == {"w", "new", "step count", "none"}
    assert (rows["w"]["different"], rows["w"]["elements"], rows["w"]["not_finite"]) == (2, 1000, 1)
    assert rows["w"]["largest"] == pytest.approx(0.5)
    assert "only in" in rows["new"]["why"] and "only in" in rows["none"]["why"]
    assert "F32 scalar" in rows["step count"]["why"] or "F32 " in rows["step count"]["why"]
    shown = call(diff, file, f"{url}/v1/snapshots/600")
    assert shown.exit_code == 1 and "1 tensors are bitwise equal, 4 are not" in shown.output


def test_equal_states_do_not_differ(url, tmp_path):
    file = tmp_path / "state.safetensors"
    file.write_bytes(file_of(TENSORS))
    result = call(diff, file, f"{url}/v1/snapshots/600")
    assert result.exit_code == 0 and "4 tensors are bitwise equal, 0 are not" in result.output


def test_a_server_that_dies_in_the_middle_is_one_sentence_and_the_rest_comes_from_another(run_dir, tmp_path):
    """Two servers hold the same state; after the first dies, the pull fetches only the missing part from the
    second.
    """
    file, part = snapshot_file(40_000_000, seed=6), tmp_path / "x.part"
    handle = start_server(run_dir)
    publish(handle, 0, file, 7)
    with closing(RemoteState(handle.url, "")) as state, pytest.raises(FabricError, match="was lost"):
        fetch_into(part, state, lambda _: end(handle.pid))
    handle.close()
    again = start_server(run_dir)
    publish(again, 0, file, 7)
    with closing(RemoteState(again.url, "")) as state:
        assert fetch_into(part, state) <= len(file) - BLOCK_BYTES
    assert part.read_bytes() == file
    again.close()


def test_a_disk_without_room_is_reported_at_once_and_the_partial_file_stays(url, tmp_path):
    part = tmp_path / "state.part"
    part.write_bytes(BIG[:BLOCK_BYTES])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * BLOCK_BYTES, before[1]))
    try:
        said = error_of(call(pull, f"{url}/v1/snapshots/9000", "-o", tmp_path / "state"))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert said == f"{part} cannot be written: File too large"
    assert part.read_bytes() == BIG[:BLOCK_BYTES] and not (tmp_path / "state").exists()
    assert "is a folder" in error_of(call(pull, url, "-o", tmp_path))
    assert "/dev/null is a device" in error_of(call(pull, url, "-o", "/dev/null"))


def served_bytes(url: str) -> float:
    name = 'fabric_ckpt_served_bytes_total{kind="snapshot"} '
    return float(fetch(url, "/metrics").body.decode().partition(name)[2].split()[0])


def test_many_small_tensors_are_compared_with_little_traffic(served, tmp_path):
    """`fabric diff` fetches a block once, not once per tensor in it."""
    many = {f"layer {n:04}": torch.full((100,), float(n)) for n in range(2000)}
    publish(served, 7, file_of(many), 700)
    file = tmp_path / "state.safetensors"
    file.write_bytes(file_of(many))
    before = served_bytes(served.url)
    assert call(diff, f"{served.url}/v1/snapshots/700", file).exit_code == 0
    assert served_bytes(served.url) - before <= 2 * file.stat().st_size + BLOCK_BYTES


# --- replicas by name -----------------------------------------------------------------------------------


@pytest.fixture
def job(url, attach, monkeypatch):
    """A job of two replicas: r0 holds steps 600 and 9000, r1 holds step 600 and is at step 601."""
    other = attach()
    publish(other, 5, file_of(TENSORS), 600)
    publish(other, 6, file_of(TENSORS), 601)
    held = {"r0": (url, (600, 9000)), "r1": (other.url, (600, 601))}
    snapshots = {name: [{"generation": 1, "step": x} for x in steps] for name, (_, steps) in held.items()}
    servers = [
        {"replica": name, "rank": 0, "ckpt": at, "snapshots": snapshots[name]}
        for name, (at, _) in held.items()
    ]
    status = {"checkpoint_servers": servers}
    monkeypatch.setattr(Lighthouses, "ask", lambda self, path, body=None: status)
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://lighthouse:1")
    monkeypatch.setenv("FABRIC_JOB", "gpt")
    return status


def test_two_replicas_are_compared_at_the_newest_step_that_both_hold(job):
    shown = call(diff, "r0", "r1")
    assert shown.exit_code == 0 and "step 600 and step 600" in shown.output, shown.output
    job["checkpoint_servers"][1]["snapshots"].pop(0)
    assert "r0 holds step 600, 9000; r1 holds step 601: they hold no step in common" in error_of(
        call(diff, "r0", "r1")
    )


def test_a_replica_is_pulled_and_inspected_by_its_name(job, tmp_path):
    pulled = call(pull, "r0", "-o", tmp_path / "state")
    assert pulled.exit_code == 0 and (tmp_path / "state").read_bytes() == BIG
    assert json.loads(call(inspect_state, "r1", "--json").output)["step"] == 601
    said = error_of(call(inspect_state, "r7"))
    assert said.startswith("r7 is neither a file nor a replica of job gpt") and "these do: r0, r1" in said


def test_a_name_without_a_lighthouse_is_told_how_to_name_a_replica(tmp_path):
    said = error_of(call(pull, "r0", "-o", tmp_path / "state"))
    assert said == "there is no file r0: correct its path, or give --lighthouse and --job for a replica"


def test_states_of_two_steps_are_said_to_be_so(url):
    shown = call(diff, f"{url}/v1/snapshots/9000", f"{url}/v1/snapshots/600")
    assert "has step 9000, and " in shown.stderr and "what is trained differs" in shown.stderr


def test_the_states_of_a_replica_by_name_are_those_of_all_its_ranks_at_one_step():
    """The mark of a rank in an address once hid the step, so that the other ranks gave their newest state."""
    url = "http://h:1"
    servers = [
        {"replica": "r0", "rank": rank, "ckpt": ckpt} for rank, ckpt in ((1, f"{url}/ranks/1#1"), (0, url))
    ]
    for server, steps in zip(servers, ((5, 6, 7), (5, 6)), strict=True):
        server["snapshots"] = [{"generation": 1, "step": step} for step in steps]
    found = states._held({"checkpoint_servers": servers}, "r0", "job")
    assert sorted(found) == [(1, 5), (1, 6)]
    parts = [SnapshotAddress.parse(part) for part in found[1, 5].split(",")]
    assert [(x.server.path, x.step) for x in parts] == [("", "5"), ("/ranks/1", "5")]
