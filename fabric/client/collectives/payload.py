"""The tensors of a collective: checked, exchanged over a ring, kept as bytes for a repeated call."""

import itertools
import json
import math
from dataclasses import dataclass

import torch

from fabric.client.collectives.calls import Call
from fabric.client.control.collective_links import CollectiveGroup, LinkedRing
from fabric.errors import ConfigError, NotAMember, ProtocolError
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.reduce_ops import OPERATION_CODES, SUM, Reduction
from fabric.ftar.ring_schedule import DTYPE_CODES
from fabric.protocol.messages.wire import decode_value

# One ring of a group: sums, and bytes that every member gets, in the ring's own arithmetic.
#
# Bytes travel as sums of integers to which all other members add zeros, so they arrive unchanged.


_WORD_BYTES = 4


class GroupRing:
    """The links of one attempt. One thread exchanges; any thread aborts."""

    def __init__(self, group: CollectiveGroup, links: LinkedRing, shares_memory: bool) -> None:
        self.group = group
        self.attempt = links.attempt
        self._plane = CpuRing(shared_memory=shares_memory)
        self._plane.install(group.ring, links.next, links.previous)
        self._numbers = itertools.count()  # all members count their exchanges alike

    def limit(self, seconds: float) -> None:
        """Let every later wait without progress end after this long."""
        self._plane.set_bounds(exchange_s=seconds, entry_s=seconds)

    def all_reduce(self, source: torch.Tensor, reduction: Reduction = SUM) -> torch.Tensor:
        """Return the reduction of ``source`` (1-D, on the CPU). Raises RoundAborted."""
        result = torch.empty_like(source)
        epoch = self.group.ring.epoch
        self._plane.all_reduce(epoch, next(self._numbers), source, result, reduction)
        return result

    def gather(self, own: bytes) -> list[bytes]:
        """Return the bytes of every member, in ring order; all give equally many. Raises RoundAborted."""
        ring = self.group.ring
        width = -(-len(own) // _WORD_BYTES) * _WORD_BYTES
        memory = torch.zeros(ring.world * width, dtype=torch.uint8, device="cpu")
        start = ring.position * width
        if own:
            memory[start : start + len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        gathered = self._sum(memory).numpy().tobytes()
        return [gathered[i * width : i * width + len(own)] for i in range(ring.world)]

    def broadcast(self, own: bytes | None, nbytes: int) -> bytes:
        """Return the ``nbytes`` bytes of the one member that gives them as ``own``. Raises RoundAborted."""
        memory = torch.zeros(-(-nbytes // _WORD_BYTES) * _WORD_BYTES, dtype=torch.uint8, device="cpu")
        if own:
            memory[:nbytes] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
        return self._sum(memory).numpy()[:nbytes].tobytes()

    def _sum(self, memory: torch.Tensor) -> torch.Tensor:
        return self.all_reduce(memory.view(torch.int32)).view(torch.uint8)

    def abort(self, why: str) -> None:
        """End the exchange that uses these links, and all later ones."""
        self._plane.abort(self.group.ring.epoch, why)

    def close(self) -> None:
        """Close the links; idempotent."""
        self._plane.close()


_HEAD_BYTES = 8


@dataclass(frozen=True, slots=True)
class Payload:
    """The result of a collective: tensors on the CPU, and for an all_gather the members' names."""

    names: tuple[str, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()

    def copied(self) -> "Payload":
        """Return a copy that no caller changes."""
        return Payload(self.names, tuple(x.clone() for x in self.tensors))

    @property
    def nbytes(self) -> int:
        """The length of ``packed``."""
        return _HEAD_BYTES + len(json.dumps(self.names)) + sum(x.nbytes for x in self.tensors)

    def packed(self) -> bytes:
        """Return the bytes that ``unpacked`` reads."""
        head = json.dumps(self.names).encode()
        return b"".join((len(head).to_bytes(_HEAD_BYTES), head, *(as_bytes(x) for x in self.tensors)))

    @classmethod
    def unpacked(cls, call: Call, data: bytes) -> "Payload":
        """Return the result of ``call`` in ``data``. Raises ProtocolError for anything else."""
        start = _HEAD_BYTES + int.from_bytes(data[:_HEAD_BYTES])
        names = decode_value(tuple[str, ...], data[_HEAD_BYTES:start], "names of a collective")
        body = data[start:]
        count, size = len(names) or 1, size_of(call)
        if len(body) != count * size:
            raise ProtocolError(
                f"a member sent {len(body)} bytes as the result of {call}: restart its replica"
            )
        if not call.dtype:
            return cls(names)
        return cls(names, tuple(from_bytes(body[i * size :][:size], call) for i in range(count)))


@dataclass(frozen=True, slots=True)
class Offer:
    """This member's part of a collective."""

    call: Call
    source: torch.Tensor | None

    def alone(self, names: tuple[str, ...]) -> Payload:
        """Return the result over this member alone."""
        if self.source is None:
            return Payload()
        if self.call.kind == "broadcast":
            position_of(self.call.option, names)
        is_gather = self.call.kind == "all_gather"
        return Payload(names if is_gather else (), (self.source.clone(),))

    def exchanged(self, ring: GroupRing) -> Payload:
        """Return the result over all members of the ring. Raises RoundAborted."""
        names, source, call = ring.group.names, self.source, self.call
        if source is None:
            return Payload()
        if call.kind == "all_reduce":
            weight = float(len(names)) if call.option == "mean" else 1.0
            result = ring.all_reduce(source.reshape(-1), Reduction(call.option, weight))
            return Payload((), (result.view(source.shape),))
        if call.kind == "broadcast":
            is_source = position_of(call.option, names) == ring.group.ring.position
            data = ring.broadcast(as_bytes(source) if is_source else None, source.nbytes)
            return Payload((), (from_bytes(data, call),))
        return Payload(names, tuple(from_bytes(x, call) for x in ring.gather(as_bytes(source))))


def position_of(source: str, names: tuple[str, ...]) -> int:
    """Return the position of a broadcast's source. Raises NotAMember where it is not a member."""
    if source and source not in names:
        raise NotAMember(
            f"{source!r} is not a member now: broadcast from one of {', '.join(names)}, or from the first "
            'member with source=""'
        )
    return names.index(source) if source else 0


def make_call(kind: str, tensor: torch.Tensor | None, option: str) -> tuple[Call, torch.Tensor | None]:
    """Return the call, and the tensor on the CPU and contiguous. Raises ConfigError."""
    if tensor is None:
        return Call(kind), None
    if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
        raise ConfigError(f"{kind} needs a dense tensor, not {type(tensor).__name__}: convert it first")
    dtype = str(tensor.dtype).removeprefix("torch.")
    if kind == "all_reduce":
        if tensor.dtype not in DTYPE_CODES:
            able = ", ".join(str(x).removeprefix("torch.") for x in DTYPE_CODES)
            raise ConfigError(f"an all_reduce of {dtype} is not possible: convert it to one of {able}")
        if option not in OPERATION_CODES:
            raise ConfigError(f"op is {option!r}: choose one of {', '.join(OPERATION_CODES)}")
        Reduction(option).check(tensor.dtype)
    return Call(kind, dtype, tuple(tensor.shape), option), tensor.detach().to("cpu").contiguous()


def as_bytes(tensor: torch.Tensor) -> bytes:
    """Return the bytes of a contiguous tensor on the CPU."""
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def size_of(call: Call) -> int:
    """Return the bytes of one tensor of ``call``, 0 without a tensor."""
    return math.prod(call.shape) * getattr(torch, call.dtype).itemsize if call.dtype else 0


def from_bytes(data: bytes, call: Call) -> torch.Tensor:
    """Return the tensor with the type and shape of ``call``. Raises ConfigError for other sizes."""
    dtype = getattr(torch, call.dtype)
    flat = (
        torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")
    )
    return flat.reshape(call.shape)
