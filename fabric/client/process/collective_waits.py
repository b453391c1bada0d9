"""The time for which the main thread waits in torch's collectives, for the other ranks of its replica.

A rank that waits is not slow: fabric takes these seconds out of the rank's computing time. A wait for work on
a CUDA device returns at once, so there the computing time keeps the device's waits.
"""

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist


class CollectiveWaits:
    """``seconds`` grows with each wait of the main thread, from ``install`` on."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._thread = threading.get_ident()
        self._depth = 0

    def install(self) -> None:
        """Measure the waits of this process from now on, until it ends."""
        import torch.distributed._functional_collectives as functional

        dist.Work.wait = self._timed(dist.Work.wait)  # type: ignore[method-assign]
        functional.wait_tensor = self._timed(functional.wait_tensor)  # DTensor, tensor parallelism

    def _timed(self, wait: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling() or self._depth or threading.get_ident() != self._thread:
                return wait(*arguments, **options)
            began, self._depth = time.monotonic(), 1
            try:
                return wait(*arguments, **options)
            finally:
                self._depth = 0
                self.seconds += time.monotonic() - began

        return timed
