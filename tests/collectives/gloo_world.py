"""Starts real gloo processes that record their collectives, lets them play a fault, and ends them."""

import multiprocessing
from pathlib import Path

import gloo_rank

# Fork the processes from a process that has imported torch, and dynamo, which a pickle dump needs.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch", "torch.distributed", "torch._dynamo"])
DEADLINE_S = 180.0  # an operation usually takes a second, but the machine may be loaded


class GlooWorld:
    """``ranks`` processes of ``gloo_rank.py``; they are ended with the context."""

    def __init__(self, folder: Path, ranks: int, trouble: str, buffer: int = 200) -> None:
        self.folder = folder
        self._lines, self._processes = [], []
        for rank in range(ranks):
            here, there = CONTEXT.Pipe()
            arguments = (folder, rank, ranks, trouble, buffer, there)
            process = CONTEXT.Process(target=gloo_rank.run, args=arguments, daemon=True)
            process.start()
            there.close()
            self._lines.append(here)
            self._processes.append(process)

    def __enter__(self) -> "GlooWorld":
        return self

    def __exit__(self, *_: object) -> None:
        for process, line in zip(self._processes, self._lines, strict=True):
            process.kill()
            process.join()
            line.close()

    def _hear(self, rank: int, word: str) -> None:
        assert self._lines[rank].poll(DEADLINE_S), f"rank {rank} said nothing"
        assert self._lines[rank].recv() == word

    def get_into_trouble(self, *, one_by_one: bool = False) -> None:
        """Play the fault, until every rank has dumped its recording. With ``one_by_one`` each rank ends
        before the next rank calls. Otherwise bytes of a mismatched call would make gloo abort the process.
        """
        for rank in range(len(self._lines)):
            self._hear(rank, "ready")
        for rank, line in enumerate(self._lines):
            line.send("go on")
            if one_by_one:
                self._hear(rank, "dumped")
                self._processes[rank].kill()
                self._processes[rank].join()
        for rank in range(len(self._lines)) if not one_by_one else ():
            self._hear(rank, "dumped")

    def files(self, form: str) -> list[Path]:
        """The dumps in one form: ``json`` or ``pickle``."""
        return sorted(self.folder.glob("rank*.json" if form == "json" else "trace_*"))
