"""Training state: a consistent view of live objects, and its way back from a file into live objects.

The shared state of a job is a few named objects with ``state_dict`` and ``load_state_dict``: model,
optimizer, scheduler, scaler, moving averages. ``capture`` describes them as one safetensors file without
copying a tensor. The view is valid until something changes the state, so take it and use it between two
optimizer steps. ``restore`` reads such a file back. It checks the whole file against the live objects before
it changes one of them, and undoes all changes when an object refuses its state.

The file holds only values that decide training: no devices, no addresses, no names of types. So the digest is
equal on all replicas in the same state, on any hardware.

``restore`` differs from ``load_state_dict`` in two ways. Optimizer state keeps its own dtype (torch casts it
to the parameter's, which loses bits of a float32 average of a bfloat16 parameter). No live tensor uses the
file's memory.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from fabric.ckpt_server.format.manifest import BlockDigests, digest_of_blocks
from fabric.ckpt_server.format.safetensors_file import (
    ELEMENT_BYTES,
    Preamble,
    TensorEntry,
    TensorSpan,
    canonical_json,
    file_order,
    is_count,
    parse_json,
    read_preamble,
)
from fabric.ckpt_server.state.dtensor import LocalParts, Shardings, is_sharded, local_part
from fabric.ckpt_server.state.encoding import (
    FILE_DTYPE,
    PLAIN_TENSORS,
    TORCH_DTYPE,
    Blobs,
    StateDecoder,
    StatePath,
    bytes_of,
    encode,
    memory_key,
)
from fabric.ckpt_server.state.loading import WorkRunner, at_once, check_fit, load_all
from fabric.ckpt_server.state.optimizer_extras import optimizer_state
from fabric.errors import IntegrityError, StateError
from fabric.model import Value

# The state of an optimizer by the names of its parameters.
#
# torch numbers the parameters of an optimizer, and the numbers depend on the layout: each pipeline stage
# counts from 0. With unequal replicas a state is described by the parameters' names, as in
# ``torch.distributed.checkpoint.state_dict``. torch loads such a state by the order of the parameters.


def parameter_names(objects: Mapping[str, object]) -> dict[int, str]:
    """Return the name in the model of each parameter, by its ``id``."""
    named = getattr(objects.get("model"), "named_parameters", None)
    return {id(parameter): name for name, parameter in named()} if callable(named) else {}


def names_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[list[str]]:
    """Return the names of the optimizer's parameters by group; a parameter outside the model has a number."""
    by_group: list[list[str]] = []
    for group in optimizer.param_groups:
        first = sum(map(len, by_group))
        by_group.append([names.get(id(p), f"#{n}") for n, p in enumerate(group["params"], first)])
    return by_group


# Tells whether a value's encoding has changed since the last time, without encoding the value.
#
# The structure of a value is a flat list of everything its encoding depends on, except the elements of
# tensors: types, keys, lengths, numbers, strings, and each tensor's memory and type. Making and comparing a
# structure costs a fraction of an encoding. Values of unknown types have no structure and are encoded every
# time.


_EXACT = frozenset((int, str, bool, type(None)))
_MAX_DEPTH = 20


def record_structure(value: object, words: list[object], tensors: list[torch.Tensor], depth: int = 0) -> bool:
    """Add the structure of ``value`` to ``words`` and its tensors (their local parts) to ``tensors``, in
    order.

    Returns False where the value has no structure. All recorded tensors are contiguous, so that each is
    stored as its memory.
    """
    kind = type(value)
    if kind in PLAIN_TENSORS:
        assert isinstance(value, torch.Tensor)
        return _record_tensor(value, words, tensors)
    words.append(kind)
    if kind in _EXACT:
        words.append(value)
        return True
    if kind is float:
        assert isinstance(value, float)
        words.append(value or value.hex())  # the hexadecimal form distinguishes 0.0 from -0.0
        return math.isfinite(value)
    if depth >= _MAX_DEPTH:
        return False
    if kind is dict or kind is OrderedDict:
        assert isinstance(value, dict)
        words.append(len(value))
        metadata = getattr(value, "_metadata", None)  # a module's state has its versions in this attribute
        if metadata is not None and not record_structure(dict(metadata), words, tensors, depth + 1):
            return False
        for key, item in value.items():
            if type(key) is not str and type(key) is not int:
                return False
            words.append(key)
            if not record_structure(item, words, tensors, depth + 1):
                return False
        return True
    if kind is list or kind is tuple:
        assert isinstance(value, list | tuple)
        words.append(len(value))
        return all(record_structure(item, words, tensors, depth + 1) for item in value)
    if isinstance(value, torch.Tensor) and is_sharded(value):
        words.append((value.shape, value.device_mesh, value.placements))  # type: ignore[attr-defined]
        return _record_tensor(local_part(value), words, tensors)
    return False


def _record_tensor(tensor: torch.Tensor, words: list[object], tensors: list[torch.Tensor]) -> bool:
    if tensor.layout != torch.strided or not tensor.is_contiguous() or tensor.is_neg() or tensor.is_conj():
        return False
    words.append(memory_key(tensor))
    tensors.append(tensor)
    return True


FORMAT = 1
_MAX_STEP = 1 << 62
_PIECE_BYTES = 16 << 20  # the part of a device tensor that is on the host at a time during a digest


class StateView(Value):
    """A consistent view of live state at ``step``; the tensors are references, not copies.

    ``header`` is the file's preamble, ``tensors`` its data in file order (contiguous), ``nbytes``
    the size of the whole file. Valid until the state is changed.
    """

    header: bytes
    tensors: tuple[tuple[str, torch.Tensor], ...]
    nbytes: int
    step: int

    def digest(self) -> str:
        """Return the state's digest, 32 hex digits, without a copy of the state.

        A device tensor is copied to the host piece by piece, so memory on the host stays bounded.
        """
        digests = BlockDigests()
        digests.update(self.header)
        for _, tensor in self.tensors:
            if tensor.device.type == "cpu":
                digests.update(host_bytes(tensor))
                continue
            flat = bytes_of(tensor)
            for begin in range(0, flat.numel(), _PIECE_BYTES):
                digests.update(host_bytes(flat[begin : begin + _PIECE_BYTES].cpu()))
        return digest_of_blocks(self.nbytes, digests.blocks())


def capture(objects: Mapping[str, object], step: int) -> StateView:
    """Return a view of the state of ``objects`` after ``step`` committed steps, as a file to be written.

    Raises StateError with the path of whatever cannot be serialised.
    """
    return StateDescriber(objects).capture(step)


class _DescribedItem(Value):
    """The description of an object, or of one item of its state, with its structure at that time.

    ``entries``: the part's entries in the file's header, each with the number of its tensor among the
    ``count`` tensors of the part. It refers to no tensor, so it keeps no tensor alive.
    """

    structure: list[object] | None
    json: str
    entries: tuple[TensorEntry, ...]
    places: tuple[int, ...]
    count: int


class StateDescriber:
    """Captures the same objects again and again, and describes again only the parts that changed.

    A tensor is unchanged while it has the same elements of the same memory, whatever their values.
    ``standing`` returns, for a tensor that changes within a step, its value when the step began. With
    ``by_name`` an optimizer's state has the names of its parameters, not numbers. One thread at a time.
    """

    def __init__(
        self,
        objects: Mapping[str, object],
        standing: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor,
        by_name: bool = False,
    ) -> None:
        self.objects = objects
        self.by_name = by_name
        self._standing = standing
        self._parts: dict[tuple[str, str | None], _DescribedItem] = {}
        self._preamble = Preamble(())
        self._nbytes = 0  # bytes of all tensors together
        self._order: list[tuple[str, int]] = []  # the file's tensors, each with its place in the walk

    def capture(self, step: int) -> StateView:
        """Do the same as the function ``capture`` with these objects."""
        if not is_count(step, _MAX_STEP):
            raise StateError(f"A step must be a whole number from 0, not {step!r}.")
        before, parts = self._parts, {}
        met: list[torch.Tensor] = []
        descriptions = []
        for name, value, state in _states(self.objects, self.by_name):
            texts = []
            for key, item in _items(value, state):
                ties: dict[object, str] | None = {} if isinstance(value, torch.nn.Module) else None
                path = StatePath.root(name) if key is None else StatePath.root(name).key(key)
                part, tensors_met = _describe(item, path, ties, before.get((name, key)))
                parts[name, key] = part
                met += tensors_met
                texts.append(part.json if key is None else f"{canonical_json(key)}:{part.json}")
            is_one_part = (name, None) in parts
            descriptions.append(
                f"{canonical_json(name)}:" + (texts[0] if is_one_part else f"{{{','.join(texts)}}}")
            )
        if [_laid(part) for part in parts.values()] != [_laid(part) for part in before.values()]:
            self._arrange(parts.values())
        self._parts = parts
        header = self._preamble.with_metadata(
            f'{{"format":{FORMAT},"state":{{{",".join(descriptions)}}},"step":{step}}}'
        )
        tensors = tuple((name, self._standing(met[place].detach())) for name, place in self._order)
        return StateView(header, tensors, len(header) + self._nbytes, step)

    def _arrange(self, parts: Iterable[_DescribedItem]) -> None:
        """Put the tensors of all parts in the order of the file."""
        placed, first = [], 0
        for part in parts:
            placed += [(entry, first + at) for entry, at in zip(part.entries, part.places, strict=True)]
            first += part.count
        placed.sort(key=lambda pair: file_order(pair[0].name, pair[0].dtype))
        self._preamble = Preamble([entry for entry, _ in placed])
        self._nbytes = sum(entry.nbytes for entry, _ in placed)
        self._order = [(entry.name, place) for entry, place in placed]


def _laid(part: _DescribedItem) -> tuple[object, ...]:
    return part.entries, part.places, part.count


def _items(value: object, state: Any) -> list[tuple[str | None, object]]:
    """Return the parts of an object's state, to describe settings, which change often, apart from tensors."""
    in_parts = type(state) is dict and bool(state) and not isinstance(value, torch.nn.Module)
    if in_parts and all(type(key) is str and not key.startswith("$") for key in state):
        return [(key, state[key]) for key in sorted(state)]
    return [(None, state)]


def _describe(
    value: object, path: StatePath, ties: dict[object, str] | None, last: _DescribedItem | None
) -> tuple[_DescribedItem, list[torch.Tensor]]:
    """Return the description of ``value`` (``last`` itself where nothing changed), and its tensors."""
    words: list[object] = []
    met: list[torch.Tensor] = []
    has_structure = record_structure(value, words, met)
    if has_structure and last is not None and last.structure == words:
        return last, met
    blobs = Blobs()
    try:
        text = canonical_json(encode(value, path, blobs, ties))
    except ValueError as error:
        raise StateError(f"The training state has a number that cannot be written down: {error}.") from error
    tensors = list(blobs.tensors.values())
    entries = []
    for name, tensor in blobs.tensors.items():
        dtype, shape = FILE_DTYPE.get(tensor.dtype), tuple(tensor.shape)
        if dtype is None:  # not a dtype of the format: store raw bytes, with one dimension more
            dtype, shape = "U8", (*shape, tensor.dtype.itemsize)
        entries.append(TensorEntry(name, dtype, shape, tensor.numel() * tensor.dtype.itemsize))
    if not has_structure:
        return _DescribedItem(None, text, tuple(entries), tuple(range(len(tensors))), len(tensors)), tensors
    # Tensors that share one memory have equal content, so the file stores one of them.
    place = {memory_key(tensor): at for at, tensor in enumerate(met)}
    places = tuple(place[memory_key(tensor)] for tensor in tensors)
    return _DescribedItem(words, text, tuple(entries), places, len(met)), met


def check_serialisable(objects: Mapping[str, object]) -> None:
    """Raise StateError with the path of a value that cannot be captured, e.g. ``scheduler.fn[0]``."""
    capture(objects, 0)


def restore(file: memoryview, objects: Mapping[str, object], run: WorkRunner = at_once) -> int:
    """Load the snapshot in ``file`` (exactly its bytes) into ``objects``; return its step.

    Heavy work that runs none of the objects' code goes through ``run``, which may use another thread.

    Names, shapes, dtypes and structure are checked first. Raises StateError that names the first
    difference, or the object that refused its state; nothing is changed then.
    """
    file = _flat(file)
    header = read_preamble(file)
    step, tree = parse_description(header.metadata)
    if set(tree) != set(objects):
        raise StateError(
            f"The snapshot holds {', '.join(sorted(tree)) or 'nothing'} and here the shared state is"
            f" {', '.join(sorted(objects)) or 'nothing'}; attach the same objects on every replica."
        )
    tensors = tensors_of(file, header.tensors)
    # A module copies its tensors out of the file.
    in_file = {name for name, live in objects.items() if isinstance(live, torch.nn.Module)}
    blobs = Blobs()
    for name, _, state in _states(objects):
        encode(state, StatePath.root(name), blobs)
    decoded = _decode(tree, tensors, blobs.shardings, in_file, run)
    for name, live in objects.items():
        check_fit(name, live, decoded[name])
    load_all(objects, decoded, run)
    return step


def values_of(file: memoryview) -> tuple[int, dict[str, Any]]:
    """Return the step of the snapshot in ``file`` (exactly its bytes), and the values of its objects by name.

    Tensors are on the CPU, and lie in the file's memory where that is writable. A sharded tensor is its local
    part. Raises StateError for a damaged file.
    """
    file = _flat(file)
    header = read_preamble(file)
    step, tree = parse_description(header.metadata)
    return step, _decode(tree, tensors_of(file, header.tensors), LocalParts(), set(tree), at_once)


def _flat(file: memoryview) -> memoryview:
    return file.cast("B") if file.format != "B" or file.ndim != 1 else file


def _decode(
    tree: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    shardings: Shardings,
    in_file: Collection[str],
    run: WorkRunner,
) -> dict[str, Any]:
    """Return the values of all objects; the tensors of the objects ``in_file`` stay in the file's memory.

    Raises StateError unless the tree refers to every tensor.
    """
    unused = set(tensors)

    def view(name: str) -> torch.Tensor:
        tensor = tensors.get(name)
        if tensor is None:
            raise StateError(
                f"The state refers to tensor {name[:200]!r}, which it does not contain; it is damaged."
            )
        return tensor

    def own(name: str) -> torch.Tensor:
        return view(name).clone()

    decoded = {}
    for name, node in tree.items():
        decoder = StateDecoder(view if name in in_file else own, unused, shardings=shardings)
        decoded[name] = run(partial(decoder.decode, node))
    if unused:
        raise StateError(
            f"The state contains tensor {min(unused)[:200]!r}, which belongs to nothing; it is damaged."
        )
    return decoded


def verify(
    objects: Mapping[str, object], step: int, digest: str, run: WorkRunner = at_once, by_name: bool = False
) -> None:
    """Raises IntegrityError unless ``objects`` are in exactly the state that ``digest`` names; see
    ``restore``. ``by_name``: see ``StateDescriber``."""
    live_digest = run(StateDescriber(objects, by_name=by_name).capture(step).digest)
    if live_digest != digest:
        raise IntegrityError(
            f"After loading step {step} the state's digest is {live_digest} and must be {digest}: an object"
            " did not take over all of its state; check that its load_state_dict reverses its state_dict."
        )


def host_bytes(tensor: torch.Tensor) -> memoryview:
    """Return a contiguous host tensor's memory as flat bytes; valid as long as the tensor."""
    return bytes_of(tensor).numpy().data


def _states(objects: Mapping[str, object], by_name: bool = False) -> Iterator[tuple[str, object, object]]:
    """Yield name, object and state, in the order of the file. Raises StateError for an object without
    state."""
    names = parameter_names(objects) if by_name else {}
    for name in sorted(objects):
        if not isinstance(name, str) or not name:
            raise StateError(
                f"The shared state has the name {name!r}; names must be strings that are not empty."
            )
        value = objects[name]
        for method in ("state_dict", "load_state_dict"):
            if not callable(getattr(value, method, None)):
                raise StateError(
                    f"{name} is a {type(value).__qualname__} without {method}(); shared state needs both"
                    " state_dict() and load_state_dict()."
                )
        if isinstance(value, torch.optim.Optimizer):
            state = value.state_dict()
            if by_name:
                by_group, numbered = names_of(value, names), state["param_groups"]
                by_number: dict[Any, str] = {}
                for group, own in zip(numbered, by_group, strict=True):
                    by_number.update(zip(group["params"], own, strict=True))
                groups = [{**group, "params": own} for group, own in zip(numbered, by_group, strict=True)]
                values = {by_number.get(number, number): x for number, x in state["state"].items()}
                state = {**state, "param_groups": groups, "state": values}
            yield name, value, optimizer_state(value, state)
        else:
            yield name, value, value.state_dict()  # type: ignore[attr-defined]


def parse_description(metadata: str) -> tuple[int, dict[str, Any]]:
    """Return the step and the tree of values in a file's metadata. Raises StateError for other metadata."""
    description = parse_json(metadata)
    if not isinstance(description, dict) or description.get("format") != FORMAT:
        raise StateError(
            f"The state is not of format {FORMAT}; run the same version of fabric on every replica."
        )
    step, tree = description.get("step"), description.get("state")
    if not is_count(step, _MAX_STEP) or not isinstance(tree, dict):
        raise StateError("The state names no step or no objects; it is damaged.")
    return step, tree


def tensors_of(file: memoryview, spans: Iterable[TensorSpan]) -> dict[str, torch.Tensor]:
    """Return the tensors at ``spans`` by name, in the file's own memory where that is writable and aligned,
    else as copies."""
    address = np.frombuffer(file, np.uint8).ctypes.data
    tensors = {}
    for name, word, shape, begin, end in spans:
        dtype, width = TORCH_DTYPE[word], ELEMENT_BYTES[word]
        if begin == end:
            tensors[name] = torch.empty(shape, dtype=dtype, device="cpu")
            continue
        if file.readonly or (address + begin) % width:  # torch supports neither
            flat = torch.from_numpy(np.frombuffer(file[begin:end], np.uint8).copy()).view(dtype)
        else:
            flat = torch.frombuffer(file, dtype=dtype, count=(end - begin) // width, offset=begin)
        tensors[name] = flat if len(shape) == 1 else flat.view(shape)
    return tensors


def tensor_at(file: memoryview, span: TensorSpan) -> torch.Tensor:
    return tensors_of(file, [span])[span.name]
