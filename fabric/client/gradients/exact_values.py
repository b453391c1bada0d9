"""Values of any type as floating numbers, which a sum with zeros leaves as they are (-0 becomes 0)."""

import torch

_DIRECT = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SMALL = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.uint16)
_HALF_BITS = 32


def has_exact_values(tensor: torch.Tensor) -> bool:
    """Whether ``exact_values`` knows the type of ``tensor``."""
    types = (*_DIRECT, *_SMALL, torch.int32, torch.int64, torch.complex64, torch.complex128)
    return (tensor.dtype in types or tensor.dtype.itemsize == 1) and tensor.layout == torch.strided


def exact_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of ``tensor`` as floating numbers, from which ``write_exact`` restores each bit."""
    if tensor.dtype in _DIRECT:
        return tensor.clone()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj()).clone()
    if tensor.dtype == torch.int64:
        high = tensor >> _HALF_BITS
        return torch.stack([high, tensor - (high << _HALF_BITS)]).double()
    if tensor.dtype in _SMALL or tensor.dtype == torch.int32:
        return tensor.to(torch.float64 if tensor.dtype == torch.int32 else torch.float32)
    return tensor.contiguous().view(torch.uint8).float()  # the bits of floating types of 8 bits


def write_exact(values: torch.Tensor, into: torch.Tensor) -> None:
    """Write what ``exact_values`` has returned into a tensor of the type that it came from."""
    if into.dtype == torch.int64:
        halves = values.long()
        into.copy_((halves[0] << _HALF_BITS) + halves[1])
    elif into.is_complex():
        into.copy_(torch.view_as_complex(values.contiguous()))
    elif into.dtype in (*_DIRECT, *_SMALL, torch.int32):
        into.copy_(values)
    else:
        into.copy_(values.to(torch.uint8).view(into.dtype))
