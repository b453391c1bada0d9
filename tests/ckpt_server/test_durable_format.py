"""Durable checkpoints as files: torch reads them, fabric reads them, and fabric refuses damaged ones."""

import json
import os
import shutil
from contextlib import ExitStack, closing
from pathlib import Path

import fsspec
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ckpt_server.test_training_state import to_bytes
from safetensors.torch import load
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fabric.ckpt_server.durable.reader import (
    MANIFEST,
    MARKER,
    Attempt,
    attempts_to_delete,
    find_checkpoint,
    list_checkpoints,
    open_checkpoint,
    parse_manifest,
)
from fabric.ckpt_server.durable.storage import Storage
from fabric.ckpt_server.durable.writer import write
from fabric.ckpt_server.format.manifest import (
    BLOCK_BYTES,
    block_digest,
    bytes_digest,
    file_digest,
    make_manifest,
    of_rank,
)
from fabric.ckpt_server.reading import DurableState
from fabric.ckpt_server.reshard import StoredRankFile
from fabric.ckpt_server.state.training_state import capture
from fabric.ckpt_server.state.training_state import restore as load_state
from fabric.ckpt_server.wire.channel_protocol import DurableJob
from fabric.errors import FabricError, IntegrityError, StateError
from fabric.model import SnapshotRef
from fabric.protocol.messages.rank_messages import replica_digest
from fabric.runtime.failpoints import Failpoints

NO_POINTS = Failpoints("")


def objects(seed: int = 0, width: int = 40) -> dict:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(width, 30), torch.nn.BatchNorm1d(30), torch.nn.Linear(30, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
    }


def train(found: dict, steps: int = 3, width: int = 40) -> None:
    for step in range(steps):
        found["model"](torch.full((4, width), float(step)) + torch.randn(4, width)).sum().backward()
        for name in ("optimizer", "scheduler"):
            found[name].step()
        found["optimizer"].zero_grad()


def manifest_for(file: bytes, step: int, generation: int = 1) -> dict:
    view = memoryview(file)
    blocks = [block_digest(view[i : i + BLOCK_BYTES]) for i in range(0, len(file), BLOCK_BYTES)]
    state = SnapshotRef(generation, step, file_digest(view))
    return make_manifest(state, len(file), blocks, job="job", replica="r0", created=1.5e9)


def write_one(url: str, found: dict, step: int = 3, generation: int = 1, **more) -> tuple[bytes, SnapshotRef]:
    """Write the state of ``found`` as the writer does; return the snapshot's bytes and its name."""
    file = bytes(to_bytes(capture(found, step)))
    manifest = manifest_for(file, step, generation)
    order = DurableJob(url, "job", more.pop("replica", "r0"), 7, **more)
    assert write(order, manifest, memoryview(bytearray(file)), NO_POINTS).complete
    return file, SnapshotRef(generation, step, manifest["digest"])


def write_again(url: str, found: dict, step: int, keep: int) -> str:
    """Write the state of ``found`` in generation 2; return why a restart would not begin from it."""
    file = bytes(to_bytes(capture(found, step)))
    order = DurableJob(url, "job", "r0", 7, keep=keep)
    return write(order, manifest_for(file, step, 2), memoryview(bytearray(file)), NO_POINTS).conflict


def bring_back(url: str, state: SnapshotRef, rank: int = 0) -> bytes:
    """Read one rank's part block by block, and verify each block."""
    with ExitStack() as stack:
        part = StoredRankFile(rank, find_checkpoint(Storage(url).at("job"), "job", state), stack)
        return bytes(part.complete(lambda nbytes: memoryview(bytearray(nbytes))))


@pytest.fixture(params=["folder", "file", "memory"])
def url(request, tmp_path):
    if request.param == "memory":
        yield "memory://durable-test"
        fsspec.filesystem("memory").rm("/durable-test", recursive=True)
    else:
        yield f"{'file://' if request.param == 'file' else ''}{tmp_path}/durable"


class TestRoundTrip:
    def test_torch_and_fabric_both_bring_the_state_back_bit_for_bit(self, url):
        one, other = objects(1), objects(2)
        train(one)
        train(other, steps=1)  # one step gives the optimizer state to load into
        file, state = write_one(url, one)
        assert bring_back(url, state) == file
        folder = open_checkpoint(Storage(url).at("job").at(Attempt(1, 3, "r0", 7).folder)).storage.url
        wanted = {name: x.state_dict() for name, x in other.items()}
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
        for name, x in other.items():
            x.load_state_dict(wanted[name])
        assert capture(other, 3).digest() == state.digest

    def test_a_rank_shard_is_a_safetensors_file(self, url):
        one = objects(1)
        train(one)
        file, _ = write_one(url, one)
        found = list_checkpoints(Storage(url).at("job"), "job").complete[-1]
        with closing(DurableState("durable", found, 0)) as state:
            read = bytes(state.read(0, state.nbytes))
            assert bytes(state.read(100, 333)) == file[100:333]
        assert torch.equal(load(read)["model/0.weight"], one["model"][0].weight)

    def test_odd_state_comes_back(self, url):
        """Numpy arrays, dtypes without a name in the file format, empty tensors and tied tensors come back
        equal.
        """

        class Odd:
            def __init__(self) -> None:
                tied = torch.arange(5.0)
                self.state = {
                    "array": torch.arange(6).numpy().reshape(2, 3),
                    "complex": torch.complex(torch.ones(3), torch.zeros(3)),
                    "empty": torch.empty(0, 4),
                    "one": tied,
                    "same": tied,
                    "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
                    "words": ["a", (1, 2)],
                }

            def state_dict(self) -> dict:
                return self.state

            def load_state_dict(self, state: dict) -> None:
                self.state = state

        file, state = write_one(url, {"odd": Odd()})
        assert bring_back(url, state) == file
        folder = list_checkpoints(Storage(url).at("job"), "job").complete[-1].storage.url
        wanted = {
            "odd": {"complex": torch.zeros(3, dtype=torch.complex64), "words": None, "same": torch.zeros(5)}
        }
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
        assert wanted["odd"]["words"] == ["a", (1, 2)]
        assert wanted["odd"]["complex"].real.sum() == 3 and wanted["odd"]["same"].sum() == 10

    def test_a_state_of_another_shape_is_refused_and_changes_nothing(self, url):
        file, _ = write_one(url, objects(1))
        other = objects(2, width=41)
        before = capture(other, 0).digest()
        with pytest.raises(StateError, match=r"model.*0\.weight"):
            load_state(memoryview(bytearray(file)), other)
        assert capture(other, 0).digest() == before


# --- several ranks ------------------------------------------------------------------------------------


def two_ranks(url: str, files: list[bytes], order: tuple[int, ...] = (1, 0)) -> SnapshotRef:
    manifests = [manifest_for(file, 3) for file in files]
    digests = [m["digest"] for m in manifests]
    for rank in order:
        manifest = of_rank(manifests[rank], rank, digests)
        done = write(
            DurableJob(url, "job", "r0", 7, patience_s=0.0),
            manifest,
            memoryview(bytearray(files[rank])),
            NO_POINTS,
        )
        assert done.complete == (rank == 0)
    return SnapshotRef(1, 3, replica_digest(digests))


class Part:
    """Shared state whose content a test writes by hand."""

    def __init__(self, **state) -> None:
        self.state = state

    def state_dict(self) -> dict:
        return self.state

    def load_state_dict(self, state: dict) -> None:
        self.state = state


def as_shards(file: bytes, name: str, shape: list[int], offset: list[int]) -> bytes:
    """``file`` with its tensor ``name`` described as a shard: what a rank of a mesh of two would capture."""
    from fabric.ckpt_server.format.safetensors_file import (
        build_preamble,
        canonical_json,
        parse_json,
        read_preamble,
    )

    header = read_preamble(memoryview(file))
    tree = parse_json(header.metadata)
    placed = {"shape": shape, "offset": offset, "mesh": [["dp"], [2]], "placements": ["S(0)"]}
    tree["state"]["part"][name] = {"$shard": [tree["state"]["part"][name], placed]}
    entries = [(s.name, s.dtype, s.shape, s.end - s.begin) for s in header.tensors]
    return build_preamble(entries, canonical_json(tree)) + file[header.nbytes :]


class TestRanks:
    def test_shards_of_two_ranks_are_one_tensor_for_torch(self, url):
        whole = torch.arange(20.0).reshape(5, 4)
        files = []
        for rows, offset in ((whole[:3], 0), (whole[3:], 3)):
            part = Part(sharded=rows.clone(), count=torch.tensor(7), step=3)
            files.append(
                as_shards(bytes(to_bytes(capture({"part": part}, 3))), "sharded", [5, 4], [offset, 0])
            )
        state = two_ranks(url, files)
        assert [bring_back(url, state, rank) for rank in (0, 1)] == files
        folder = list_checkpoints(Storage(url).at("job"), "job").complete[-1].storage.url
        wanted = {"part": {"sharded": torch.zeros(5, 4), "count": torch.tensor(0), "step": 0}}
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
        assert torch.equal(wanted["part"]["sharded"], whole)
        assert wanted["part"]["count"] == 7 and wanted["part"]["step"] == 3

    def test_different_values_under_one_name_on_two_ranks_are_kept_apart(self, url):
        """Two stages of a pipeline may give two parameters the same name."""
        parts = [Part(average=torch.full((n,), float(n)), name=f"stage {n}") for n in (2, 3)]
        two_ranks(url, [bytes(to_bytes(capture({"part": p}, 3))) for p in parts])
        folder = list_checkpoints(Storage(url).at("job"), "job").complete[-1].storage.url
        wanted = {f"rank{i}": {"part": {"average": torch.zeros(2 + i), "name": ""}} for i in (0, 1)}
        dcp.load(wanted, checkpoint_id=folder, no_dist=True)
        assert [wanted[f"rank{i}"]["part"]["average"].sum() for i in (0, 1)] == [4, 9]
        assert wanted["rank1"]["part"]["name"] == "stage 3"

    def test_a_checkpoint_is_complete_only_when_every_rank_has_written(self, url):
        files = [bytes(to_bytes(capture({"part": Part(x=torch.full((3,), float(n)))}, 3))) for n in (0, 1)]
        with pytest.raises(StateError, match="rank 1 has not written its part"):
            two_ranks(url, files, order=(0,))
        listing = list_checkpoints(Storage(url).at("job"), "job")
        assert (listing.complete, listing.unfinished) == ((), ())
        two_ranks(url, files)
        assert len(list_checkpoints(Storage(url).at("job"), "job").complete) == 1

    def test_a_real_sharded_model(self, tmp_path):
        dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
        try:
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
            models = [torch.nn.Linear(5, 7), torch.nn.Linear(5, 7)]
            for model in models:
                fully_shard(model, mesh=mesh)
            file, state = write_one(f"{tmp_path}/durable", {"model": models[0]})
            assert bring_back(f"{tmp_path}/durable", state) == file
            wanted = {"model": models[1].state_dict()}
            folder = list_checkpoints(Storage(f"{tmp_path}/durable/job"), "job").complete[-1].storage.url
            dcp.load(wanted, checkpoint_id=folder)
            assert torch.equal(models[1].weight.to_local(), models[0].weight.to_local())
        finally:
            dist.destroy_process_group()


# --- damage -------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path):
    """Write a checkpoint to a local folder; return the storage URL, the checkpoint's folder and its state."""
    one = objects(1)
    train(one)
    _, state = write_one(str(tmp_path / "durable"), one)
    return str(tmp_path / "durable"), tmp_path / "durable" / "job" / Attempt(1, 3, "r0", 7).folder, state


def flip(path: Path, at: int = -20) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


class TestDamage:
    @pytest.mark.parametrize("name", ["fabric-0.json", "fabric-0.bin", MANIFEST, MARKER])
    def test_a_flipped_bit_is_found_and_its_file_named(self, written, name):
        url, folder, state = written
        flip(folder / name, 5)
        with pytest.raises(StateError, match=MANIFEST if name == MARKER else name):
            bring_back(url, state)

    def test_a_flipped_bit_in_any_tensor_is_found(self, written):
        url, folder, state = written
        rank_shard = json.loads((folder / "fabric-0.json").read_text())
        for file, begin, nbytes in rank_shard["segments"]:
            if file.endswith(".distcp"):
                flip(folder / file, begin + nbytes - 1)
                with pytest.raises(IntegrityError, match=r"__0_0\.distcp is damaged: block 0"):
                    bring_back(url, state)
                flip(folder / file, begin + nbytes - 1)
        bring_back(url, state)

    @pytest.mark.parametrize("name", ["__0_0.distcp", "fabric-0.bin", "fabric-0.json", MANIFEST])
    def test_a_truncated_or_missing_file_is_named(self, written, name):
        url, folder, state = written
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1])
        with pytest.raises(StateError, match=name):
            bring_back(url, state)
        (folder / name).unlink()
        with pytest.raises(StateError, match=name):
            bring_back(url, state)

    @pytest.mark.parametrize("name", [MARKER, MANIFEST, "fabric-0.json"])
    def test_a_pipe_in_a_files_place_is_refused_and_not_waited_upon(self, written, name):
        url, folder, state = written
        (folder / name).unlink()
        os.mkfifo(folder / name)
        with pytest.raises(StateError, match=f"{name} is no plain file"):
            bring_back(url, state)

    def test_a_checkpoint_without_its_marker_is_unfinished(self, written):
        url, folder, state = written
        (folder / MARKER).unlink()
        with pytest.raises(StateError, match="no complete checkpoint of step 3"):
            bring_back(url, state)
        assert list_checkpoints(Storage(url).at("job"), "job").unfinished == (Attempt(1, 3, "r0", 7),)

    def test_the_pickle_is_never_read(self, written):
        url, folder, state = written
        (folder / ".metadata").write_bytes(b"cos\nsystem\n(S'false'\ntR.")
        assert bring_back(url, state)

    @pytest.mark.parametrize(
        ("change", "sentence"),
        [
            ({"files": {"../x": {"nbytes": 1, "digest": "0" * 32}}}, "impossible names or sizes"),
            ({"files": {"/etc/passwd": {"nbytes": 1, "digest": "0" * 32}}}, "impossible names or sizes"),
            ({"files": {}}, "does not list fabric-0.json"),
            ({"ranks": 0}, "number of ranks"),
            ({"ranks": 10**9}, "number of ranks"),
            ({"step": -1}, "no usable step"),
            ({"digest": "x"}, "names no job or no state"),
            ({"format": 2}, "not the manifest"),
        ],
    )
    def test_an_impossible_manifest_is_refused(self, written, change, sentence):
        body = json.loads((written[1] / MANIFEST).read_text())
        with pytest.raises(StateError, match=sentence):
            parse_manifest(json.dumps({**body, **change}).encode(), "it")

    @pytest.mark.parametrize(
        ("segments", "sentence"),
        [
            ([["__0_0.distcp", 0, 1 << 40]], "refers to byte"),
            ([[["__0_0.distcp"], 0, 1]], "refers to a file that its manifest does not list"),
            ([[{}, 0, 1]], "refers to a file that its manifest does not list"),
            ([["other", 0, 5]], "does not list"),
            ([["__0_0.distcp", -1, 5]], "impossible bytes"),
            ([["__0_0.distcp", 0, 5]], "each of its"),
            (7, "where its bytes are"),
        ],
    )
    def test_a_rank_shard_that_promises_missing_bytes_is_refused(self, written, segments, sentence):
        url, folder, state = written
        rank_shard = json.loads((folder / "fabric-0.json").read_text())
        rank_shard["segments"] = segments
        data = json.dumps(rank_shard).encode()
        (folder / "fabric-0.json").write_bytes(data)
        manifest = json.loads((folder / MANIFEST).read_text())
        manifest["files"]["fabric-0.json"] = {"nbytes": len(data), "digest": bytes_digest(memoryview(data))}
        text = json.dumps(manifest).encode()
        (folder / MANIFEST).write_bytes(text)
        (folder / MARKER).write_text(bytes_digest(memoryview(text)))
        with pytest.raises(StateError, match=sentence):
            bring_back(url, state)

    def test_a_snapshot_that_memory_has_damaged_is_not_written(self, tmp_path):
        file = bytearray(to_bytes(capture(objects(1), 3)))
        manifest = manifest_for(bytes(file), 3)
        file[-1] ^= 1
        with pytest.raises(IntegrityError, match="in memory does not match"):
            write(DurableJob(str(tmp_path), "job", "r0", 7), manifest, memoryview(file), NO_POINTS)
        assert not (tmp_path / "job").exists()

    def test_storage_that_cannot_be_used_is_named(self, tmp_path):
        (tmp_path / "file").write_text("")
        with pytest.raises(
            FabricError, match=f"{tmp_path}/file/durable.* could not be written: Not a directory"
        ):
            write_one(f"{tmp_path}/file/durable", objects(1))
        with pytest.raises(FabricError, match="nosuchprotocol://x could not be opened"):
            Storage("nosuchprotocol://x")


# --- retention ----------------------------------------------------------------------------------------


class TestRetention:
    def test_the_newest_checkpoints_are_kept(self, url):
        one = objects(1)
        for step in (1, 2, 3, 4):
            write_one(url, one, step, keep=2)
        listing = list_checkpoints(Storage(url).at("job"), "job")
        assert [c.state.step for c in listing.complete] == [3, 4]

    def test_a_later_generation_is_newer_whatever_its_step(self):
        old, new = Attempt(1, 90, "r0", 1), Attempt(2, 10, "r1", 1)
        assert attempts_to_delete([old], [], new, keep=1) == [old]
        assert attempts_to_delete([new], [], old, keep=1) == [], "the newer one is another job's"

    def test_the_own_checkpoint_stays_where_another_job_has_newer_ones(self, url):
        one = objects(1)
        write_one(url, one, 9, keep=1, generation=7)
        outcomes = [write_again(url, one, step, keep=1) for step in (10, 20)]
        listing = list_checkpoints(Storage(url).at("job"), "job")
        assert [(c.state.generation, c.state.step) for c in listing.complete] == [(2, 20), (7, 9)]
        assert all("checkpoints of generation 7, and this job is in generation 2" in x for x in outcomes)

    def test_unfinished_attempts_are_deleted_except_those_that_another_replica_is_writing(self):
        mine = Attempt(2, 10, "r0", 5)
        own = Attempt(2, 12, "r0", 4)
        older, same, later = (Attempt(2, step, "r1", 1) for step in (9, 10, 11))
        assert attempts_to_delete([], [own, older, same, later], mine, keep=3) == [own, older]

    def test_a_half_written_folder_is_deleted_by_the_next_checkpoint(self, tmp_path):
        url = str(tmp_path)
        write_one(url, objects(1), 3)
        folder = tmp_path / "job" / Attempt(1, 3, "r0", 7).folder
        half = tmp_path / "job" / Attempt(1, 2, "r1", 4).folder
        shutil.copytree(folder, half)
        (half / MARKER).unlink()
        write_one(url, objects(1), 4)
        assert not half.exists() and folder.exists()
