"""The collectives that a session has: blocking calls of the training loop."""

from concurrent.futures import Future

import torch

from fabric.client.collectives.calls import Offer, Payload, make_call
from fabric.client.collectives.collectives import TIMEOUT_S, Collectives


class SoloCollectives:
    """As Collectives, alone."""

    def __init__(self, replica: str) -> None:
        self.replica = replica

    def names_or_own(self) -> tuple[str, ...]:
        """As Collectives.names_or_own."""
        return (self.replica,)

    def wait(self, kind: str, tensor: torch.Tensor | None, option: str, timeout_s: float) -> Payload:
        """As Collectives.wait; a broadcast is from this process, whatever its source."""
        return self.start(kind, tensor, "" if kind == "broadcast" else option, timeout_s).result()

    def start(
        self, kind: str, tensor: torch.Tensor | None, option: str, timeout_s: float
    ) -> "Future[Payload]":
        """As Collectives.start, done at once."""
        done: Future[Payload] = Future()
        done.set_result(Offer(*make_call(kind, tensor, option)).alone((self.replica,)))
        return done


class SessionCollectives:
    """Collectives between the equal ranks of all replicas, as methods of a session.

    All members must make the same calls in the same order. ``timeout_s`` bounds the wait for the other
    members, and later every wait without progress. Each method raises CollectiveFailed (repeat the same
    call), NotAMember (leave it out), Mismatch (the members' calls are unequal) and ConfigError.
    """

    collectives: Collectives | SoloCollectives

    def all_reduce(self, tensor: torch.Tensor, op: str = "sum", timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        """Return ``tensor`` reduced over the members: the same bits on all of them.

        ``op``: sum, mean, min or max. ``tensor``: float16, bfloat16, float32, float64, int32 or int64, of any
        shape; it is not changed.
        """
        return self.collectives.wait("all_reduce", tensor, op, timeout_s).tensors[0].to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: str = "", timeout_s: float = TIMEOUT_S) -> torch.Tensor:
        """Return the tensor of the replica ``source``, by default of the first member.

        ``tensor``: of any type, of equal shape. Raises NotAMember also where ``source`` is gone.
        """
        return self.collectives.wait("broadcast", tensor, source, timeout_s).tensors[0].to(tensor.device)

    def all_gather(self, tensor: torch.Tensor, timeout_s: float = TIMEOUT_S) -> dict[str, torch.Tensor]:
        """Return the tensors of all members by replica, in ring order; of any type, of equal shape."""
        gathered = self.collectives.wait("all_gather", tensor, "", timeout_s)
        return {n: x.to(tensor.device) for n, x in zip(gathered.names, gathered.tensors, strict=True)}

    def barrier(self, timeout_s: float = TIMEOUT_S) -> None:
        """Return once all members have called it."""
        self.collectives.wait("barrier", None, "", timeout_s)
