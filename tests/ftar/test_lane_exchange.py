"""The exchange thread reduces lanes of unequal layouts, on the host and on a device."""

from collections.abc import Callable

import pytest
import torch
from ftar.lane_exchange import LaneJob
from ftar.lane_layouts import COLUMNS, MODEL, ROWS, SINGLE, gradient_of
from ftar.simulated_device import SimulatedDevice
from hypothesis import given, settings
from hypothesis import strategies as st
from ring_harness import WAIT_S, wait_until

from fabric.client.gradients.bucket_stream import BucketReadiness
from fabric.ftar.device.device_ring import DeviceRing
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages.rank_messages import summed_digest
from fabric.protocol.rules.lanes import TensorRegion

MEMORY: dict[str, Callable[[], SimulatedDevice] | None] = {"host": None, "device": SimulatedDevice}
TWO = {"r0": SINGLE, "r1": ROWS}


def gradients_of(job: LaneJob, seed: int):
    return {name: gradient_of(seed + number) for number, name in enumerate(job.layouts)}


@pytest.mark.parametrize("links", ["shm", "tcp"])
@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(
    "layouts",
    [TWO, {"r0": COLUMNS, "r1": SINGLE, "r2": ROWS}, {"r0": ROWS, "r1": ROWS}, {"r0": ROWS}],
    ids=["two", "three", "equal", "alone"],
)
def test_every_replica_has_the_sum_and_votes_for_one_digest(layouts, memory, links):
    with LaneJob(layouts, links, MEMORY[memory]) as job:
        job.install(1)
        seen = set()
        for step in range(3):
            gradients = gradients_of(job, 10 * step)
            digests = job.reduce(1, step, gradients)
            assert len(digests) == 1 and not digests & seen
            seen |= digests
            job.check(gradients)


@settings(max_examples=60)
@given(
    chosen=st.lists(st.sampled_from([SINGLE, ROWS, COLUMNS]), min_size=1, max_size=3),
    late=st.sets(st.sampled_from(sorted(MODEL))),
    weights=st.lists(st.integers(0, 2), min_size=3, max_size=3).filter(lambda x: x[0] > 0),
    unused=st.sets(st.sampled_from(sorted(MODEL))),
    links=st.sampled_from(["tcp", "shm"]),
)
def test_late_values_arrive_in_any_layouts_with_any_weights_while_backward_runs(
    chosen, late, weights, unused, links
):
    """Buckets are handed over as backward ends them, and late values when the order has ended."""
    with LaneJob({f"r{n}": layout for n, layout in enumerate(chosen)}, links, late=late) as job:
        job.install(1)
        gradients = {
            name: {x: part * weight for x, part in gradient.items() if x not in unused}
            for (name, gradient), weight in zip(gradients_of(job, 7).items(), weights, strict=False)
        }
        streams = {id(rank): BucketReadiness() for rank in job.ranks}
        for rank, stream in ((rank, streams[id(rank)]) for rank in job.ranks):
            early = {x: part for x, part in gradients[rank.replica].items() if x not in late}
            rank.fill(early)
            rank.start(1, 0, float(weights[int(rank.replica[1:])]), stream)
            for bucket in (x for x in rank.gradients.buckets if not x.late):
                stream.finish(bucket)
        for rank in job.ranks:
            rank.fill({x: part for x, part in gradients[rank.replica].items() if x in late}, only=late)
            streams[id(rank)].finish_all()
        digests: dict[str, list[str]] = {}
        for rank in job.ranks:
            event = rank.events.get(timeout=WAIT_S)
            assert isinstance(event, io.Exchanged), event
            digests.setdefault(rank.replica, []).append(event.gradient_digest)
        assert len({summed_digest(x) for x in digests.values()}) == 1
        job.check(gradients)


@pytest.mark.parametrize("memory", MEMORY)
def test_the_digest_of_a_round_shows_one_changed_element(memory):
    with LaneJob(TWO, "shm", MEMORY[memory]) as job:
        job.install(1)
        gradients = gradients_of(job, 0)
        first = job.reduce(1, 0, gradients)
        assert job.reduce(1, 1, gradients) == first
        gradients["r1"]["in.weight"][5, 3] += 1
        assert job.reduce(1, 2, gradients) != first


@pytest.mark.parametrize("memory", MEMORY)
def test_a_replica_without_weight_adds_nothing(memory):
    with LaneJob(TWO, "tcp", MEMORY[memory]) as job:
        job.install(1)
        gradients = gradients_of(job, 0)
        for rank in job.ranks:
            rank.fill(gradients[rank.replica])
            rank.start(1, 0, weight=float(rank.replica == "r1"))
        for rank in job.ranks:
            assert isinstance(rank.events.get(timeout=WAIT_S), io.Exchanged)
        job.check({"r1": gradients["r1"]})


@pytest.mark.parametrize("links", ["shm", "tcp"])
@pytest.mark.parametrize("memory", MEMORY)
def test_after_an_abort_the_kept_gradient_goes_into_the_next_epoch(memory, links):
    with LaneJob(TWO, links, MEMORY[memory]) as job:
        job.install(1)
        gradients = gradients_of(job, 0)
        single = job.ranks[0]
        single.fill(gradients["r0"])
        single.start(1, 0)
        wait_until(lambda: single.plane.waiting_for == "r1")
        single.plane.abort(1, "r1 was evicted", "r1")
        failed = single.events.get(timeout=WAIT_S)
        assert isinstance(failed, io.ExchangeFailed) and failed.about == "r1"
        for rank in job.ranks:
            rank.plane.retire(2)
        job.install(2)
        for rank in job.ranks[1:]:
            rank.fill(gradients["r1"])
        for rank in job.ranks:
            rank.start(2, 0)
        for rank in job.ranks:
            assert isinstance(rank.events.get(timeout=WAIT_S), io.Exchanged)
        job.check(gradients)


def test_a_value_that_is_not_finite_is_named_on_a_device_too():
    with LaneJob(TWO, "tcp", SimulatedDevice) as job:
        job.install(1)
        gradients = gradients_of(job, 0)
        gradients["r1"]["norm"][2] = float("inf")
        for rank in job.ranks:
            rank.fill(gradients[rank.replica])
            rank.start(1, 0)
        named = {(r.replica, r.rank): r.events.get(timeout=WAIT_S).nonfinite for r in job.ranks}
        # Rank 1 of the cut replica holds this element.
        assert named == {("r0", 0): "norm", ("r1", 0): "", ("r1", 1): "norm"}


def test_the_rings_of_a_device_share_their_memory():
    """The slots of a ring may take a third of a gigabyte, and a rank may have many lanes."""
    with LaneJob({"r0": SINGLE, "r1": COLUMNS, "r2": ROWS}, "tcp", SimulatedDevice) as job:
        single = job.ranks[0]
        before = single.device.allocated
        job.install(1)
        lanes = len(single.lanes.get(1).rank_lanes.numbers)
        assert lanes >= 4
        job.reduce(1, 0, gradients_of(job, 0))
        # The lanes' own memory holds copies of the gradient, which is small.
        assert single.device.allocated - before <= lanes * single.gradients.nbytes


def test_a_slot_stays_registered_while_any_ring_uses_the_device():
    device, memory, other = SimulatedDevice(), torch.zeros(64), torch.zeros(64)
    first = DeviceRing(device, 4096)
    second = first.sibling()
    first.register(-1, memory)
    second.register(-1, other)
    second.unregister(other)
    assert [x.data_ptr() for x in device.registered] == [memory.data_ptr()]
    second.close()
    first.close()
    device.close()


@pytest.mark.parametrize("memory", MEMORY)
@pytest.mark.parametrize(
    "layouts",
    [TWO, {"r0": COLUMNS, "r1": SINGLE, "r2": ROWS}, {"r0": ROWS, "r1": ROWS}, {"r0": ROWS}],
    ids=["two", "three", "equal", "alone"],
)
def test_a_parameter_that_no_replica_used_keeps_no_gradient_in_any_layout(layouts, memory):
    """Every rank of every replica agrees, also the one that holds nothing of a small parameter."""
    with LaneJob(layouts, "tcp", MEMORY[memory]) as job:
        job.install(1)
        for step, missing in enumerate([{"half"}, {"in.weight", "norm"}, {"scalar"}, set(), {"half"}]):
            gradients = gradients_of(job, 10 * step)
            for number, gradient in enumerate(gradients.values()):
                for name in missing | {[*MODEL][(step + number) % len(MODEL)]}:
                    del gradient[name]
            assert len(job.reduce(1, step, gradients)) == 1
            used = {name for gradient in gradients.values() for name in gradient}
            for rank in job.ranks:
                rank.slot.settle()
                assert {name for name, part in rank.scattered(2.0).items() if part is not None} == used
                for held in rank.layout.ranks[rank.rank]:
                    whole = [g[held.name] for g in gradients.values() if held.name in g]
                    if whole:
                        part = (sum(whole) / 2)[held.region.within(TensorRegion.whole(held.shape))]
                        assert torch.equal(rank.parameters[held.name].grad.cpu(), part), held.name
