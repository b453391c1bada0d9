"""Finds tensors that user code has written to while the state was being read.

torch counts the writes to a tensor, including those that a device has yet to make. It does not count writes
through ``.data``, numpy or a captured graph, or a parameter that gets other memory (``p.data = backup``). For
these the guard compares addresses, and samples of each tensor on the host, drawn over its whole length.
"""

import ctypes
import logging
import random
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import xxhash
from msgspec.structs import replace

from fabric.ckpt_server.state.training_state import StateDescriber, StateView
from fabric.errors import StateError
from fabric.protocol.rules.divergence import MAX_NUMBERS, MAX_TENSORS, TENSOR_MARK, Entries, bounded

SAMPLE_BYTES = 64  # size of one line of the processor's cache
# The most samples of one tensor, and of all tensors together unless there are more tensors. So a guard
# touches at most 64 KiB, or a line of each tensor.
_MOST_SAMPLES, _ALL_SAMPLES = 16, 1024
MEANWHILE = (
    " while forward and backward ran, but it is part of the shared state, which is equal on all replicas: "
    "change it only where optimizer.step() is, put back what you change for a moment, or leave it out "
    "(a buffer: persistent=False)"
)
# This message is for the case in which only digests differ, so that the guard cannot name a tensor.
UNNAMED = f"a tensor was changed without torch's knowledge{MEANWHILE}"


class MutationGuard:
    """Remembers the tensors of ``view``, and the memory of ``parameters`` by their names in the view."""

    def __init__(self, view: StateView, parameters: Sequence[tuple[str, torch.Tensor]] = ()) -> None:
        self.view = view
        draw = random.Random(view.step)  # noqa: S311 - not a secret, and equal on all members
        count = max(1, min(_MOST_SAMPLES, _ALL_SAMPLES // max(1, len(view.tensors))))
        drawn = [at + draw.random() for at in range(count)]
        self.watched: list[tuple[str, torch.Tensor, int, Sequence[int], bytes]] = []
        for name, tensor in view.tensors:
            places: Sequence[int] = range(0, tensor.nbytes, SAMPLE_BYTES)
            if len(places) > count:  # one sample in each of ``count`` equal parts of the tensor
                part = (tensor.nbytes - SAMPLE_BYTES) / count
                places = [int(at * part) for at in drawn]
            self.watched.append((name, tensor, _version(tensor), places, samples(tensor, places)))
        self._lock = threading.Lock()
        self._final: str | None = None
        self._memory = [(name, parameter, parameter.data_ptr()) for name, parameter in parameters]

    def written(self) -> str:
        """Return the first tensor with a write that torch has counted, or with other memory; from any thread.

        Its values may be the same as before. After ``close`` the result stays as it is.
        """
        with self._lock:
            return self._find_written() if self._final is None else self._final

    def close(self) -> None:
        """Let the trainer change the state: writes from now on do not count."""
        with self._lock:
            self._final = self._find_written()

    def _find_written(self) -> str:
        counted = (name for name, tensor, version, _, _ in self.watched if _version(tensor) != version)
        return next(counted, "") or next(self._moved(), "")

    def changed(self, capture: Callable[[], StateView]) -> str:
        """Return which tensor has other values than before, as far as samples show; else an empty string.

        ``capture`` views the state as it is now.
        """
        moved = set(self._moved())
        now = dict(capture().tensors) if moved else {}
        for name, tensor, version, places, before in self.watched:
            live = now.get(name, tensor) if name in moved else tensor
            if live.nbytes == tensor.nbytes and samples(live, places) == before:
                continue
            is_known = _version(tensor) != version or name in moved
            how = "changed" if is_known else "changed without torch's knowledge"
            return f"{name} {how}{MEANWHILE}"
        return ""

    def _moved(self) -> Iterator[str]:
        return (name for name, parameter, address in self._memory if parameter.data_ptr() != address)


def _version(tensor: torch.Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version  # noqa: SLF001


def samples(tensor: torch.Tensor, places: Sequence[int]) -> bytes:
    """Return a line of the cache at each of these places of a host tensor."""
    if tensor.device.type != "cpu":
        return b""
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    if len(places) * SAMPLE_BYTES >= nbytes:  # the samples are the whole tensor
        return ctypes.string_at(address, nbytes)
    return b"".join([ctypes.string_at(address + at, SAMPLE_BYTES) for at in places])


# Of a copy this many bytes are compared, and of each of the first few copies all bytes.
_COMPARED_BYTES = 16 << 20
_COMPARED_WHOLE = 4
_PIECE_BYTES = 1 << 16
_log = logging.getLogger(__name__)
_memcmp = ctypes.CDLL(None).memcmp
_memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


class WriteWatch:
    """Decides when a state that was read while user code ran is the state of its step.

    Code that moves weights for a moment and puts them back (adversarial training, SAM, an average swapped
    in for an evaluation) trains as without fabric. But a copy or digest that runs meanwhile may read moved
    weights. So a copy is compared with the state once user code has ended. After the first such write this
    process reads its state before user code goes on. ``read`` digests a view at once. For the main thread.
    """

    def __init__(self, replica: str, describer: StateDescriber, read: Callable[[StateView], str]) -> None:
        self.reads_first = False  # whether this process reads its state before user code goes on
        self._replica = replica
        self.describer = describer
        self._read = read
        self._whole = _COMPARED_WHOLE  # readings that are still checked as a whole
        self._parameters: list[tuple[str, torch.Tensor]] | None = None

    def guard(self, view: StateView) -> MutationGuard:
        """Return a guard of ``view``, a view of the state as it is now."""
        if self._parameters is None:
            self._parameters = list(_parameters(self.describer.objects))
        return MutationGuard(view, self._parameters)

    def digest(self, view: StateView) -> str:
        """Return the digest of the tensors as they are now, with the numbers of ``view``.

        A callback may set a number, such as a scheduler's rate at the begin of an epoch, after the boundary
        at which the replicas took theirs.
        """
        now = self.describer.capture(view.step)
        if [(name, t.nbytes) for name, t in now.tensors] == [(name, t.nbytes) for name, t in view.tensors]:
            now = replace(now, header=view.header, nbytes=view.nbytes)
        return self._read(now)

    def check(self, guard: MutationGuard, expected: str = "") -> str:
        """Return a tensor that user code has written to since, if any. Its values are the same as before.

        ``expected``: the digest of the state, if it was read before user code went on. Raises StateError
        where the state has other values than before.
        """
        if reason := guard.changed(lambda: self.describer.capture(guard.view.step)):
            raise StateError(reason)
        name = guard.written()
        if name and expected and self.digest(guard.view) != expected:
            raise StateError(f"{name} changed{MEANWHILE}")
        return name

    def read_again(self, view: StateView, digest: str) -> str:
        """Return the digest of ``view``; of the first few readings all are read a second time."""
        if self._whole <= 0:
            return digest
        self._whole -= 1
        again = self.digest(view)
        if again != digest:
            self.note("a tensor")
        return again

    def note(self, name: str) -> None:
        """Note that user code writes to ``name`` for a moment. From now on the state is read before."""
        if not self.reads_first:
            self.reads_first = True
            _log.warning(
                "fabric: %s: your code changed %s for a moment while forward and backward ran: from now on "
                "this process copies and digests its state before your code goes on",
                self._replica,
                name,
            )

    def torn(self, copy: memoryview, view: StateView, now: StateView) -> str:
        """Return a tensor of which ``copy``, made of ``view``, has other bytes than ``now``; else "".

        After the first four copies equally spaced pieces of 16 MiB in all are compared.
        """
        if [(name, t.nbytes) for name, t in now.tensors] != [(name, t.nbytes) for name, t in view.tensors]:
            return "the tensors of the state"
        stride = 1 if self._whole > 0 else max(1, -(-view.nbytes // _COMPARED_BYTES))
        self._whole -= 1
        address, begin = np.frombuffer(copy, np.uint8).ctypes.data, len(view.header)
        piece = random.Random(view.step).randrange(stride)  # noqa: S311 - not a secret
        for name, tensor in now.tensors:
            pieces = -(-tensor.nbytes // _PIECE_BYTES)
            for at in range(piece * _PIECE_BYTES, tensor.nbytes, stride * _PIECE_BYTES):
                length = min(_PIECE_BYTES, tensor.nbytes - at)
                if _memcmp(address + begin + at, tensor.data_ptr() + at, length):
                    return name
            piece = (piece - pieces) % stride
            begin += tensor.nbytes
        return ""


def _parameters(objects: Mapping[str, object]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of all modules, with their names in the state's file."""
    for name, value in objects.items():
        named = getattr(value, "named_parameters", None)
        for own, parameter in named() if callable(named) else ():
            yield f"{name}/{own}", parameter


# Entries of a shared state, by path: small ones, and samples of tensors. They show where states differ.
_DEPTH = 4
# Of the groups of tensors, as many are of the model.
_MODEL_GROUPS = 48


def small_entries(objects: Mapping[str, object]) -> Entries:
    """Return the numbers, strings and booleans of everything but the model, as (path, value)."""
    entries: list[tuple[str, str]] = []
    for name, value in objects.items():
        if name == "model":
            continue  # a module's state has tensors only
        if isinstance(value, torch.optim.Optimizer):
            groups: Any = {
                "param_groups": [{k: v for k, v in x.items() if k != "params"} for x in value.param_groups]
            }
        else:
            groups = getattr(value, "state_dict", dict)()
        for entry in _walk(name, groups, 0):
            entries.append(entry)
            if len(entries) == MAX_NUMBERS:
                return bounded(tuple(entries))
    return bounded(tuple(entries))


def _walk(path: str, value: object, depth: int) -> Iterator[tuple[str, str]]:
    if isinstance(value, bool | int | float | str):
        yield path, repr(value)
    elif isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        yield path, repr(value.item())
    elif isinstance(value, Mapping) and depth < _DEPTH:
        for name, part in value.items():
            yield from _walk(f"{path}/{name}", part, depth + 1)
    elif isinstance(value, list | tuple) and depth < _DEPTH:
        for number, part in enumerate(value[:MAX_NUMBERS]):
            yield from _walk(f"{path}/{number}", part, depth + 1)


def tensor_entries(objects: Mapping[str, object], guard: MutationGuard) -> Entries:
    """Return a hash of the guard's samples of each tensor; of a large state for each few neighbours.

    There are none for a state on a device, of which the guard takes no samples.
    """
    if any(tensor.device.type != "cpu" for _, tensor, _, _, _ in guard.watched):
        return ()
    parameters = {name for name, _ in _parameters(objects)}
    of_model: list[tuple[str, str, bytes]] = []
    others: list[tuple[str, str, bytes]] = []
    for name, _, _, _, sampled in sorted(guard.watched, key=lambda x: x[0]):
        root = name.partition("/")[0]
        if root == "model":
            of_model.append(("parameter" if name in parameters else "buffer", name, sampled))
        else:
            others.append(("optimizer" if root.startswith("optimizer") else "object", name, sampled))
    return (*_grouped(of_model, _MODEL_GROUPS), *_grouped(others, MAX_TENSORS - _MODEL_GROUPS))


def _grouped(tensors: list[tuple[str, str, bytes]], most: int) -> Iterator[tuple[str, str]]:
    length = -(-len(tensors) // most) or 1
    for at in range(0, len(tensors), length):
        group = tensors[at : at + length]
        kind, first, _ = group[0]
        until = f" to {group[-1][1]}" if len(group) > 1 else ""
        digest = xxhash.xxh32(b"".join(part for _, _, part in group)).hexdigest()
        yield f"{TENSOR_MARK}{kind} {first}{until}", digest
