"""The data order under rosters that change: every sample of a step once, and nothing of another step.

Each replica calls its own loader as a session does: ``read_ahead`` for the present share, ``fetch`` for each
of its micro-batches, ``expect`` for the next share if the roster stays.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loaders import loader_of
from samplers import step_sampler

from fabric.client.data.loader import Loader, SampleSlice
from fabric.client.data.sample_plan import SamplePlan
from fabric.model import EVERYTHING, Member, Sharing
from fabric.protocol.rules.assignment import Work, cut, hand_round, lost_parts, share_out

MICRO_BATCHES, MICRO = 6, 2
GLOBAL = MICRO_BATCHES * MICRO
NAMES = ("r0", "r1", "r2", "r3")


class Positions:
    """An endless stream with passes of ``size`` samples; the sample at a position is the position."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self):
        yield from range(self.size)


class Seeking(Positions):
    def iterate_from(self, position: int):
        while True:
            yield position % self.size
            position += 1


@dataclass
class Replica:
    loader: Loader
    # micro-batch of the step under way -> its samples
    kept: dict[int, list[int]] = field(default_factory=dict)


@dataclass
class Job:
    plan: SamplePlan
    dataset: object
    sharing: Sharing
    workers: int
    alive: dict[str, Replica] = field(default_factory=dict)

    def join(self, name: str) -> None:
        if name not in self.alive:
            data_slot = NAMES.index(name)
            loader = loader_of(
                self.dataset, self.plan, workers=self.workers, sharing=self.sharing, data_slot=data_slot
            )
            self.alive[name] = Replica(loader)

    def die(self, name: str) -> None:
        if name in self.alive and len(self.alive) > 1:
            self.alive.pop(name).loader.close()

    @property
    def roster(self) -> list[Member]:
        return [Member(x, 1, "", "", data_slot=NAMES.index(x)) for x in NAMES if x in self.alive]

    @property
    def work(self) -> Work:
        return Work(MICRO_BATCHES, self.sharing)

    def step(self, step: int, deaths: list[tuple[str, int]]) -> None:
        """Compute ``step``. A death (replica, n) comes when the replica has read n of its micro-batches."""
        first = share_out(self.work, self.roster, self.roster)
        for replica in self.alive.values():
            replica.kept.clear()
        given = first
        for dying, after in [*deaths, ("", 0)]:
            for name, replica in list(self.alive.items()):
                batches = given.get(name, ())
                self._compute(replica, step, batches[:after] if name == dying else batches, batches)
                if name != dying:
                    replica.loader.expect(step + 1, first.get(name, ()))
            self.die(dying)
            held = {x for replica in self.alive.values() for x in replica.kept}
            missing = [x for x in range(MICRO_BATCHES) if x not in held]
            load = {name: len(replica.kept) for name, replica in self.alive.items()}
            given = hand_round(self.work, self.roster, self.roster, missing, load)
        for name, replica in self.alive.items():
            self._compute(replica, step, given.get(name, ()), given.get(name, ()))

    def _compute(self, replica: Replica, step: int, batches, wanted) -> None:
        replica.loader.read_ahead(step, wanted)
        for batch in batches:
            assert batch not in replica.kept
            replica.kept[batch] = replica.loader.fetch(step, batch)

    def check(self, step: int) -> None:
        computed = Counter(x for replica in self.alive.values() for x in replica.kept)
        assert set(computed.values()) <= {1}, "a micro-batch counts twice"
        for replica in self.alive.values():
            for batch, samples in replica.kept.items():
                expected = self.plan.samples(step, batch)
                assert samples == [x % len(self) for x in expected], "data of another step or micro-batch"
                if self.plan.shards:
                    ranges = replica.loader.shards
                    assert all(any(b <= x < e for b, e in ranges) for x in samples)
        assert set(computed) >= self._expected(), "samples of this step are missing"

    def _expected(self) -> set[int]:
        """Return the micro-batches that these members together must compute."""
        if self.sharing == EVERYTHING:
            return set(range(MICRO_BATCHES))
        parts = cut(MICRO_BATCHES, [1] * len(NAMES))
        if self.sharing.policy == "shrink":
            able = [NAMES.index(name) for name in self.alive]
        else:
            able = sorted(set(range(len(NAMES))) - set(lost_parts(self.sharing, self.roster)))
        return {x for part in able for x in parts[part]}

    def __len__(self) -> int:
        return self.dataset.size if isinstance(self.dataset, Positions) else len(self.dataset)

    def close(self) -> None:
        for replica in self.alive.values():
            replica.loader.close()


names = st.sampled_from(NAMES)
deaths = st.lists(st.tuples(names, st.integers(0, MICRO_BATCHES)), max_size=2)
# For each step: the joins before it, the deaths in it, and the steps by which the job then moves.
steps = st.tuples(st.sets(names, max_size=2), deaths, st.sampled_from([1, 1, 1, 0, -1, -2, 3]))


@pytest.mark.parametrize("kind", ["indexed", "stream", "seeking"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(5, 40), st.lists(steps, min_size=2, max_size=7), st.sampled_from([0, 2]))
def test_every_sample_of_a_step_is_computed_once_while_members_come_and_go(kind, size, script, workers):
    streams = kind != "indexed"
    dataset = {"indexed": list(range(size)), "stream": Positions(size), "seeking": Seeking(size)}[kind]
    plan = SamplePlan(0 if streams else size, GLOBAL, MICRO, seed=3, is_stream=streams)
    play(Job(plan, dataset, EVERYTHING, workers), script)


@pytest.mark.parametrize("policy", ["constant", "shrink"])
@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(8, 40), st.lists(steps, min_size=2, max_size=7), st.sampled_from([0, 2]))
def test_sharded_data_are_computed_at_most_once_and_only_where_they_can_be_read(
    policy, size, script, workers
):
    plan = SamplePlan(size, GLOBAL, MICRO, seed=3, shards=len(NAMES))
    play(Job(plan, list(range(size)), Sharing(policy, len(NAMES), 2), workers), script)


def play(job: Job, script) -> None:
    for name in NAMES[:3]:
        job.join(name)
    number = 2
    try:
        for joins, dying, on in script:
            for name in sorted(joins):
                job.join(name)
            job.step(number, dying)
            job.check(number)
            number = max(0, number + on)
    finally:
        job.close()


@settings(max_examples=15, deadline=None, derandomize=True)
@given(st.integers(0, 3), st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_batches_drawn_ahead_count_for_their_own_step_alone(ahead, script):
    """``script``: for each step, the number of steps for which data slot 1 is away afterwards."""
    data_slots, size, batch = 3, 60, 6
    at = [0]
    samplers = [
        step_sampler(size, batch, 1, (data_slot, data_slots), lambda: at[0])
        for data_slot in range(data_slots)
    ]
    drawing = [iter(sampler) for sampler in samplers]
    drawn: list[list[list[int]]] = [[] for _ in samplers]
    per_step = samplers[0].per_step
    away = 0
    for leaves in script:
        counted: list[int] = []
        present = [data_slot for data_slot in range(data_slots) if not (data_slot == 1 and away)]
        for data_slot in present:
            while len(drawn[data_slot]) <= ahead:
                some = list(islice(drawing[data_slot], per_step))
                if len(some) < per_step:
                    return  # the pass over the data is over
                drawn[data_slot].append(some)
            own = drawn[data_slot].pop(0)
            if samplers[data_slot].take(at[0]):
                assert own == samplers[data_slot].indices(at[0])
                counted += own
        whole = Counter(x for sampler in samplers for x in sampler.indices(at[0]))
        assert set(whole.values()) == {1} and len(whole) == batch
        assert not Counter(counted) - whole, "a sample twice, or one of another step"
        if not any(script):
            assert Counter(counted) == whole
        away = max(away - 1, 0) or leaves
        at[0] += 1


def test_the_ranks_of_a_replica_cut_each_micro_batch_without_gap_or_overlap():
    plan = SamplePlan(20, GLOBAL, 2, seed=4)
    loaders = [loader_of(list(range(20)), plan, part=SampleSlice(rank, 2)) for rank in range(2)]
    for batch in range(MICRO_BATCHES):
        assert [x for loader in loaders for x in loader.fetch(3, batch)] == plan.samples(3, batch)


def test_the_samples_of_ranks_with_other_seeds_are_augmented_by_other_numbers():
    plan = SamplePlan(20, GLOBAL, 2, seed=4)
    drawn = []
    for draws in (0, 0, 1):
        loader = loader_of(list(range(20)), plan, part=SampleSlice(0, 2, draws))
        loader.fetch(3, 1)
        drawn.append(torch.rand(3).tolist())
    assert drawn[0] == drawn[1] != drawn[2]
