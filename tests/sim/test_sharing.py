"""Policy ``shrink``, data that only some replicas can read, and poison: the record explains all omitted
micro-batches, and no third process gets a poison micro-batch.
"""

import pytest
from sim.noticing import find
from sim.sharing import NewReaderWorld, RackWorld, SharingWorld

from fabric.model import Member, Sharing
from fabric.protocol.leader import record_writer, starts
from fabric.protocol.member import rounds
from fabric.protocol.rules import assignment, decide
from fabric.protocol.rules.assignment import cut, readers_of

SHRINK = Sharing("shrink")
PART = 3  # ``make test`` plays every third of the seeds of ``--hunt``


@pytest.fixture
def seeds_of(request):
    """Return the seeds to play of so many."""
    step = 1 if request.config.getoption("--hunt") else PART
    return lambda number: range(0, number, step)


def play(seed, sharing, **options):
    world = SharingWorld(seed, sharing, **options)
    try:
        world.run()
    except Exception as error:
        raise AssertionError(f"seed {seed} of {sharing}: {type(error).__name__}: {error}") from error
    return world


def test_under_shrink_without_faults_no_micro_batch_is_left_out(seeds_of):
    for seed in seeds_of(15):
        world = play(seed, SHRINK, faultless=True)
        late = {place for place in world.checks.skipped if place[0] > 0}
        assert not late or world.clockwork.counts["path: join"], seed


def test_shrink_leaves_out_the_share_of_the_absent_alone(seeds_of):
    left_out = sum(len(play(seed, SHRINK).checks.skipped) for seed in seeds_of(60))
    assert left_out > 25 // PART, "nobody was ever absent"


@pytest.mark.parametrize("readers", [1, 2])
def test_data_that_some_can_read_are_computed_while_one_of_them_is_there(readers, seeds_of):
    sharing = Sharing(readers=readers, on_loss="shrink")
    left_out = sum(len(play(seed, sharing).checks.skipped) for seed in seeds_of(40))
    assert left_out > (15 // PART if readers == 1 else 0)


@pytest.mark.parametrize("policy", ["constant", "shrink"])
def test_a_micro_batch_that_killed_two_is_skipped_and_never_given_to_a_third(policy, seeds_of):
    killed = 0
    for seed in seeds_of(30):
        world = play(seed, Sharing(policy, on_poison="skip"), faultless=True, poisons=2)
        world.never_a_third()
        killed += len(world.victims)
        for place, who in world.victims.items():
            # With policy ``shrink`` the job skips a dead member's part of this step. A cold start may also
            # have taken the job back before this step.
            assert len(who) == 2 or policy == "shrink" or place[0] >= world.until, (seed, place, who)
    assert killed > 30 // PART


def test_poison_among_other_faults_breaks_no_invariant(seeds_of):
    for seed in seeds_of(50):
        play(seed, Sharing(on_poison="skip"), poisons=1)


def test_poison_stops_the_job_which_names_it(seeds_of):
    for seed in seeds_of(20):
        world = play(seed, Sharing(), faultless=True, poisons=1)
        world.never_a_third()
        ((place, _),) = world.victims.items()
        failed = world.store.record.failed
        assert all(why.startswith(failed) for why in world.gave_up.values()), seed
        assert f"micro-batch {place[1]} of step {place[0]}" in world.store.record.failed
        # The launcher started the dead replicas again, and the leader refused them too.
        assert {name.split(".")[0] for name in world.gave_up} == set(world.hosts)


@pytest.mark.parametrize("readers", [1, 2, 3])
def test_a_job_waits_for_a_member_that_can_read_lost_data_and_leaves_nothing_out(readers, seeds_of):
    waited = 0
    # With three readers of each part one is nearly always there: 64 and 121 are worlds in which none is.
    for seed in (*seeds_of(30), *((64, 121) if readers == 3 else ())):
        world = play(seed, Sharing(readers=readers))
        assert not world.checks.skipped
        waited += world.clockwork.counts["path: waits for data"]
    assert waited > (15 // PART if readers == 1 else 0)


def go_on_without_a_part(patch):
    patch.setattr(rounds, "waits_for_data", lambda sharing, roster: False)


def compute_a_part_on_each_host_that_is_there(patch):
    by_seat = assignment._by_data_slot

    def twice(work, roster, able, wanted):
        given = by_seat(work, roster, able, wanted)
        lost = [n for n in range(work.sharing.data_slots) if n not in {m.data_slot for m in able}]
        for part in lost:
            for member in able:
                if member.data_slot in readers_of(part, work.sharing):
                    ids = cut(work.micro_batches, [1] * work.sharing.data_slots)[part]
                    given[member.replica] += tuple(i for i in ids if i in wanted)
        return {name: tuple(dict.fromkeys(ids)) for name, ids in given.items()}

    patch.setattr(assignment, "_by_data_slot", twice)


def give_the_patch_by_the_layout_of_the_epoch_before(patch):
    """Bug: a dead member's share is divided by the old roster, so a part goes to dead members."""
    hand_round = assignment.hand_round

    def stale(work, roster, able, missing, load):
        everybody = tuple(Member(f"r{n}", 0, "", "", data_slot=n) for n in range(work.sharing.data_slots))
        given = hand_round(work, everybody, everybody, missing, load)
        return {m.replica: given.get(m.replica, ()) for m in able}

    patch.setattr(decide, "hand_round", stale)


@pytest.mark.parametrize(
    ("mutate", "readers"),
    [
        (go_on_without_a_part, 1),
        (compute_a_part_on_each_host_that_is_there, 3),
        (give_the_patch_by_the_layout_of_the_epoch_before, 3),
    ],
)
def test_a_deliberate_bug_in_redundancy_is_noticed(mutate, readers):
    find(mutate, SharingWorld, range(40), sharing=Sharing(readers=readers))


def test_the_only_reader_of_a_part_has_a_share_in_its_first_round():
    """The leader admits it by a forced epoch, as the first round of a planned one has no share for it."""

    def plan_every_admission(patch):
        patch.setattr(record_writer, "lost_parts", lambda *_: [])

    find(plan_every_admission, SharingWorld, range(20), sharing=Sharing(readers=1, on_loss="shrink"))


def test_a_job_set_to_stop_at_lost_data_stops_or_leaves_no_micro_batch_out(seeds_of):
    stopped = 0
    for seed in seeds_of(20):
        world = SharingWorld(seed, Sharing(readers=1, on_loss="stop"), faultless=True)
        world.clockwork.at(3.0, lambda world=world: world.kill_trainer("r0", 0.3))
        world.stops_at_a_loss = True
        world.run()
        assert "no member can read shard" in world.store.record.failed, seed
        stopped += 1
    assert stopped


def test_the_death_of_a_rack_loses_no_shard(seeds_of):
    died = 0
    for seed in seeds_of(12):
        world = RackWorld(seed)
        world.run()
        died += world.clockwork.counts["a rack died"]
    assert died > 30 // PART


def choose_data_slots_without_the_racks(patch):
    seated = assignment.seated
    patch.setattr(starts, "seated", lambda roster, remembered, sharing: seated(roster, remembered))


def test_a_leader_that_ignores_racks_is_noticed():
    find(choose_data_slots_without_the_racks, RackWorld, range(10))


@pytest.mark.parametrize("on_loss", ["wait", "shrink", "stop"])
def test_a_newcomer_that_alone_can_read_a_part_computes_it(on_loss, seeds_of):
    struck = 0
    for seed in seeds_of(20):
        world = NewReaderWorld(seed, on_loss)
        world.run()
        struck += world.struck
    assert struck > 10 // PART


def leave_out_a_reader_that_is_still_behind(patch):
    patch.setattr(assignment, "widened", lambda sharing, roster, able: able)
    patch.setattr(decide, "widened", lambda sharing, roster, able: able)


@pytest.mark.parametrize("on_loss", ["wait", "shrink", "stop"])
def test_a_leader_that_leaves_out_a_reader_that_is_still_behind_is_noticed(on_loss):
    find(leave_out_a_reader_that_is_still_behind, NewReaderWorld, range(20), on_loss=on_loss)
