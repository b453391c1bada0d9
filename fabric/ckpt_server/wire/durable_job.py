"""The job that the checkpoint server gives to the writer of a durable checkpoint, and the writer's result."""

from dataclasses import dataclass

from fabric.model import Int64


@dataclass(frozen=True, slots=True)
class DurableJob:
    """The job of one writer. ``url``: the storage that all jobs share. ``keep``: complete checkpoints to
    keep.

    ``patience_s``: how long rank 0 waits for the other ranks' parts. ``required``: the job's folder must hold
    an earlier checkpoint. ``made``: an earlier try has made the job's folder, which must still be there.
    ``urgent``: the trainer will be killed soon, so the writer keeps its priority.
    """

    url: str
    job: str
    replica: str
    incarnation: Int64
    keep: Int64 = 3
    patience_s: float = 600.0
    required: bool = False
    made: bool = False
    urgent: bool = False


@dataclass(frozen=True, slots=True)
class DurableJobResult:
    """``complete``: False for a rank other than 0, which writes its part alone. ``folder``: a URL.
    ``warnings``: problems with deleting old attempts. ``conflict``: why a restart would not begin from it."""

    folder: str
    nbytes: int
    seconds: float
    complete: bool
    warnings: tuple[str, ...] = ()
    conflict: str = ""
