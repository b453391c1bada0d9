"""DistributedDataParallel inside a replica, fabric between the replicas.

DDP's process group has this process alone, so a dead replica breaks no group. DDP's hook reports which
gradients are final, and fabric exchanges its own buckets. The members' DDP buckets may differ.
"""

import torch
from torch import distributed, futures
from torch.nn.parallel import DistributedDataParallel

from fabric.client.loop.session import Session
from fabric.client.loop.solo import SoloSession
from fabric.errors import ConfigError


def ddp(model: DistributedDataParallel, session: Session | SoloSession) -> None:
    """Let ``session`` average the gradients of ``model``; call it once, after ``attach``.

    All micro-batches but the last run under ``no_sync``. Raises ConfigError for a model that is not DDP's.
    Raises it too for a DDP group of several processes: the death of a replica would break that group.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ConfigError(
            f"fabric.client.ddp takes a model that is wrapped in DistributedDataParallel, and this is a "
            f"{type(model).__name__}: wrap it, or leave out the call, which a plain model does not need"
        )
    size = distributed.get_world_size(model.process_group)
    if size != 1:
        raise ConfigError(
            f"the process group of this DDP has {size} members: give DDP a group of this process alone "
            "(fabric averages between the replicas)"
        )
    if isinstance(session, SoloSession):
        return
    overlap = session.overlap
    overlap.unwatch()
    overlap.without_sync = model.no_sync

    # No annotations: DDP checks those of its hook, and torch's stubs lack the type that DDP requires.
    def hook(_, bucket):  # type: ignore[no-untyped-def]
        for parameter in bucket.parameters():
            overlap.ready(parameter, version=False)
        done: futures.Future[torch.Tensor] = futures.Future()
        done.set_result(bucket.buffer())
        return done

    model.register_comm_hook(None, hook)
