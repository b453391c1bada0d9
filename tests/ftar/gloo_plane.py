"""gloo behind the planes' interface: a baseline to compare with, not a plane to run jobs on.

These defects of gloo are the reason for fabric's own planes. A collective that was aborted goes on in gloo's
threads until its timeout, so it works on a copy. 16-bit floats are rounded after every addition. gloo's
sockets check no token: every process that reaches a port becomes a member.
"""

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from fabric.errors import ConfigError
from fabric.ftar.plane import Ring
from fabric.ftar.process_group_plane import GroupPlane, NcclCommunicator, Rendezvous

_dist: Any = torch.distributed  # torch does not declare the types of this module
_OPERATIONS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


def gloo_plane(exchange_s: float = 30.0) -> GroupPlane:
    """A plane for CPU tensors. Raises ConfigError where this torch has no gloo."""
    if not dist.is_gloo_available():
        raise ConfigError("this build of torch has no gloo: use another data plane")
    return GroupPlane(GlooFactory(exchange_s), lambda t: t.device.type == "cpu", exchange_s)


class GlooFactory:
    """See ``NcclFactory``. ``collective_s`` bounds a collective, which no thread can interrupt."""

    def __init__(self, collective_s: float = 30.0) -> None:
        self._collective = timedelta(seconds=collective_s)

    def open_rendezvous(self, ring: Ring, host: str) -> tuple[Rendezvous, Any]:
        """Open a store at a port that the system chooses (``NcclFactory``)."""
        store = _dist.TCPStore(host, 0, ring.world, is_master=True, wait_for_workers=False)
        return Rendezvous(host, store.port), store

    def make(
        self,
        ring: Ring,
        rendezvous: Rendezvous,
        kept: Any,
        timeout_s: float,
        began: Callable[[NcclCommunicator], None],
    ) -> NcclCommunicator:
        """See ``NcclFactory``. Make the communicator and run one collective, because the first
        collective connects the members.
        """
        bound = timedelta(seconds=timeout_s)
        store = kept or _dist.TCPStore(rendezvous.host, rendezvous.port, ring.world, False, bound)
        options = _dist.ProcessGroupGloo._Options()
        options._timeout = self._collective
        if rendezvous.host.startswith("127."):
            # Without a host name gloo looks up its own name, which may lead to another host.
            options._devices = [_dist.ProcessGroupGloo.create_device(hostname=rendezvous.host)]
        else:
            options._devices = [_dist.ProcessGroupGloo.create_default_device()]
        prefix = _dist.PrefixStore(f"fabric/{ring.epoch}", store)
        group = _dist.ProcessGroupGloo(prefix, ring.position, ring.world, options)
        made = GlooCommunicator(group, store)
        began(made)
        made.start(torch.zeros(1), "sum")()
        return made


class GlooCommunicator:
    """See ``NcclCommunicator``. It uses gloo; ``store`` lives as long as the process group may read it."""

    def __init__(self, group: Any, store: Any) -> None:
        self._group = group
        self._store = store
        self.is_aborted = False

    def start(self, tensor: torch.Tensor, operation: str) -> Callable[[], None]:
        """See ``NcclCommunicator``."""
        options = _dist.AllreduceOptions()
        options.reduceOp = _OPERATIONS[operation]
        working = tensor.clone()
        work = self._group.allreduce([working], options)

        def wait() -> None:
            work.wait()
            if not self.is_aborted:
                tensor.copy_(working)

        return wait

    def abort(self) -> None:
        """Mark the communicator as aborted; gloo's collective cannot be ended, but its result is not used."""
        self.is_aborted = True
