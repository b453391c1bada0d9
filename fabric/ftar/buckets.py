"""Packs a model's gradients into one flat buffer before the round, and unpacks them after the commit.

The buffer is bytes. Parameters of one dtype lie together in a *section*, the last one first, because backward
finishes them in that order. A section is cut into *buckets* of whole parameters, about BUCKET_BYTES each.
Buckets start at multiples of ALIGNMENT_BYTES, and the gaps between them are zero, so that the digest of the
buffer is a digest of the gradients. A bucket is one all-reduce, and may begin as soon as the gradients in it
are final. Buckets follow from the parameters alone, so they are the same on all members, whatever buckets
others (DDP) have. The layout hash covers names, shapes, dtypes and order: members whose hashes differ must
not sum.

A bucket ends with its *presence*: one element per parameter, 1 where this process has a gradient and 0 where
it has none. The sum counts the members that have one, and is above 0 for any number of them. A parameter
without any keeps ``.grad`` None, as without fabric, so that momentum and weight decay do not move it.

With FABRIC_EXCHANGE a bucket's gradients may travel in fewer bytes. Presence and other exact values never do.

For a DTensor (FSDP2, tensor parallel) the buffer holds this rank's shard. Equal ranks of all replicas sum
equal shards, so the hash also covers how the tensor is sharded.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
import xxhash

from fabric.errors import ConfigError, StateError
from fabric.ftar.ring_schedule import DTYPE_CODES

ALIGNMENT_BYTES = 64
BUCKET_BYTES = 16 * 2**20
# The longest description of a layout: a thousand parameters with long names. A session sends its description
# once; a lighthouse keeps one description per job.
_DESCRIPTION_CHARACTERS = 64 * 1024

# Rounds take this many buffers in turn, unless a replica catches up.
_MOST_KEPT = 3

NamedParameter = tuple[str, torch.nn.Parameter]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Bytes [begin, end) of the buffer hold ``dtype``; ``parameters`` lie there in this order.

    The bytes from ``gap`` to ``begin`` belong to no parameter and are zero.
    """

    dtype: torch.dtype
    gap: int
    begin: int
    end: int
    parameters: tuple[NamedParameter, ...]
    fragment: int = 0  # the fragment of the model that these parameters belong to
    coarse: int = 0  # how many of the first elements may travel in fewer bytes
    late: bool = False  # the values are put in after backward

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return the bucket's elements in ``buffer``, 1-D."""
        return buffer[self.begin : self.end].view(self.dtype)

    def presence(self, buffer: torch.Tensor) -> torch.Tensor:
        """Return, by parameter, the part of ``buffer`` that counts the gradients."""
        begin = self.end - len(self.parameters) * self.dtype.itemsize
        return buffer[begin : self.end].view(self.dtype)

    def check_gradients(self) -> None:
        """Raise ConfigError for a gradient whose form cannot be summed."""
        for name, parameter in self.parameters:
            _check_gradient(name, parameter)

    def local_gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Return this rank's part of each gradient that there is, by the parameter's name."""
        return [(name, local_part(p.grad)) for name, p in self.parameters if p.grad is not None]

    def views(self, buffer: torch.Tensor) -> list[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        """Return each parameter with the part of ``buffer`` that its gradient takes, in its shape."""
        local = [local_part(parameter) for _, parameter in self.parameters]
        sizes = [*(x.numel() for x in local), len(local)]  # the presence lies behind the gradients
        parts = self.view(buffer).split_with_sizes(sizes)
        return [(*x, part.view(y.shape)) for x, y, part in zip(self.parameters, local, parts, strict=False)]


class FlatGradients:
    """The gradients of ``parameters`` (name and parameter, those that require grad) as flat bytes.

    ``nbytes`` is what a buffer needs: 1-D uint8 in host memory, its address aligned to 8 bytes. ``buckets``
    are in the order in which they are to be reduced. Raises ConfigError for a repeated name or a gradient
    type that cannot be reduced.
    """

    def __init__(
        self,
        parameters: Iterable[NamedParameter],
        bucket_bytes: int = BUCKET_BYTES,
        fragments: Mapping[str, int] | None = None,
        exact: Collection[str] = (),
        late: Collection[str] = (),
    ) -> None:
        """``fragments``: the number of each parameter's fragment, if one fragment is exchanged per step.
        ``exact``: the names of what must not travel in fewer bytes, which gets buckets of its own.
        ``late``: the names of what is final only after backward. It gets buckets of its own, the last ones.
        """
        fragments = fragments or {}
        self.fragments = max(fragments.values(), default=0) + 1
        self.scale = 1.0  # factor for gradients when they are gathered
        # Parameters whose sum is the value of one member: it is not divided by the weight.
        self.of_one: frozenset[str] = frozenset()
        # The views of the newest buffers, by address.
        self._kept_views: dict[int, list[tuple[str, torch.nn.Parameter, torch.Tensor]]] = {}
        self.parameters = tuple((name, p) for name, p in parameters if p.requires_grad)
        self._sharded: list[Any] = [p for _, p in self.parameters if hasattr(p, "placements")]
        _check_parameters(self.parameters)
        lines = tuple(
            f"{name} {str(p.dtype).removeprefix('torch.')}{list(p.shape)}" for name, p in self.parameters
        )
        # One line per parameter, for people, or none where they would be too long for a message.
        self.described = lines if sum(map(len, lines)) <= _DESCRIPTION_CHARACTERS else ()
        backwards = in_order_of_backward(self.parameters, late)
        presence = "presence", torch.empty(len(backwards), device="meta")
        self.layout = layout_hash([*backwards, presence])
        laid_out = lay_out(self.parameters, bucket_bytes, fragments, exact, late)
        self.nbytes = laid_out[-1].end if laid_out else 0
        # Backward completes a bucket with the bucket's last parameter, which comes first in the model.
        finished = {id(parameter): at for at, (_, parameter) in enumerate(backwards)}
        self.buckets: tuple[Bucket, ...] = tuple(
            sorted(laid_out, key=lambda bucket: finished[id(bucket.parameters[-1][1])])
        )

    def is_exchanged(self, bucket: Bucket, step: int) -> bool:
        """Whether members send ``bucket`` in ``step``: fragments take turns. The others are zero."""
        return step % self.fragments == bucket.fragment

    def settle(self) -> None:
        """Complete gradients that are partial sums over the replica's ranks, in their parameters' placement.
        A collective: all ranks of the replica call it at the same point."""
        for parameter in self._sharded:
            if not is_complete(parameter) and hasattr(parameter.grad, "redistribute"):
                parameter.grad = parameter.grad.redistribute(placements=parameter.placements)

    @torch.no_grad()
    def gather_bucket(
        self, bucket: Bucket, into: torch.Tensor, is_one: bool = True, in_place: bool = False
    ) -> list[torch.Tensor]:
        """Copy the bucket's gradients into the buffer; missing ones and gaps become zeros.

        Return where its elements lie, one part after the other. Raises ConfigError for a gradient whose form
        cannot be summed; the gradients are untouched. ``is_one``: this member has the values of ``of_one``.
        ``in_place``: gradients that lie in memory as they do in the buffer are not copied.
        """
        self._check_buffer(into)
        bucket.check_gradients()
        if bucket.gap < bucket.begin:
            into[bucket.gap : bucket.begin].zero_()
        presence, flat = bucket.presence(into).fill_(1), bucket.view(into)
        parts: list[torch.Tensor] = []
        begin = stop = 0  # elements from ``begin`` on lie in the buffer; ``stop`` ends those so far
        for place, (name, parameter) in enumerate(bucket.parameters):
            local, start = local_part(parameter), stop
            stop += local.numel()
            if parameter.grad is None or (name in self.of_one and not is_one):
                flat[start:stop].zero_()
                presence[place : place + 1].zero_()
                continue
            gradient = local_part(parameter.grad)
            if in_place and self.scale == 1.0 and _is_flat(gradient):
                if begin < start:
                    parts.append(flat[begin:start])
                if start < stop:
                    parts.append(gradient)
                begin = stop
                continue
            view = flat[start:stop].view(local.shape).copy_(gradient)
            if self.scale != 1.0:
                view.mul_(self.scale)
        return [*parts, flat[begin:]]  # the presence at least

    def absent(self, buffer: torch.Tensor) -> frozenset[str]:
        """Return the names of the parameters for which no member has a gradient in ``buffer``, a sum.

        On a device this waits for the sum.
        """
        counts = [bucket.presence(buffer) for bucket in self.buckets]
        if len(counts) > 1:
            counts = [torch.cat([part.float() for part in counts])]
        flags = counts[0].tolist() if counts else []
        if all(flags):
            return frozenset()
        names = [name for bucket in self.buckets for name, _ in bucket.parameters]
        return frozenset(name for name, flag in zip(names, flags, strict=True) if not flag)

    @torch.no_grad()
    def first_nonfinite(self, buffer: torch.Tensor) -> str:
        """Name the model's first parameter with an infinity or NaN in ``buffer``; empty for none.

        Waits once for a device, unless there may be one.
        """
        nonfinite: set[str] = set()
        # A sum that is not finite has such an element, or the sum has overflowed: then check each tensor.
        wide = {bucket.dtype: torch.promote_types(bucket.dtype, torch.float32) for bucket in self.buckets}
        sums = [bucket.view(buffer).sum(dtype=wide[bucket.dtype]).double() for bucket in self.buckets]
        for bucket, total in zip(self.buckets, torch.stack(sums).tolist() if sums else [], strict=True):
            if math.isfinite(total):
                continue
            for name, _, view in bucket.views(buffer):
                if name not in self.of_one and not bool(torch.isfinite(view).all()):
                    nonfinite.add(name)
        return next((name for name, _ in self.parameters if name in nonfinite), "")

    @torch.no_grad()
    def first_nonfinite_own(self) -> str:
        """Name the first parameter whose own gradient, before the sum, has an infinity or NaN.

        Waits once for a device, unless there may be one.
        """
        own = {name: p.grad for name, p in self.parameters if p.grad is not None and name not in self.of_one}
        norm = torch.nn.utils.get_total_norm([local_part(gradient) for gradient in own.values()])
        if math.isfinite(norm.item()):
            return ""
        return next((name for name, x in own.items() if not bool(torch.isfinite(x).all())), "")

    @torch.no_grad()
    def scatter(
        self, buffer: torch.Tensor, weight: float, absent: Collection[str] | None = None, lend: bool = False
    ) -> None:
        """Write ``buffer / weight`` into every ``.grad``, which is created where there is none.

        ``absent``: the parameters whose ``.grad`` becomes None; by default as ``buffer`` says. ``lend``: a
        missing ``.grad`` becomes a part of ``buffer``, divided there. Raises StateError, before it writes,
        for a weight by which it cannot divide.
        """
        self._check_buffer(buffer)
        _check_weight(weight)
        absent = self.absent(buffer) if absent is None else absent
        for name, parameter, view in self._views(buffer, keep=buffer.is_cpu and not lend):
            if name in absent:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = view if lend and _is_flat(parameter) else torch.empty_like(parameter)
            gradient = local_part(parameter.grad)
            if name in self.of_one:
                gradient.copy_(view)
            elif gradient.device.type == "cpu":
                torch.div(view, weight, out=gradient)
            else:
                gradient.copy_(view)
                gradient.div_(weight)

    def _views(self, buffer: torch.Tensor, keep: bool) -> list[tuple[str, torch.nn.Parameter, torch.Tensor]]:
        address = buffer.data_ptr()  # its own, because kept views keep its memory
        if keep and address in self._kept_views:
            return self._kept_views[address]
        views = [view for bucket in self.buckets for view in bucket.views(buffer)]
        if keep:
            self._kept_views[address] = views
            if len(self._kept_views) > _MOST_KEPT:
                del self._kept_views[next(iter(self._kept_views))]
        return views

    @torch.no_grad()
    def divide(self, weight: float) -> None:
        """Do in place what ``scatter`` does in a job of one member, with the same bits.

        Raises StateError, before it writes, for a weight by which it cannot divide.
        """
        _check_weight(weight)
        own = [p.grad for name, p in self.parameters if p.grad is not None and name not in self.of_one]
        # Where parameters share one gradient, it is divided once. A DTensor itself has no address.
        parts = list({x.data_ptr(): x for x in map(local_part, own)}.values()) if weight != 1.0 else []
        if parts and parts[0].is_cpu:
            torch._foreach_div_(parts, weight)
        else:  # on a device a list gets other bits than in ``scatter``
            for part in parts:
                part.div_(weight)

    def _check_buffer(self, buffer: torch.Tensor) -> None:
        if buffer.dtype != torch.uint8 or buffer.shape != (self.nbytes,):
            raise StateError(
                f"these gradients need a flat buffer of {self.nbytes} bytes, not "
                f"{tuple(buffer.shape)} of {buffer.dtype}"
            )


def layout_hash(parameters: Iterable[tuple[str, torch.Tensor]]) -> str:
    """Return xxh3_64, in hex, of the canonical JSON ``[[name, shape, dtype], ...]``, in the order given.
    A sharded tensor's row also has its local shape, mesh sizes and placements."""
    rows = [_row(name, p) for name, p in parameters]
    text = json.dumps(rows, separators=(",", ":"))
    return xxhash.xxh3_64_hexdigest(text.encode())


def _row(name: str, tensor: torch.Tensor) -> list[object]:
    row: list[object] = [name, list(tensor.shape), str(tensor.dtype).removeprefix("torch.")]
    if hasattr(tensor, "device_mesh"):
        placements = [str(p) for p in tensor.placements]  # type: ignore[attr-defined]
        row += [list(local_part(tensor).shape), list(tensor.device_mesh.shape), placements]
    return row


def _is_flat(gradient: torch.Tensor) -> bool:
    """Whether the elements lie in host memory in their order and as they are."""
    return (
        type(gradient) in (torch.Tensor, torch.nn.Parameter)
        and gradient.is_cpu
        and gradient.is_contiguous()
        and not gradient.is_neg()
    )


def is_complete(parameter: torch.Tensor) -> bool:
    """Whether the gradient has the parameter's placement. Otherwise it is a partial sum over the ranks."""
    wanted = getattr(parameter, "placements", None)
    return parameter.grad is None or getattr(parameter.grad, "placements", None) == wanted


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return the part of ``tensor`` that lies in this process, as a view of it."""
    if not hasattr(tensor, "device_mesh"):
        return tensor
    with torch.no_grad():
        local: torch.Tensor = tensor.to_local()  # type: ignore[attr-defined]
    return local


def in_order_of_backward(parameters: Sequence[NamedParameter], late: Collection[str]) -> list[NamedParameter]:
    """Return ``parameters``, given in the model's order, in the order in which they are final."""
    backwards = list(parameters[::-1])
    backwards.sort(key=lambda x: x[0] in late)
    return backwards


def lay_out(
    parameters: Sequence[NamedParameter],
    bucket_bytes: int = BUCKET_BYTES,
    fragments: Mapping[str, int] | None = None,
    exact: Collection[str] = (),
    late: Collection[str] = (),
) -> list[Bucket]:
    """Return buckets in the order of their bytes, for ``parameters`` in the model's order.

    All places in a flat gradient, also in that of another rank, come from here. A bucket has parameters of
    one fragment, all of them exact or none, all of them late or none.
    """

    def kind(name: str) -> tuple[int, bool, bool]:
        return (fragments or {}).get(name, 0), name in exact, name in late

    buckets: list[Bucket] = []
    gap = begin = end = 0
    parameters = in_order_of_backward(parameters, late)
    for dtype in dict.fromkeys(p.dtype for _, p in parameters):
        members: list[NamedParameter] = []
        section = [x for x in parameters if x[1].dtype is dtype]
        for (name, parameter), following in zip_longest(section, section[1:]):
            members.append((name, parameter))
            end += local_part(parameter).numel() * dtype.itemsize
            ends = following is None or kind(following[0]) != kind(name)
            if ends or end - begin >= bucket_bytes:
                fragment, is_exact, is_late = kind(name)
                coarse = 0 if is_exact else (end - begin) // dtype.itemsize
                end += len(members) * dtype.itemsize
                buckets.append(Bucket(dtype, gap, begin, end, tuple(members), fragment, coarse, is_late))
                gap, members = end, []
                begin = end = -(-end // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return buckets


def _check_weight(weight: float) -> None:
    if not (weight > 0 and math.isfinite(weight)):
        raise StateError(
            f"the gradients of this step have the total weight {weight!r}, so there is no "
            "average: give step.backward a positive finite weight"
        )


def _check_parameters(parameters: tuple[NamedParameter, ...]) -> None:
    names: set[str] = set()
    for name, parameter in parameters:
        if name in names:
            raise ConfigError(f"two parameters are named {name!r}: give every one its own name")
        names.add(name)
        if parameter.dtype not in DTYPE_CODES:
            raise ConfigError(
                f"the gradient of {name} is of {parameter.dtype}, which cannot be summed over "
                "replicas: use a floating type of 16, 32 or 64 bits, or freeze it"
            )


def _check_gradient(name: str, parameter: torch.nn.Parameter) -> None:
    gradient = parameter.grad
    if gradient is None:
        return
    if gradient.is_sparse or gradient.layout != torch.strided:
        raise ConfigError(
            f"the gradient of {name} is sparse, which cannot be summed over replicas: "
            "build the layer with sparse=False"
        )
    if not is_complete(parameter):
        raise ConfigError(f"the gradient of {name} is sharded otherwise than the parameter: they must agree")
    if gradient.shape != parameter.shape or gradient.dtype != parameter.dtype:
        raise ConfigError(
            f"the gradient of {name} is {tuple(gradient.shape)} of {gradient.dtype}, the parameter "
            f"{tuple(parameter.shape)} of {parameter.dtype}: they must agree"
        )
