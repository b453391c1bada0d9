"""Loaders of a plan, without a session."""

from typing import Any

from fabric.client.data.loader import (
    Fetcher,
    IterableStream,
    Loader,
    LoaderOptions,
    ReadingThreads,
    WorkerProcesses,
)
from fabric.client.data.sample_plan import SamplePlan


def loader_of(
    dataset: Any, plan: SamplePlan, collate: Any = list, workers: int = 0, kind: str = "threads", **rest: Any
) -> Loader:
    """Return the loader of ``plan`` with ``workers`` workers of this kind; ``rest`` as for Loader."""
    source = IterableStream(dataset, plan.global_batch_size) if plan.is_stream else dataset
    fetcher = Fetcher(source, collate, plan.seed)
    loader = Loader(fetcher, plan, **rest)
    if workers and kind == "threads":
        loader.workers = ReadingThreads(fetcher, loader.items, workers)
    elif workers:
        tries = plan.steps_per_pass
        loader.workers = WorkerProcesses(fetcher, loader.items, workers, LoaderOptions(), "r0", tries)
    return loader
