"""One rank of a gloo world that plays a fault, and then dumps torch's recording."""

import os
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

LATE_ROUNDS = 12


class GlooRank:
    """Rank ``rank`` of ``world``; each method without an underscore plays one fault."""

    def __init__(self, folder: Path, rank: int, world: int) -> None:
        self.folder, self.rank, self.world = folder, rank, world
        self.store = dist.FileStore(str(folder / "store"), world)
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("world", self.store),
            rank=rank,
            world_size=world,
            timeout=timedelta(minutes=3),
        )
        everybody = list(range(world))
        self.first = dist.new_group(everybody, group_desc="first")
        self.second = dist.new_group(everybody, group_desc="second")
        self.in_order()

    def settle(self) -> None:
        """Wait, because torch marks a call as done a moment after the call has returned."""
        while b'"retired":false' in torch._C._distributed_c10d._dump_fr_trace_json():
            pass

    def dump(self) -> None:
        c10d = torch._C._distributed_c10d
        (self.folder / f"rank{self.rank}.json").write_bytes(c10d._dump_fr_trace_json())
        (self.folder / f"trace_{self.rank}").write_bytes(c10d._dump_fr_trace())

    def in_order(self) -> None:
        for _ in range(3):
            dist.all_reduce(torch.ones(4))
        dist.barrier()
        self.settle()

    def absent(self) -> None:
        if self.rank != self.world - 1:
            dist.all_reduce(torch.ones(7), async_op=True)

    def operation(self) -> None:
        if self.rank:
            dist.all_reduce(torch.ones(5), async_op=True)
        else:
            dist.broadcast(torch.ones(5), src=0, async_op=True)

    def sizes(self) -> None:
        dist.all_reduce(torch.ones(3 if self.rank else 5), async_op=True)

    def dtype(self) -> None:
        dist.all_reduce(torch.ones(5, dtype=torch.int64 if self.rank else torch.float32), async_op=True)

    def deadlock(self) -> None:
        """Each rank waits in a process group that the other rank does not enter."""
        dist.all_reduce(torch.ones(2), group=self.first)
        dist.all_reduce(torch.ones(2), group=self.second)
        self.settle()
        self.strangers()

    def strangers(self) -> None:
        dist.all_reduce(torch.ones(2), group=self.second if self.rank else self.first, async_op=True)

    def straggler(self) -> None:
        """The last rank enters 20 ms after all other ranks."""
        last = self.world - 1
        for number in range(LATE_ROUNDS):
            if self.rank == last:
                self.store.wait([f"came-{rank}-{number}" for rank in range(last)])
                time.sleep(0.02)
            work = dist.all_reduce(torch.ones(4), async_op=True)
            self.store.set(f"came-{self.rank}-{number}", "yes")
            work.wait()
        self.settle()

    def timeout(self) -> None:
        """Rank 0 times out; in its recording the call looks complete."""
        if self.rank == 0:
            try:
                dist.all_reduce(torch.ones(7), group=self.first, async_op=True).wait(timedelta(seconds=0.2))
            except RuntimeError:
                return
            raise AssertionError("the others never came")


def run(folder: Path, rank: int, world: int, trouble: str, buffer: int, line: Connection) -> None:
    """The process: plays the requested fault, dumps the recording, and waits for its end."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(buffer)
    torch.set_num_threads(1)
    member = GlooRank(folder, rank, world)
    line.send("ready")
    line.recv()
    getattr(member, trouble)()
    member.dump()
    line.send("dumped")
    line.recv()
