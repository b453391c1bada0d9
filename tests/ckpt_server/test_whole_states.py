"""Pulling, inspecting and comparing states of several ranks: real layouts, real servers, real files."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from test_durable_format import Part, as_shards, to_bytes, two_ranks
from test_reshard import Zygote, held

from fabric.ckpt_server.format.manifest import file_digest
from fabric.ckpt_server.state.training_state import capture
from fabric.cli.states import diff, inspect_state, pull
from fabric.errors import FabricError


@pytest.fixture(scope="module")
def zygote():
    found = Zygote()
    yield found
    found.close()


def call(command, *arguments: object) -> Result:
    return CliRunner().invoke(command, [str(a) for a in arguments])


def error_of(result: Result) -> str:
    assert isinstance(result.exception, FabricError), result.exception
    return str(result.exception)


@pytest.mark.parametrize(("layout", "ranks"), [("fsdp*tp", 4), ("tp", 2)])
def test_ranks_are_put_together_as_one_process_would_have_written_it(zygote, tmp_path, layout, ranks):
    """Memory and storage give the same bytes as a single process that takes over the state."""
    with held(zygote, tmp_path / "old", layout, ranks, width=90) as state:
        (alone,) = zygote.run(tmp_path / "new", "whole", 1, width=90, **state.told)
        urls = ",".join(source[0] for source in state.sources)
        durable = Path(state.durable) / "job"
        for name in (urls, durable):
            file = tmp_path / "state.safetensors"
            done = call(pull, name, "-o", file)
            assert done.exit_code == 0, done.exception
            assert state.digest in done.stdout and not done.stderr.startswith(str(name))
            assert file_digest(memoryview(file.read_bytes())) == alone["digest"]
            assert json.loads(call(inspect_state, name, "--json").stdout)["digest"] == state.digest
            shown = call(diff, name, file)
            assert shown.exit_code == 0 and "0 are not" in shown.stdout
        assert call(diff, urls, durable).exit_code == 0

        one = state.sources[1][0]
        part = call(pull, one, "-o", tmp_path / "part")
        assert part.exit_code == 0 and f"{one} is the part of rank 1 of {ranks}" in part.stderr
        assert f"{durable}#1 is the part of rank 1" in call(inspect_state, f"{durable}#1").stderr
        assert "name one address of each rank" in error_of(call(inspect_state, f"{one},{one}"))

        changed = load_file(file)
        changed["model/0.weight"][77, 5] += 1.0
        save_file(changed, file, {"fabric": "{}"})
        shown = call(diff, urls, file, "--json")
        (row,) = json.loads(shown.stdout)["different"]
        assert (row["tensor"], row["different"], row["elements"]) == ("model/0.weight", 1, 90 * 24)


def parts(*shared: dict, offsets: tuple[int, ...]) -> list[bytes]:
    """Files of ranks whose ``rows`` are shards of a matrix of 5 by 4."""
    files = []
    for state, offset in zip(shared, offsets, strict=True):
        file = bytes(to_bytes(capture({"part": Part(**state)}, 3)))
        files.append(as_shards(file, "rows", [5, 4], [offset, 0]))
    return files


WHOLE = torch.arange(20.0).reshape(5, 4)


def test_unequal_shards_scalars_and_entries_of_all_ranks(tmp_path):
    count, none = torch.tensor(7), torch.zeros(0, 3)
    files = parts(
        {"rows": WHOLE[:3].clone(), "count": count, "none": none},
        {"rows": WHOLE[3:].clone(), "count": count, "none": none},
        offsets=(0, 3),
    )
    two_ranks(str(tmp_path), files)
    assert call(pull, tmp_path / "job", "-o", tmp_path / "x").exit_code == 0
    found = load_file(tmp_path / "x")
    assert torch.equal(found["part/rows"], WHOLE) and found["part/count"] == 7
    assert found["part/none"].shape == (0, 3)


@pytest.mark.parametrize(
    ("one", "other", "sentence"),
    [
        ({"count": torch.tensor(7)}, {"count": torch.tensor(8)}, "part/count is not the same at rank 1"),
        ({"name": "a"}, {"name": "b"}, "rank 1 describes another state"),
        ({}, {"rows": WHOLE[4:].clone()}, "parts of part/rows do not make one tensor"),
    ],
)
def test_parts_that_do_not_make_one_file_are_refused(tmp_path, one, other, sentence):
    files = parts({"rows": WHOLE[:3].clone(), **one}, {"rows": WHOLE[3:].clone(), **other}, offsets=(0, 3))
    two_ranks(str(tmp_path), files)
    said = error_of(call(pull, tmp_path / "job", "-o", tmp_path / "x"))
    assert sentence in said and "name a single rank" in said and not (tmp_path / "x").exists()
    assert call(inspect_state, f"{tmp_path}/job#1").exit_code == 0


def test_a_folder_whose_path_has_the_mark_of_ranks_is_read(tmp_path):
    """The mark counts only after the last folder."""
    two_ranks(
        str(tmp_path / "try#2"),
        parts({"rows": WHOLE[:3].clone()}, {"rows": WHOLE[3:].clone()}, offsets=(0, 3)),
    )
    for name in ("try#2/job", "try#2/job#1"):
        assert call(inspect_state, f"{tmp_path}/{name}").exit_code == 0
