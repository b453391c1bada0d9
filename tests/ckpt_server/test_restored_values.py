"""``restore_values`` from real checkpoint servers, files of ``fabric pull`` and durable checkpoints."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from forked_processes import TORCH, run_python
from server_support import ROOT, TOKEN, end, publish, start_server
from test_durable_format import Part as Held
from test_durable_format import as_shards, flip, manifest_for, objects, train, two_ranks, write_one
from test_training_state import to_bytes

from fabric.ckpt_server.format.manifest import of_rank
from fabric.ckpt_server.format.tensor_slices import Shard
from fabric.ckpt_server.state.training_state import capture
from fabric.cli.states import pull
from fabric.client import RestoredValues, restore_values
from fabric.errors import ConfigError, FabricError, IntegrityError, StateError, Unreachable

WHOLE = torch.arange(20.0).reshape(5, 4)


@pytest.fixture(scope="module")
def trained() -> dict:
    state = objects(1)
    train(state)
    return state


@pytest.fixture(scope="module")
def file(trained) -> bytes:
    return bytes(to_bytes(capture(trained, 7)))


@pytest.fixture(scope="module")
def url(served, file) -> str:
    publish(served, 5, file, 7)
    return served.url


def check(restored: RestoredValues, trained: dict, digest: str) -> None:
    """The values are those of the live objects, and a fresh set of objects takes them over."""
    assert (restored.step, restored.rank, restored.ranks, restored.digest) == (7, 0, 1, digest)
    assert set(restored.values) == {"model", "optimizer", "scheduler"} and not restored.shards
    assert restored.values["scheduler"] == trained["scheduler"].state_dict()
    fresh = objects(2)
    for name, live in fresh.items():
        live.load_state_dict(restored.values[name])
    assert capture(fresh, 7).digest() == digest


def sentence(error: pytest.ExceptionInfo[FabricError]) -> str:
    text = str(error.value)
    assert "\n" not in text and "Traceback" not in text
    return text


def test_a_served_snapshot_a_pulled_file_and_a_durable_checkpoint_give_the_same_values(
    url, trained, tmp_path
):
    digest = capture(trained, 7).digest()
    check(restore_values(url), trained, digest)
    check(restore_values(f"{url}/v1/snapshots/7", digest=digest), trained, digest)
    target = tmp_path / "state.safetensors"
    done = CliRunner().invoke(pull, [url, "-o", str(target)])
    assert f"digest {digest}" in done.stdout
    check(restore_values(target, digest=digest), trained, digest)
    write_one(str(tmp_path / "durable"), trained, 7)
    check(restore_values(tmp_path / "durable" / "job", digest=digest), trained, digest)


def test_the_values_are_the_callers_own(url, trained):
    """To change a value changes neither the snapshot nor a second reading of it."""
    restored = restore_values(url)
    restored.values["model"]["0.weight"].zero_()
    again = restore_values(url)
    assert torch.equal(again.values["model"]["0.weight"], trained["model"][0].weight)
    assert again.values["model"]["0.weight"].device.type == "cpu"


def test_a_url_needs_the_token_and_takes_it_from_an_argument_or_the_environment(
    run_dir, tmp_path, monkeypatch, file
):
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    handle = start_server(run_dir, token_file=token)
    publish(handle, 0, file, 7)
    with pytest.raises(FabricError, match="token"):
        restore_values(handle.url)
    assert restore_values(handle.url, token_file=token).step == 7
    monkeypatch.setenv("FABRIC_TOKEN_FILE", str(token))
    assert restore_values(handle.url).step == 7
    handle.close()


def test_the_example_evaluates_a_snapshot_of_a_server(served, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    toy = importlib.import_module("toy")
    model = toy.make_model()
    publish(served, 6, bytes(to_bytes(capture({"model": model}, 11))), 11)
    done = run_python("examples/evaluate.py", f"{served.url}/v1/snapshots/11", imports=TORCH, cwd=str(ROOT))
    samples = toy.Samples()
    loss = torch.nn.functional.mse_loss(model(samples.x), samples.y).item()
    assert done.stdout == f"step 11: loss {loss:.4f} over 256 samples\n", done.stderr


# --- several ranks ------------------------------------------------------------------------------------


def shards_of_two_ranks() -> list[bytes]:
    """The files of two ranks that share a matrix by rows."""
    files = []
    for rows, offset in ((WHOLE[:3], 0), (WHOLE[3:], 3)):
        held = Held(rows=rows.clone(), count=torch.tensor(7))
        files.append(as_shards(bytes(to_bytes(capture({"part": held}, 3))), "rows", [5, 4], [offset, 0]))
    return files


def test_all_ranks_give_the_whole_state_and_one_rank_its_part(tmp_path):
    files = shards_of_two_ranks()
    two_ranks(str(tmp_path), files)
    manifests = [manifest_for(data, 3) for data in files]
    handles = []
    for rank, data in enumerate(files):
        handle = start_server(tmp_path / f"run{rank}", rank=rank)
        handles.append(handle)
        handle.begin("snapshot", 0)
        handle.allocate("snapshot", 0, len(data))[:] = data
        handle.publish_snapshot(0, of_rank(manifests[rank], rank, [m["digest"] for m in manifests]))
    urls = [handle.url for handle in handles]
    try:
        for source in (",".join(urls), tmp_path / "job"):
            restored = restore_values(source)
            assert (
                torch.equal(restored.values["part"]["rows"], WHOLE) and restored.values["part"]["count"] == 7
            )
            assert (restored.ranks, restored.shards) == (1, {})
        for source in (urls[1], f"{tmp_path}/job#1"):
            restored = restore_values(source)
            assert torch.equal(restored.values["part"]["rows"], WHOLE[3:])
            assert (restored.rank, restored.ranks) == (1, 2)
            assert restored.shards == {"part/rows": Shard((5, 4), (3, 0))}
        target = tmp_path / "whole.safetensors"
        done = CliRunner().invoke(pull, [str(tmp_path / "job"), "-o", str(target)])
        digest = done.stdout.split()[-1]
        assert torch.equal(restore_values(target, digest=digest).values["part"]["rows"], WHOLE)
    finally:
        for handle in handles:
            end(handle.pid)
            handle.close()


# --- damage -------------------------------------------------------------------------------------------


def test_a_truncated_file_at_any_length_is_one_sentence(file, tmp_path):
    target = tmp_path / "state.safetensors"
    for length in [0, 1, 7, 8, 100, 5000, len(file) // 2, len(file) - 1]:
        target.write_bytes(file[:length])
        with pytest.raises((ConfigError, StateError)) as error:
            restore_values(target)
        assert str(target) in sentence(error)


def test_a_flipped_bit_anywhere_in_a_file_is_found_with_the_digest(file, trained, tmp_path):
    target, digest = tmp_path / "state.safetensors", capture(trained, 7).digest()
    for place in [9, 300, 3000, len(file) // 2, len(file) - 1]:
        target.write_bytes(file)
        flip(target, place)
        with pytest.raises(StateError) as error:
            restore_values(target, digest=digest)
        assert str(target) in sentence(error)


def test_a_damaged_description_is_one_sentence_without_a_digest(file, tmp_path):
    target = tmp_path / "state.safetensors"
    target.write_bytes(file.replace(b'\\"$tensor\\"', b'\\"$tenser\\"', 1))
    with pytest.raises(StateError, match="unknown encoding") as error:
        restore_values(target)
    assert str(target) in sentence(error)


def test_another_digest_is_refused(url):
    with pytest.raises(IntegrityError, match=f"{url} has the digest .* and not {'0' * 32}"):
        restore_values(url, digest="0" * 32)


def test_a_damaged_durable_checkpoint_names_its_file(trained, tmp_path):
    write_one(str(tmp_path), trained, 7)
    (folder,) = (tmp_path / "job").iterdir()
    segments = json.loads((folder / "fabric-0.json").read_text())["segments"]
    begin = next(begin for name, begin, _ in segments if name == "__0_0.distcp")
    flip(folder / "__0_0.distcp", begin)
    with pytest.raises(IntegrityError, match=r"__0_0\.distcp"):
        restore_values(tmp_path / "job")


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("http://127.0.0.1:9", Unreachable, "does not answer"),
        ("no-such-file.safetensors", ConfigError, "cannot be read"),
        ("http://127.0.0.1:9/v1/snapshots/x", ConfigError, "names no step"),
    ],
)
def test_a_source_that_is_not_there_is_one_sentence(source, kind, words):
    with pytest.raises(kind, match=words) as error:
        restore_values(source)
    sentence(error)


def test_a_step_that_the_server_does_not_hold_is_one_sentence(url):
    with pytest.raises(StateError) as error:
        restore_values(f"{url}/v1/snapshots/999")
    assert "999" in sentence(error) or "step" in sentence(error)


def test_a_folder_without_a_checkpoint_is_one_sentence(tmp_path: Path):
    with pytest.raises(StateError, match="no complete checkpoint") as error:
        restore_values(tmp_path)
    sentence(error)
