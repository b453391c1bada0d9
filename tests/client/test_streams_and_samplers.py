"""Streams, shards, the sampler's order, averaged buffers and the learning-rate factor, without processes."""

from collections import OrderedDict
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samplers import step_sampler
from torch.utils.data import SequentialSampler, SubsetRandomSampler

import fabric.client
from fabric.audit.audit import DataOrder
from fabric.ckpt_server.state.training_state import StateDescriber, host_bytes, restore
from fabric.client.data.loader import (
    IterableStream,
    LoaderOptions,
    data_slot_of,
    make_loader,
    parse_options,
)
from fabric.client.data.sample_plan import SamplePlan, SamplerOrder
from fabric.client.data.sampler import StepSampler
from fabric.client.gradients.forward_buffers import ForwardBuffers, choose_buffers
from fabric.client.loop.session import SoloSession
from fabric.client.loop.shared_state import shared_state
from fabric.client.loop.step import PresenceFactor, StepData
from fabric.errors import ConfigError, FabricError, StateError
from fabric.model import Base, Member, Record
from fabric.runtime.config import Settings


class Counting:
    """An iterable of 0 to size - 1 that counts its iterations and its reads."""

    def __init__(self, size):
        self.size, self.begun, self.read = size, 0, 0

    def __iter__(self):
        self.begun += 1
        for i in range(self.size):
            self.read += 1
            yield i


class Seeking(Counting):
    def iterate_from(self, position):
        self.begun += 1
        while True:
            self.read += 1
            yield position % self.size
            position += 1


class Redrawn(torch.utils.data.Dataset):
    """Draws its numbers again for each pass."""

    def __len__(self):
        return 6

    def set_epoch(self, epoch):
        self.numbers = torch.rand(6)

    def __getitem__(self, index):
        return self.numbers[index]


def test_a_data_set_that_draws_in_set_epoch_draws_alike_wherever_a_replica_begins_its_pass():
    def loader():
        return make_loader(
            Redrawn(), (6, 2, 0), torch.stack, 0, parse_options({}), Settings(replica="r0", replicas="3")
        )

    first, second = loader(), loader()
    late = [second.fetch(step, i) for step in (0, 1) for i in (2, 1, 0)]
    early = [first.fetch(step, i) for step in (0, 1) for i in (0, 1, 2)]
    assert torch.equal(torch.stack(early[:3]), torch.stack(late[2::-1]))
    assert torch.equal(torch.stack(early[3:]), torch.stack(late[:2:-1]))


@given(st.integers(1, 9), st.lists(st.integers(0, 20), min_size=1, max_size=6), st.booleans())
def test_a_stream_gives_the_sample_at_a_position_whatever_was_asked_before(size, steps, seeks):
    stream = IterableStream(Seeking(size) if seeks else Counting(size))
    for step in steps:
        positions = [step * 4 + i for i in (2, 0, 3)]
        assert stream.read(step * 4, positions) == [p % size for p in positions]


def test_a_stream_is_read_once_while_steps_follow_each_other():
    dataset = Counting(1000)
    stream = IterableStream(dataset)
    for step in range(10):
        for part in ([2, 3], [0, 1]):
            stream.read(max(0, step - 1) * 4, [step * 4 + i for i in part])
    assert (dataset.begun, dataset.read) == (1, 40)


def test_a_stream_that_can_seek_reads_nothing_to_get_there():
    dataset = Seeking(1000)
    assert IterableStream(dataset).read(800, [801, 800]) == [801, 800]
    assert dataset.read == 2


def test_a_stream_with_set_epoch_is_told_the_number_of_each_iteration():
    """A newcomer reads from the beginning, and tells the same numbers on its way."""

    class Told(Counting):
        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([(self.epoch, i) for i in range(self.size)])

    expected = [(p // 3, p % 3) for p in range(12)]
    assert IterableStream(Told(3)).read(0, list(range(12))) == expected
    newcomer = IterableStream(Told(3))
    assert newcomer.read(8, [8, 9, 10]) == expected[8:11]
    assert newcomer.read(1, [1, 2, 3]) == expected[1:4]


def test_an_empty_stream_and_one_that_ends_are_refused_in_a_sentence():
    with pytest.raises(ConfigError, match="gives no sample"):
        IterableStream(Counting(0)).read(0, [0])
    dataset = Counting(3)
    dataset.iterate_from = lambda position: iter([1])
    with pytest.raises(FabricError, match="must go on for ever"):
        IterableStream(dataset).read(0, [0, 1])


@given(st.integers(1, 4), st.integers(1, 3), st.integers(0, 6), st.integers(4, 30))
def test_shards_cut_a_step_as_the_verifier_has_it(shards, micro, step, size):
    plan = SamplePlan(size, micro * 8, micro, 5, shards=shards)
    order = DataOrder(plan.describe())
    for i in range(8):
        samples = plan.samples(step, i)
        assert samples == order.samples(step, i)
        assert (
            len({n for n in range(shards) for s in samples if plan.shard(n)[0] <= s < plan.shard(n)[1]}) == 1
        )


def test_each_seat_reads_its_own_shard_and_those_of_the_layout_after_it():
    loader = make_loader(
        list(range(30)),
        (12, 2, 0),
        list,
        0,
        LoaderOptions(redundancy=2),
        Settings(replica="r0", replicas="3"),
    )
    assert loader.shards == [(0, 10), (10, 20)]


def test_with_a_rack_the_record_says_which_shards_are_read():
    """``shards`` is not known before the first step, and a member beyond the shards reads none."""
    sizes, options = (12, 2, 0), LoaderOptions(redundancy=2)
    settings = Settings(replica="trainer", replicas="3", rack="rack7")
    loader = make_loader(list(range(30)), sizes, list, 0, options, settings)
    with pytest.raises(FabricError, match="inside the loop"):
        _ = loader.shards
    for slot, shards in ((1, [(10, 20), (20, 30)]), (3, [])):
        roster = (Member("other", 1, "", "", data_slot=0), Member("trainer", 1, "", "", data_slot=slot))
        loader.sit(Record("store", 1, 1, 1, 1, "n", roster, Base(1, 0)), "trainer")
        assert loader.shards == shards
    given = LoaderOptions(redundancy=2, data_slot=2)
    assert make_loader(list(range(30)), sizes, list, 0, given, settings).shards == [
        (20, 30),
        (0, 10),
    ]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"policy": "elastic"}, '"constant" or "shrink"'),
        ({"on_poison": "ignore"}, '"stop" or "skip"'),
        ({"redundancy": -1}, "a number of replicas"),
        ({"data_slot": 1}, "goes with redundancy"),
        ({"shares": 1}, "session.loader knows no shares: its options are policy"),
    ],
)
def test_impossible_data_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words):
        parse_options(options)


def test_a_seat_is_the_number_at_the_end_of_the_id_or_given():
    assert (data_slot_of("r12", 13, None), data_slot_of("trainer", 3, 2)) == (12, 2)
    for name, given_seat in (("trainer", None), ("r3", None), ("r0", 3)):
        with pytest.raises(ConfigError, match="has no data slot"):
            data_slot_of(name, 3, given_seat)


# --- the sampler ----------------------------------------------------------------------------------------


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 12), st.integers(0, 3))
def test_the_seats_share_a_step_without_gap_or_overlap_as_the_verifier_has_it(
    data_slots, each, more, step, left
):
    size, batch = data_slots * each * more + min(left, data_slots * each - 1), data_slots * each
    samplers = [
        step_sampler(size, batch, 7, (data_slot, data_slots), lambda: 0) for data_slot in range(data_slots)
    ]
    order = DataOrder(samplers[0].describe())
    for data_slot, sampler in enumerate(samplers):
        assert sampler.indices(step) == order.samples(step, data_slot)
    whole = [i for sampler in samplers for i in sampler.indices(step)]
    assert len(set(whole)) == batch
    passes = [i for s in range(more) for sampler in samplers for i in sampler.indices(s)]
    assert len(set(passes)) == len(passes), "nothing comes twice in a pass"


def test_batches_drawn_for_a_past_step_are_discarded():
    at = [0]
    sampler = step_sampler(48, 4, 0, (0, 2), lambda: at[0])
    drawn = iter(sampler)
    for _ in range(2 * sampler.per_step):  # a DataLoader draws two steps ahead
        next(drawn)
    assert sampler.take(0)
    at[0] = 5  # meanwhile the replica was away and caught up to step 5
    third = [next(drawn), next(drawn)]
    assert third == sampler.indices(6), "one batch is still on its way, for step 5"
    assert not sampler.take(5), "that one was drawn for step 1"
    at[0] = 6
    assert sampler.take(6)


def test_a_pass_ends_after_its_whole_steps_and_the_next_begins_where_the_job_is():
    at = [0]
    sampler = step_sampler(10, 4, 0, (0, 2), lambda: at[0])
    assert len(sampler) == 4 and len(list(sampler)) == 4
    at[0] = 3
    assert list(sampler) == sampler.indices(3)


def loop(sampler, batch_size, accumulate=1, workers=0, steps=40):
    """Run a user's loop; return for each exchanged step whether it counts."""
    session_step = [0]
    sampler.bind(lambda: session_step[0])
    done, gathered = [], []
    while session_step[0] < steps:
        loader = torch.utils.data.DataLoader(range(48), batch_size, sampler=sampler, num_workers=workers)
        for i, batch in enumerate(loader):
            gathered += batch.tolist()
            if (i + 1) % accumulate == 0:
                done.append((sampler.take(session_step[0]), gathered))
                gathered = []
                session_step[0] += 1
    return done


def sampler_of(data_slots=2, alone=False):
    return step_sampler(48, 16, 3, (0, data_slots), lambda: 0, alone)


@pytest.mark.parametrize(("batch_size", "accumulate"), [(8, 1), (4, 2), (1, 8)])
@pytest.mark.parametrize("workers", [0, 1])
def test_a_loop_may_accumulate_and_draw_ahead(batch_size, accumulate, workers):
    sampler = sampler_of()
    done = loop(sampler, batch_size, accumulate, workers, steps=6)
    assert done == [(True, sampler.indices(step)) for step in range(6)]


@pytest.mark.parametrize(
    ("batch_size", "accumulate", "said"),
    [
        (4, 1, "the loop drew 4 samples for this step"),
        (2, 3, "the loop drew 6 samples for this step"),
        (16, 1, "the DataLoader has batch_size 16"),
        (24, 1, "the DataLoader has batch_size 24"),
        (5, 1, "the DataLoader has batch_size 5"),
    ],
)
def test_a_loop_that_computes_another_number_than_per_step_is_refused_with_both(batch_size, accumulate, said):
    with pytest.raises(ConfigError, match=f"{said}, and sampler.per_step is 8: give the DataLoader"):
        loop(sampler_of(), batch_size, accumulate)


def test_forgotten_accumulation_is_noticed_although_workers_draw_ahead():
    """Although two workers draw ahead, the drawn samples fall behind the exchanged ones."""
    sampler = step_sampler(480, 16, 3, (0, 2), lambda: 0)
    drawn = iter(sampler)
    for _ in range(16):  # two steps ahead
        next(drawn)
    with pytest.raises(ConfigError, match=r"drew 4 samples for this step, and sampler.per_step is 8"):
        for step in range(8):
            for _ in range(4):
                next(drawn)
            sampler.take(step)
    assert sampler._exchanged == 4


def test_a_step_in_which_the_sampler_drew_no_sample_is_refused():
    with pytest.raises(ConfigError, match="drew 0 samples"):
        sampler_of().take(0)


def test_alone_a_loop_of_whole_steps_gets_the_steps_of_the_job():
    sampler = sampler_of(data_slots=1, alone=True)
    assert loop(sampler, 16, steps=9) == [(True, sampler.indices(step)) for step in range(9)]


@pytest.mark.parametrize("batch_size", [8, 12, 24, 48])
def test_alone_a_loop_of_any_batch_size_goes_through_the_passes_in_order(batch_size):
    """As without fabric, a pass has every sample exactly once."""
    sampler = sampler_of(data_slots=1, alone=True)
    done = loop(sampler, batch_size, steps=3 * 48 // batch_size)
    drawn = [i for _, indices in done for i in indices]
    assert len(drawn) == 3 * 48
    for number in range(3):
        own = drawn[48 * number : 48 * (number + 1)]
        assert own == [i for step in range(3 * number, 3 * number + 3) for i in sampler.indices(step)]
        assert sorted(own) == list(range(48))


def test_the_parts_of_a_step_are_cut_from_the_order_of_another_sampler():
    """As for a training split; all replicas have the same order, and the audit compares their lists."""
    order = SamplerOrder(SubsetRandomSampler(range(0, 60, 2)), 7)
    samplers = [
        StepSampler(
            30,
            global_batch_size=8,
            seed=7,
            settings=Settings(replica=f"r{slot}", replicas="2"),
            sampler=SubsetRandomSampler(range(0, 60, 2)),
        )
        for slot in range(2)
    ]
    for step, start in ((0, 0), (2, 16), (3, 30), (7, 68)):  # a pass has three steps, and leaves six out
        whole = [i for sampler in samplers for i in sampler.indices(step)]
        assert whole == order.items(range(start, start + 8))
    assert samplers[0].describe() == samplers[1].describe() and "order" in samplers[0].describe()
    alone = SoloSession([], {}).sampler(30, global_batch_size=8, seed=7, sampler=SequentialSampler(range(30)))
    assert [*islice(alone, 30)] == list(range(24))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (range(9), "has size 30, and a pass of the sampler range has 9 indices"),
        ([[1, 2]] * 30, "the sampler list gives batches, and StepSampler cuts steps into single samples"),
    ],
)
def test_another_sampler_that_does_not_fit_is_refused(other, words):
    with pytest.raises(ConfigError, match=words):
        StepSampler(30, global_batch_size=8, settings=Settings(replica="r0", replicas="2"), sampler=other)


# --- a sampler that is made before the session ----------------------------------------------------------


def test_a_sampler_that_is_made_first_follows_the_session_that_is_attached_later():
    chosen = Settings(replica="r1", replicas="2")
    sampler = StepSampler(48, global_batch_size=16, seed=3, settings=chosen)
    loader = torch.utils.data.DataLoader(range(48), sampler.per_step, sampler=sampler)
    assert len(loader) == 3
    with pytest.raises(FabricError, match=r"has no session yet: give it to attach\(..., sampler=\)"):
        next(iter(loader))
    sampler.check(chosen)
    sampler.bind(lambda: 4)
    assert next(iter(loader)).tolist() == sampler.indices(4)
    assert sampler.indices(4) == step_sampler(48, 16, 3, (1, 2), lambda: 4).indices(4)


@pytest.mark.parametrize("other", [{"replica": "r0"}, {"replicas": "4"}, {"disable": True}])
def test_a_sampler_that_was_made_for_another_replica_is_refused_at_attach(other):
    chosen = {"replica": "r1", "replicas": "2"}
    sampler = StepSampler(48, global_batch_size=16, settings=Settings(**chosen))
    with pytest.raises(ConfigError, match=r"draws part 1 of 2, and this replica has part \d of \d: set"):
        sampler.check(Settings(**{**chosen, **other}))


def test_attach_binds_the_sampler_that_was_made_before(monkeypatch):
    monkeypatch.setenv("FABRIC_DISABLE", "1")
    sampler = StepSampler(12, global_batch_size=4, seed=1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(range(12), sampler.per_step, sampler=sampler)
    session = fabric.client.attach(model, optimizer, sampler=sampler)
    drawn = []
    for batch in loader:
        model(torch.ones(1, 2)).sum().backward()
        session.exchange(weight=4)
        drawn += batch.tolist()
    assert sorted(drawn) == list(range(12)) and session.committed_step == 3


# --- dicts and generators in the shared state -------------------------------------------------------------


def test_dicts_and_generators_are_shared_state_and_stay_the_same_objects():
    generator, progress = torch.Generator().manual_seed(5), {"epoch": 3, "best": {"loss": 0.5}}
    objects = shared_objects({"progress": progress, "generator": generator})
    file = file_of(StateDescriber(objects).capture(7))
    expected = torch.rand(4, generator=generator)
    progress |= {"epoch": 9, "best": None}
    assert restore(memoryview(file), objects) == 7
    assert progress == {"epoch": 3, "best": {"loss": 0.5}}
    assert torch.equal(torch.rand(4, generator=generator), expected)


def test_a_dict_keeps_its_order_in_a_replica_that_joins():
    """A loop may go over the values of an average beside the parameters."""

    def averages(**more):
        averaged = {"weight": torch.ones(2), "bias": torch.zeros(2)} | more
        return {"named": averaged, "order": OrderedDict.fromkeys(["z", "a"], 1), "inner": [dict(averaged)]}

    trained, joining = averages(zero=1, added=2), averages()
    joining["order"].move_to_end("z")
    file = file_of(StateDescriber(shared_objects({"averages": trained})).capture(7))
    restore(memoryview(file), shared_objects({"averages": joining}))
    assert list(joining["named"]) == list(joining["inner"][0]) == ["weight", "bias", "added", "zero"]
    assert list(joining["order"]) == ["z", "a"]


def test_a_dict_that_refuses_its_state_is_as_it_was():
    progress = {"epoch": 3}
    file = file_of(StateDescriber(shared_objects({"progress": {"step": 1}})).capture(7))
    with pytest.raises(StateError, match="progress has the entry 'epoch' here and the snapshot has not"):
        restore(memoryview(file), shared_objects({"progress": progress}))
    assert progress == {"epoch": 3}


def test_what_has_no_state_is_refused_with_what_may_be_given():
    with pytest.raises(ConfigError, match=r"is a int without state_dict and load_state_dict: give an object"):
        shared_objects({"epoch": 3})


def shared_objects(state):
    model = torch.nn.Linear(1, 1)
    objects = shared_state(model, {}, state, choose_buffers(model, "refuse"))
    return {name: value for name, value in objects.items() if name != "model"}


def file_of(view):
    return bytearray(view.header + b"".join(bytes(host_bytes(tensor)) for _, tensor in view.tensors))


# --- buffers and the learning rate ----------------------------------------------------------------------


def normed():
    model = torch.nn.BatchNorm1d(2, momentum=0.5)
    averaged = ForwardBuffers(model, choose_buffers(model, "average"))
    averaged.begin()
    return model, averaged


def reduce(members):
    """Do the exchange's and scatter's work on the stand-ins."""
    total = sum(weight for _, _, weight in members)
    for i in range(3):
        mean = (
            sum(a.stand_ins[i][1].grad for _, a, _ in members if a.stand_ins[i][1].grad is not None) / total
        )
        for _, averaged, _ in members:
            averaged.stand_ins[i][1].grad = mean.clone()
    for _, averaged, _ in members:
        averaged.commit(total)


def test_the_state_at_a_step_has_the_buffers_as_they_were_when_it_began():
    model, averaged = normed()
    describer = StateDescriber({"model": model}, averaged.standing)
    before = describer.capture(3)
    copies = {name: tensor.clone() for name, tensor in before.tensors}
    model(torch.randn(4, 2))
    assert any(not torch.equal(tensor, copies[f"model/{name}"]) for name, tensor in model.named_buffers())
    for view in (before, describer.capture(3)):
        assert view.header == before.header
        assert {name for name, tensor in view.tensors if torch.equal(tensor, copies[name])} == set(copies)
    averaged.contribute(1.0)
    averaged.commit(1.0)
    now = dict(describer.capture(4).tensors)
    assert all(torch.equal(now[f"model/{name}"], tensor) for name, tensor in model.named_buffers())


def test_buffers_become_the_average_by_weight_and_counts_the_sum():
    members = [(*normed(), weight) for weight in (2.0, 6.0, 0.0)]
    for n, (model, averaged, weight) in enumerate(members):
        for _ in range(n + 1 if weight else 0):
            model(torch.full((4, 2), float(n + 1)) + torch.randn(4, 2) * 0)
        if weight:
            averaged.contribute(weight)
    alone = [m.running_mean.clone() for m, _, _ in members]
    reduce(members)
    expected = (2 * alone[0] + 6 * alone[1]) / 8
    for model, _, _ in members:
        assert torch.allclose(model.running_mean, expected)
        assert model.num_batches_tracked.item() == 3


def test_a_dropped_gradient_takes_its_forward_passes_with_it():
    model, averaged = normed()
    before = {name: b.clone() for name, b in model.named_buffers()}
    model(torch.randn(4, 2))
    averaged.contribute(4.0)
    averaged.drop()
    assert all(torch.equal(b, before[name]) for name, b in model.named_buffers())
    model(torch.randn(4, 2))
    averaged.contribute(3.0)
    assert torch.equal(averaged.stand_ins[0][1].grad, model.running_mean * 3.0)


def test_the_learning_rate_is_scaled_for_one_step_and_taken_back_exactly():
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=0.3)
    factor = PresenceFactor([optimizer])
    for counted, expected in ((9, -0.15), (36, -0.45)):
        parameter.grad = torch.ones(1)
        factor.present(counted, 36)
        optimizer.step()
        assert parameter.item() == pytest.approx(expected)
        assert optimizer.param_groups[0]["lr"] == 0.3


def test_scale_lr_does_not_miss_the_micro_batches_without_a_sample():
    """A pass of 16 samples ends with a step of 4: micro-batches 2 to 5 of it are empty."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    options = parse_options({"policy": "shrink", "scale_lr": True, "epoch_end": "short"})
    data = StepData({"optimizer": optimizer})
    data.enter(
        make_loader(list(range(16)), (12, 2, 0), list, 0, options, Settings(replica="r0", replicas="3")),
        4,
        None,
    )
    for step, counted, factor in (
        (0, range(6), 1.0),
        (0, [0, 1, 2], 0.5**0.5),
        (1, [0, 1], 1.0),
        (1, [0], 0.5**0.5),
    ):
        data.present(step, counted)
        weight.grad = torch.ones(1)
        before = weight.item()
        optimizer.step()
        assert before - weight.item() == pytest.approx(factor)
