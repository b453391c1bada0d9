"""FABRIC_DISABLE=1: the collectives of one member, with the checks and the results of a job of one."""

from concurrent.futures import Future

import torch

from fabric.client.collectives.payload import Offer, Payload, make_call


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
