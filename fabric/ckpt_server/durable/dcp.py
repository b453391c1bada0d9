"""A snapshot's bytes in the layout of ``torch.distributed.checkpoint``, so that its ``load`` reads them.

``__RANK_0.distcp`` holds the output of ``torch.save`` for one tensor after the other. Each has the dotted
name that the library would give it (``model.0.weight``, ``optimizer.state.0.exp_avg``). The output contains a
tensor's raw bytes. fabric notes where these begin, and reads only these.

Every rank writes its shard of a sharded tensor; ``write_metadata`` puts the shards together. Ranks may use
one name for different tensors: every stage of a pipeline numbers its optimizer's parameters from 0. Then each
tensor is stored as ``rankN.NAME``."""

import io
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

try:
    from torch.distributed.checkpoint import FsspecWriter  # type: ignore[attr-defined, unused-ignore]
except ImportError:  # before torch 2.15 the class has a private home only
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

from fabric.ckpt_server.durable.reader import MAX_JSON_BYTES, METADATA
from fabric.ckpt_server.durable.storage import Storage, storage_errors
from fabric.ckpt_server.format.manifest import bytes_digest
from fabric.ckpt_server.format.safetensors_file import read_preamble
from fabric.ckpt_server.state.dtensor import LocalParts
from fabric.ckpt_server.state.encoding import DTYPE_BY_NAME, StateDecoder
from fabric.ckpt_server.state.training_state import host_bytes, parse_description, tensor_at
from fabric.errors import StateError


class DigestingFile:
    """A file that is being written; ``nbytes`` and ``digest`` are of all bytes written so far."""

    def __init__(self, file: Any) -> None:
        self._file = file
        self._hasher = xxhash.xxh3_128()
        self.nbytes = 0
        self.written: dict[tuple[int, int], int] = {}  # address and size of each written memory -> its place

    @property
    def digest(self) -> str:
        return self._hasher.hexdigest()

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self._file.write(view)
        self._hasher.update(view)
        if len(view):
            self.written[np.frombuffer(view, np.uint8).ctypes.data, len(view)] = self.nbytes
        self.nbytes += len(view)
        return len(view)

    def flush(self) -> None:
        """As a file does."""

    def save(self, tensor: torch.Tensor) -> int:
        """Write a tensor as ``torch.save`` does. Return where the bytes of the tensor begin, if it has any.

        torch hands over the tensor's own memory in one piece. Raises StateError where it does not.
        """
        self.written.clear()
        torch.save(tensor, self)  # type: ignore[arg-type]  # it needs write and flush
        place = self.written.get((tensor.data_ptr(), tensor.nbytes), -1)
        if place < 0 < tensor.nbytes:
            raise StateError(
                "this torch stores tensors in an unknown way: fabric cannot write durable checkpoints with it"
            )
        return place


def write_rank_shard(
    storage: Storage, file: memoryview, snapshot: Mapping[str, Any], rank: int, begun: Callable[[], None]
) -> dict[str, Any]:
    """Write ``rank``'s part, the snapshot in ``file`` with its manifest; returns the lane's description
    (JSON).

    Calls ``begun`` when a part of the data is written. Raises StateError; then ``storage`` holds half-written
    files.
    """
    header, local = read_preamble(file), LocalParts()
    spans = {span.name: span for span in header.tensors}
    decoder = StateDecoder(lambda name: tensor_at(file, spans[name]), set(spans), shardings=local)
    _, tree = parse_description(header.metadata)
    values, paths = flatten_state_dict({name: decoder.decode(node) for name, node in tree.items()})
    blobs = {id(tensor): name for name, tensor in decoder.seen.items()}  # those whose bytes lie in the file
    data, rest = f"__{rank}_0.distcp", f"fabric-{rank}.bin"
    tensors: dict[str, Any] = {}
    objects: dict[str, Any] = {}
    raw: dict[str, tuple[str, int]] = {}
    with storage.create(data) as opened:
        out = DigestingFile(opened)
        for name, value in values.items():
            begin = out.nbytes
            if isinstance(value, torch.Tensor):
                place, blob = out.save(value), blobs.get(id(value))
                if blob is not None and value.numel():
                    raw.setdefault(blob, (data, place))
                described, entries = _describe(value, local), tensors
            else:
                torch.save(value, pickled := io.BytesIO())
                out.write(pickled.getbuffer())
                # To compare the objects of several ranks.
                described, entries = {"digest": bytes_digest(pickled.getbuffer())}, objects
            entries[name] = {
                "begin": begin,
                "nbytes": out.nbytes - begin,
                "path": list(paths[name]),
            } | described
            if not begin:
                begun()
        files = {data: {"nbytes": out.nbytes, "digest": out.digest}}
    with storage.create(rest) as opened:
        out = DigestingFile(opened)
        out.write(file[: header.nbytes])
        for span in header.tensors:
            if span.name not in raw and span.begin < span.end:
                raw[span.name] = (rest, out.nbytes)
                out.write(file[span.begin : span.end])
        files[rest] = {"nbytes": out.nbytes, "digest": out.digest}
    segments = [[*raw[s.name], s.end - s.begin] for s in header.tensors if s.begin < s.end]
    return {
        "format": 1,
        "rank": rank,
        "snapshot": dict(snapshot),
        "segments": [[rest, 0, header.nbytes], *segments],
        "tensors": tensors,
        "objects": objects,
        "files": files,
    }


def _describe(tensor: torch.Tensor, local: LocalParts) -> dict[str, Any]:
    shard = local.parts.get(id(tensor))
    chunk = list(tensor.shape)
    shape, offset = (chunk, [0] * len(chunk)) if shard is None else (shard[1]["shape"], shard[1]["offset"])
    return {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(shape),
        "offset": list(offset),
        "chunk": chunk,
        "digest": xxhash.xxh3_64_hexdigest(host_bytes(tensor)),
    }


def write_metadata(storage: Storage, rank_shards: list[dict[str, Any]]) -> None:
    """Write ``.metadata``, the library's own index of everything that the lanes (in rank order) have
    written. Raises StorageError."""
    described: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    written: dict[MetadataIndex, WriteResult] = {}
    for kind in ("tensors", "objects"):
        for name in dict.fromkeys(n for rank_shard in rank_shards for n in rank_shard[kind]):
            parts = [
                (rank_shard["rank"], rank_shard[kind][name])
                for rank_shard in rank_shards
                if name in rank_shard[kind]
            ]
            alike = _fit_together([entry for _, entry in parts])
            for rank, entry in parts:
                key = name if alike else f"rank{rank}.{name}"
                path = tuple(entry["path"]) if alike else (f"rank{rank}", *entry["path"])
                paths[key] = path
                if kind == "tensors":
                    index = _add_tensor(described, key, entry, alike)
                else:
                    index, described[key] = MetadataIndex(key), BytesStorageMetadata()
                where = _StorageInfo(f"__{rank}_0.distcp", entry["begin"], entry["nbytes"])
                written.setdefault(index, WriteResult(index, entry["nbytes"], where))
    metadata = Metadata(state_dict_metadata=described, planner_data=paths)
    # The library renames the file, which deletes one in an object store.
    scratch = Storage(f"memory://fabric-{uuid.uuid4().hex}")
    scratch.make()
    with storage_errors("made", METADATA):
        FsspecWriter(scratch.url).finish(metadata, [list(written.values())])
    storage.put(METADATA, scratch.get(METADATA, MAX_JSON_BYTES))
    scratch.remove_folder()


def _fit_together(entries: list[dict[str, Any]]) -> bool:
    """Whether the ranks' entries of one name are parts of one value: equal bytes in equal places."""
    seen: dict[Any, Any] = {}
    for entry in entries:
        what = [entry.get(key) for key in ("dtype", "shape")]
        if seen.setdefault("what", what) != what:
            return False
        part = [entry.get("chunk"), entry["digest"]]
        if seen.setdefault(tuple(entry.get("offset", ())), part) != part:
            return False
    return True


def _add_tensor(described: dict[str, Any], key: str, entry: dict[str, Any], alike: bool) -> MetadataIndex:
    chunk, offset = torch.Size(entry["chunk"]), torch.Size(entry["offset"])
    shape = torch.Size(entry["shape"])
    if not alike:  # the parts do not make one tensor: store each part as a tensor of its own
        offset, shape = torch.Size([0] * len(chunk)), chunk
    properties = TensorProperties(dtype=DTYPE_BY_NAME[entry["dtype"]])
    metadata = described.setdefault(key, TensorStorageMetadata(properties, shape, []))
    part = ChunkStorageMetadata(offset, chunk)
    if part not in metadata.chunks:
        metadata.chunks.append(part)
    return MetadataIndex(key, offset)
