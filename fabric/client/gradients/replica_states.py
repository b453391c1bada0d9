"""State of each replica's own, such as its data loader's: ``attach(..., local_state=)``.

The states travel with the gradients. A stand-in parameter has a row of bytes for each data slot. In a step a
replica fills the row of its slot, and the sum over the replicas has the rows of all. So a step commits its
gradient and its states together, and a replay of the gradient brings the states too. The rows are part of the
shared state, where a replica that takes a slot over finds the slot's newest state.

A state is compressed. Each number of the stand-in parameter carries two bytes of it. 65,535 survives the
division by the weight and the multiplication after it.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from fabric.ckpt_server.state.training_state import capture, restore
from fabric.client.data.loader import data_slot_of
from fabric.errors import ConfigError
from fabric.runtime.config import Settings, parse_replicas

# Bytes of a row: for a state with up to _WORKERS loader workers, and for each worker beyond.
ROW_BYTES, WORKER_BYTES, _WORKERS = 64 * 1024, 16 * 1024, 4
_LENGTH_BYTES = 4
_MOST_BYTES = 1 << 26  # of a state that is not compressed
NAME = "local_state"  # among the objects of the shared state


class ReplicaStates:
    """The states of ``objects`` in data slot ``slot`` of ``slots``. Without objects it does nothing."""

    def __init__(self, objects: Mapping[str, Any], slot: int, slots: int, device: torch.device) -> None:
        for name, value in objects.items():
            if not hasattr(value, "state_dict") or not hasattr(value, "load_state_dict"):
                raise ConfigError(
                    f"local_state[{name!r}] is a {type(value).__name__} without state_dict and "
                    "load_state_dict: give an object that has both"
                )
        self.handed_over = 0  # how many times a state of the job was loaded into the objects
        self._objects = dict(objects)
        self._slot = slot
        workers = sum(max(0, int(getattr(x, "num_workers", 0)) - _WORKERS) for x in objects.values())
        self._row_bytes = _LENGTH_BYTES + ROW_BYTES + WORKER_BYTES * workers
        self._rows = torch.zeros(slots if objects else 0, self._row_bytes, dtype=torch.uint8, device="cpu")
        numbers = torch.zeros(len(self._rows), self._row_bytes // 2, dtype=torch.float32, device=device)
        stand_in = torch.nn.Parameter(numbers)
        self.stand_ins = [(NAME, stand_in)] if objects else []

    @classmethod
    def of(cls, settings: Settings, objects: Mapping[str, Any], device: torch.device) -> "ReplicaStates":
        """Return the states of the replica that ``settings`` name. Raises ConfigError."""
        replicas = parse_replicas(settings.replicas)[1]
        if objects and settings.unequal:
            raise ConfigError(
                "local_state does not go with FABRIC_UNEQUAL: turn it off, or leave local_state out"
            )
        slot = data_slot_of(settings.replica, replicas, None) if objects else 0
        return cls(objects, slot, replicas, device)

    @property
    def shared(self) -> dict[str, object]:
        """This object by its name in the shared state; empty without objects."""
        return {NAME: self} if self._objects else {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the newest committed state of every slot."""
        return {"rows": self._rows}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over the job's states, and load that of this replica's slot into the objects."""
        self._rows.copy_(state["rows"])
        self.hand_over()

    def contribute(self) -> None:
        """Put the objects' states, as they are now, into the exchange. Raises ConfigError if too large."""
        for _, stand_in in self.stand_ins:
            content = _content(self._objects, self._row_bytes)
            numbers = torch.from_numpy(np.frombuffer(content, "<u2").astype(np.float32))
            stand_in.grad = torch.zeros_like(stand_in)
            stand_in.grad[self._slot, : len(numbers)] = numbers.to(stand_in.device)

    def commit(self, total_weight: float) -> None:
        """Take the rows of the replicas that contributed to the committed step; the others stay."""
        for _, stand_in in self.stand_ins:
            assert stand_in.grad is not None
            # The gradient is the sum over the replicas, divided by the weight.
            numbers = torch.round(stand_in.grad * total_weight).to("cpu", torch.int32).numpy()
            rows = torch.from_numpy(numbers.astype("<u2").view(np.uint8))
            stand_in.grad = None
            filled = (rows[:, :_LENGTH_BYTES] != 0).any(dim=1)
            self._rows[filled] = rows[filled]

    def drop(self) -> None:
        """Keep the rows as they are: nothing of this step is committed."""
        for _, stand_in in self.stand_ins:
            stand_in.grad = None

    def hand_over(self) -> None:
        """Load the state of this replica's slot into the objects: it has no part in the newest step."""
        if not self._objects:
            return
        row = self._rows[self._slot].numpy().tobytes()
        length = int.from_bytes(row[:_LENGTH_BYTES], "little")
        if length:
            packed = row[_LENGTH_BYTES : _LENGTH_BYTES + length]
            content = zlib.decompressobj().decompress(packed, _MOST_BYTES)
            restore(memoryview(bytearray(content)), self._objects)
        self.handed_over += 1

    def batches(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Yield the batches of ``loader``, pass after pass. After a hand-over go on from its place."""
        if not self._objects:
            raise ConfigError(
                "session.batches goes through a loader of attach(..., local_state=), and none is given: give "
                'attach local_state={"data": loader}, so that a replica that joins repeats no sample'
            )
        while True:
            handed_over, drawn = self.handed_over, iter(loader)
            while self.handed_over == handed_over:
                try:
                    batch = next(drawn)
                except StopIteration:
                    break
                yield batch


def _content(objects: Mapping[str, Any], row_bytes: int) -> bytes:
    """Return the objects' states with their length in front, an even number of bytes."""
    view = capture(objects, 0)
    parts = [tensor.cpu().reshape(-1).view(torch.uint8).numpy().tobytes() for _, tensor in view.tensors]
    content = b"".join([view.header, *parts])
    packed = zlib.compress(content, 1)
    if len(packed) + _LENGTH_BYTES > row_bytes or len(content) > _MOST_BYTES:
        raise ConfigError(
            f"local_state has {len(packed)} bytes after compression, and {row_bytes - _LENGTH_BYTES} fit: "
            "leave out what every replica can compute, such as samples in a shuffle buffer"
        )
    framed = len(packed).to_bytes(_LENGTH_BYTES, "little") + packed
    return framed + bytes(len(framed) % 2)
