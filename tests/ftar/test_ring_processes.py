"""A real process is killed or stopped as a member in the middle of an exchange, over TCP and shared memory.

The forked victim ends itself after an exact count of socket operations, so the tests reach every point of the
exchange without timing. The survivors are threads here.
"""

import os
import signal
import traceback
from collections.abc import Callable

import numpy as np
import pytest
import torch
from ring_harness import WAIT_S, Pairs, RingMembers, names, same_bits, socket_ring, wait_until

from fabric.errors import RoundAborted
from fabric.ftar.host.cpu_ring import CpuRing
from fabric.ftar.host.shm_transport import ReferenceReceiver, ReferenceSender
from fabric.ftar.host.tcp_transport import ByteReceiver, ByteSender
from fabric.ftar.plane import Ring

WORLD, VICTIM = 4, 2
SURVIVORS = [0, 1, 3]
CHUNK_BYTES = 16 * 1024
PLANES = ["tcp", "shm", "mixed"]
LENGTH = 100_003


def fork_victim(pairs: Pairs, after_operations: int, signal_number: int) -> int:
    """Fork a victim that signals itself before this operation; return its pid."""
    pid = os.fork()
    if pid:
        for sock in pairs[VICTIM]:
            sock.close()
        return pid
    try:
        for i in SURVIVORS:
            for sock in pairs[i]:
                sock.close()
        count = 0

        def counted(pump: Callable) -> Callable:
            def wrapper(*arguments):
                nonlocal count
                count += 1
                if count > after_operations:
                    os.kill(os.getpid(), signal_number)
                return pump(*arguments)

            return wrapper

        # A ByteReceiver may read its socket twice in a pump: for a header, and for the payload after it.
        operations = [(ByteSender, "pump"), (ByteReceiver, "_receive")]
        operations += [(ReferenceSender, "pump"), (ReferenceReceiver, "pump")]
        for end, name in operations:
            setattr(end, name, counted(getattr(end, name)))
        plane = CpuRing(chunk_bytes=CHUNK_BYTES)
        plane.install(Ring(1, VICTIM, names(WORLD)), *pairs[VICTIM])
        # numpy fills the tensor, because torch's thread pool does not survive a fork.
        plane.all_reduce(1, 1, torch.from_numpy(np.full(LENGTH, 2.0, dtype=np.float32)))
    except BaseException:  # noqa: BLE001 - a fork must never return into the test runner
        traceback.print_exc()
    finally:
        os._exit(1)


def check_next_epoch(members: RingMembers, gradients: dict[int, torch.Tensor]) -> None:
    """Check that the survivors go on with their kept gradients, in a ring of three."""
    links = socket_ring(3)
    for place, i in enumerate(SURVIVORS):
        ring = Ring(2, place, tuple(f"m{j}" for j in SURVIVORS))
        members.planes[i].install(ring, *links[place])
    buffers = {i: gradients[i].clone() for i in SURVIVORS}
    for future in members.start(2, 1, buffers).values():
        future.result(WAIT_S)
    expected = torch.full((LENGTH,), float(sum(SURVIVORS)))
    assert all(same_bits(buffers[i], expected) for i in SURVIVORS)


# The victim dies at one of these operations. Later the member before the victim may have finished, and no
# member of the ring would report the death; this test has no control links.
COUNTS = [(n, p) for n in (0, 1, 2, 3, 5, 8, 13, 21, 34, 55) for p in PLANES]


@pytest.mark.parametrize(("after_operations", "plane"), COUNTS)
def test_all_survivors_of_a_kill_name_the_dead_and_go_on(after_operations, plane):
    pairs = socket_ring(WORLD, plane)
    pid = fork_victim(pairs, after_operations, signal.SIGKILL)
    try:
        with RingMembers(WORLD, who=SURVIVORS, chunk_bytes=CHUNK_BYTES) as members:
            members.install(1, pairs)
            gradients = {i: torch.full((LENGTH,), float(i)) for i in SURVIVORS}
            buffers = {i: gradients[i].clone() for i in SURVIVORS}
            for future in members.start(1, 1, buffers).values():
                with pytest.raises(RoundAborted) as aborted:
                    future.result(WAIT_S)
                assert aborted.value.about == f"m{VICTIM}"
            assert all((gradients[i] == i).all() for i in SURVIVORS)
            check_next_epoch(members, gradients)
    except BaseException:
        os.kill(pid, signal.SIGTERM)
        raise
    finally:
        _, status = os.waitpid(pid, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL


@pytest.mark.parametrize("plane", PLANES)
def test_a_stopped_neighbour_holds_up_no_member_that_aborts(plane):
    pairs = socket_ring(WORLD, plane)
    pid = fork_victim(pairs, 20, signal.SIGSTOP)
    try:
        with RingMembers(WORLD, who=SURVIVORS, chunk_bytes=CHUNK_BYTES) as members:
            members.install(1, pairs)
            gradients = {i: torch.full((LENGTH,), float(i)) for i in SURVIVORS}
            futures = members.start(1, 1, {i: gradients[i].clone() for i in SURVIVORS})
            _, status = os.waitpid(pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status)
            wait_until(lambda: members.planes[3].waiting_for == f"m{VICTIM}")
            for i in SURVIVORS:
                members.planes[i].abort(1, "m2 does not answer", about="m2")
            for future in futures.values():
                with pytest.raises(RoundAborted, match="m2 does not answer"):
                    future.result(WAIT_S)
            check_next_epoch(members, gradients)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@pytest.mark.parametrize("plane", PLANES)
def test_an_abort_behind_a_stopped_member_reaches_all_members_before_it(plane):
    pairs = socket_ring(WORLD, plane)
    pid = fork_victim(pairs, 20, signal.SIGSTOP)
    try:
        with RingMembers(WORLD, who=SURVIVORS, chunk_bytes=CHUNK_BYTES) as members:
            members.install(1, pairs)
            futures = members.start(1, 1, {i: torch.ones(LENGTH) for i in SURVIVORS})
            os.waitpid(pid, os.WUNTRACED)
            members.planes[1].abort(1, "m2 does not answer", about="m2")
            for future in futures.values():
                with pytest.raises(RoundAborted) as aborted:
                    future.result(WAIT_S)
                assert aborted.value.about == "m2"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
