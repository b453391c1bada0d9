"""NCCL communicators, one per epoch, for ``process_group_plane``.

Written from torch's documentation; ``docs/benchmarks.md`` says which parts have run on a GPU. NCCL refuses
two ranks on one GPU. A communicator fails when a member dies, so every epoch has its own communicator. torch
would end the process when a collective times out. Here the watchdog of the epoch ends the communicator
instead, so torch's handling is off and its timeout exceeds fabric's.
"""

import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fabric.errors import ConfigError
from fabric.ftar.communicators.process_group_plane import Communicator, Rendezvous
from fabric.ftar.plane import Ring

_cuda: Any = torch.cuda  # torch declares no types for its streams and events
_dist: Any = torch.distributed  # torch declares no types for this module
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
# This timeout is longer than any time budget of fabric, so that torch's timeout never comes first.
_NEVER = timedelta(days=30)
# The watchdog of the epoch replaces torch's own.
_TORCH_SETTINGS = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class NcclFactory:
    """Makes communicators of one GPU each. Raises ConfigError where this torch has no NCCL."""

    def __init__(self, device: torch.device) -> None:
        if not dist.is_nccl_available():
            raise ConfigError("this build of torch has no NCCL: use another data plane, or a CUDA build")
        self._device = device
        for name, value in _TORCH_SETTINGS.items():
            os.putenv(name, value)  # torch's native code reads it for the first communicator

    def open_rendezvous(self, ring: Ring, host: str) -> tuple[Rendezvous, Any]:
        """Open a store at a port that the system chooses: see ``CommunicatorFactory``."""
        store = _dist.TCPStore(host, 0, ring.world, is_master=True, timeout=_NEVER, wait_for_workers=False)
        return Rendezvous(host, store.port), store

    def make(
        self,
        ring: Ring,
        rendezvous: Rendezvous,
        kept: Any,
        timeout_s: float,
        began: Callable[[Communicator], None],
    ) -> Communicator:
        """Build the communicator by a first collective: see ``CommunicatorFactory``."""
        bound = timedelta(seconds=timeout_s)
        store = kept or _dist.TCPStore(
            rendezvous.host,
            rendezvous.port,
            ring.world,
            is_master=False,
            timeout=bound,
            wait_for_workers=False,
        )
        store.set_timeout(bound)
        options = _dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER  # noqa: SLF001  there is no other way to it
        prefix = _dist.PrefixStore(f"fabric/{ring.epoch}", store)
        group = _dist.ProcessGroupNCCL(prefix, ring.position, ring.world, options)
        made = NcclCommunicator(group, self._device, store)
        began(made)
        made.start(torch.zeros(1, device=self._device), "sum")()
        return made


class NcclCommunicator:
    """A ``Communicator`` of NCCL. It keeps ``store`` alive, because the process group may read it."""

    def __init__(self, group: Any, device: torch.device, store: Any) -> None:
        self._group = group
        self._device = device
        self._store = store

    def start(self, tensor: torch.Tensor, operation: str) -> Callable[[], None]:
        """Begin a collective: see ``Communicator``. NCCL's stream and the calling thread's wait for each
        other."""
        options = _dist.AllreduceOptions()
        options.reduceOp = _OPERATIONS[operation]
        with _cuda.device(self._device):
            work = self._group.allreduce([tensor], options)
            work.wait()  # enqueues a wait and returns
            # An abort ends NCCL's kernel, so the event completes.
            done = _cuda.Event(blocking=True)
            done.record(_cuda.current_stream(self._device))

        def wait() -> None:
            done.synchronize()

        return wait

    def abort(self) -> None:
        self._group.abort()
