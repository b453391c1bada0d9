"""Puts values into the objects that hold them, because user code may refer to these objects."""

from typing import Any

import numpy as np
import torch


def put(live: Any, wanted: Any) -> Any:
    """Return ``wanted``, in the tensors, arrays, dicts, lists and generators of ``live`` where they fit."""
    if isinstance(live, torch.Generator):
        live.set_state(wanted.cpu())
        return live
    if isinstance(wanted, torch.Tensor) and isinstance(live, torch.Tensor):
        if (live.shape, live.dtype) != (wanted.shape, wanted.dtype):
            return wanted.to(live.device)
        with torch.no_grad():
            live.copy_(wanted)
        return live
    if isinstance(wanted, np.ndarray) and isinstance(live, np.ndarray) and live.flags.writeable:
        if (live.shape, live.dtype) == (wanted.shape, wanted.dtype):
            live[...] = wanted
            return live
    elif isinstance(wanted, dict) and isinstance(live, dict):
        content = {key: put(live.get(key), part) for key, part in wanted.items()}
        live.clear()
        live.update(content)
        return live
    elif type(wanted) in (list, tuple) and isinstance(live, list | tuple):
        paired = [put(live[at] if at < len(live) else None, part) for at, part in enumerate(wanted)]
        if type(live) is list and type(wanted) is list:
            live[:] = paired
            return live
        return type(wanted)(paired)
    return wanted
