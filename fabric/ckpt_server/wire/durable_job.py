"""The job that the checkpoint server gives to the writer of a durable checkpoint, and the writer's result."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DurableJob:
    """Where to write. ``url`` is the storage that all jobs share, ``keep`` how many complete checkpoints are
    kept, ``patience_s`` how long rank 0 waits for the other ranks' parts. ``required``: the job's folder must
    hold a checkpoint before this one."""

    url: str
    job: str
    replica: str
    incarnation: int
    keep: int = 3
    patience_s: float = 600.0
    required: bool = False


@dataclass(frozen=True, slots=True)
class DurableJobResult:
    """``complete`` is False for a rank other than 0, whose part alone is written; ``folder`` is a URL.
    ``warnings``: what could not be tidied up."""

    folder: str
    nbytes: int
    seconds: float
    complete: bool
    warnings: tuple[str, ...] = ()
