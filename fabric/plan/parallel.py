"""Runs seeds side by side: one pool of processes for every simulation."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor


def process_pool(workers: int) -> ProcessPoolExecutor:
    """Return a pool of ``workers`` fresh processes, at least one.

    They are spawned and not forked, because a forked process would lack the threads of the caller.
    """
    return ProcessPoolExecutor(max(1, workers), mp_context=multiprocessing.get_context("spawn"))
