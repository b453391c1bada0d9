"""A collective: the agreement of the members on the call, before its bytes move, and its tensors.

Each member sends one frame of a fixed size. All members see the same frames, so all of them reach the same
verdict, and a mistake is the same sentence everywhere. A member that has the result of a collective keeps it:
if another member has lost that result, its repeated call gets the kept one.
"""

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec
import torch

from fabric.client.control.peers import CollectiveGroup, LinkedRing
from fabric.errors import ConfigError, NotAMember, ProtocolError
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.reduce_ops import OPERATION_CODES, SUM, Reduction
from fabric.ftar.ring_schedule import DTYPE_CODES
from fabric.model import Value
from fabric.protocol.messages.wire import decode_value

FRAME_BYTES = 1024
# The place of a collective in the job: committed steps, whether the step's gradient is computed, and the
# number of the collective since then.
Key = tuple[int, int, int]
_Size = Annotated[int, msgspec.Meta(ge=0, le=1 << 48)]
_Words: type[tuple[Key | None, str, Key | None, str, int]] = tuple[Key | None, str, Key | None, str, _Size]


class Call(Value):
    """One collective, as the user's code calls it. Members with unequal calls have unequal programs."""

    kind: str  # all_reduce, broadcast, all_gather or barrier
    dtype: str = ""
    shape: tuple[int, ...] = ()
    option: str = ""  # the operation of an all_reduce, or the source of a broadcast

    def __str__(self) -> str:
        option = f" ({self.option})" if self.option else ""
        return f"{self.kind}{option}" + (f" of {self.dtype} {list(self.shape)}" if self.dtype else "")


class CallFrame(Value):
    """One member's part of the agreement."""

    key: Key | None  # the collective that the member calls; None: it only answers repeated calls
    call: str = ""  # the call, in words
    held: Key | None = None  # the newest collective whose result the member has
    held_call: str = ""
    held_bytes: int = 0  # the size of that result

    def pack(self) -> bytes:
        """Return FRAME_BYTES bytes. Raises ConfigError for a call that is too long."""
        words = [self.key, self.call, self.held, self.held_call, self.held_bytes]
        data = json.dumps(words, separators=(",", ":")).encode()
        if len(data) > FRAME_BYTES:
            raise ConfigError(f"{self.call[:40]}... has too long a name or shape: reshape the tensor")
        return data.ljust(FRAME_BYTES)

    @classmethod
    def unpack(cls, data: bytes) -> "CallFrame":
        """Return the frame in ``data``. Raises ProtocolError for anything else."""
        return cls(*decode_value(_Words, data, "frame of a collective"))


class Go(Value):
    """All members make the same call: move its bytes."""


class Supply(Value):
    """Members repeat a collective whose result ``source`` (a position) has: it sends ``nbytes`` to all."""

    source: int
    nbytes: int
    key: Key


class Refuse(Value):
    """Those that call ``key`` get this sentence. ``may_retry``: a repeated call may have a result."""

    why: str
    key: Key
    may_retry: bool


def judge(names: Sequence[str], frames: Sequence[CallFrame]) -> Go | Supply | Refuse | None:
    """Return what follows from the frames of all members, in the order of ``names``.

    None: some members have not called yet, so they exchange frames again."""
    lowest = min((x.key for x in frames if x.key is not None), default=None)
    if lowest is None:
        return None
    callers = [i for i, x in enumerate(frames) if x.key == lowest]
    others = [i for i, x in enumerate(frames) if x.key != lowest]
    first = callers[0]
    for i in callers:
        if frames[i].call != frames[first].call:
            return _unequal(names, lowest, {first: frames[first].call, i: frames[i].call})
    holder = next((i for i in others if frames[i].held == lowest), None)
    if holder is not None:
        if frames[holder].held_call != frames[first].call:
            return _unequal(names, lowest, {holder: frames[holder].held_call, first: frames[first].call})
        return Supply(holder, frames[holder].held_bytes, lowest)
    ahead = next((i for i in others if frames[i].key is not None), None)
    if ahead is not None:
        why = f"{names[ahead]} has gone on without {describe(lowest, frames[first].call)}: go on too"
        return Refuse(why, lowest, may_retry=True)
    return None if others else Go()


def describe(key: Key, call: str) -> str:
    """Name a collective for a person."""
    return f"{call} (collective {key[2]} at step {key[0]})"


def _unequal(names: Sequence[str], key: Key, calls: Mapping[int, str]) -> Refuse:
    """Name two members' unequal calls, given by the members' positions."""
    both = " and ".join(f"{call} on {names[i]}" for i, call in calls.items())
    why = f"collective {key[2]} at step {key[0]} is {both}: call the same collectives in the same order on "
    return Refuse(why + "every replica", key, may_retry=False)


_WORD_BYTES = 4


class GroupRing:
    """The links of one attempt. One thread exchanges; any thread aborts.

    Bytes travel as sums of integers to which all other members add zeros, so they arrive unchanged.
    """

    def __init__(self, group: CollectiveGroup, links: LinkedRing) -> None:
        self.group = group
        self.attempt = links.attempt
        self._plane = CpuRing(shared_memory=links.shares_memory)
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
        self._plane.close()


_HEAD_BYTES = 8


class Payload(Value):
    """The result of a collective: tensors on the CPU, and for an all_gather the members' names."""

    names: tuple[str, ...] = ()
    tensors: tuple[torch.Tensor, ...] = ()

    def copied(self) -> "Payload":
        return Payload(self.names, tuple(x.clone() for x in self.tensors))

    @property
    def nbytes(self) -> int:
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
        itemsize = getattr(torch, call.dtype).itemsize if call.dtype else 0
        count, size = len(names) or 1, math.prod(call.shape) * itemsize
        if len(body) != count * size:
            raise ProtocolError(
                f"a member sent {len(body)} bytes as the result of {call}: restart its replica"
            )
        if not call.dtype:
            return cls(names)
        return cls(names, tuple(from_bytes(body[i * size :][:size], call) for i in range(count)))


class Offer(Value):
    """This member's part of a collective."""

    call: Call
    source: torch.Tensor | None

    def alone(self, names: tuple[str, ...]) -> Payload:
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


def from_bytes(data: bytes, call: Call) -> torch.Tensor:
    """Return the tensor with the type and shape of ``call``. Raises ConfigError for other sizes."""
    dtype = getattr(torch, call.dtype)
    if not data:  # torch reads no empty buffer
        return torch.empty(call.shape, dtype=dtype, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=dtype).reshape(call.shape)
