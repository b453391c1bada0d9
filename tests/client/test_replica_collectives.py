"""Collectives between replicas over real links, with real threads: results, failures, repeated calls."""

import threading
from types import SimpleNamespace

import pytest
import torch
from client.collective_party import Parties
from msgspec.structs import replace
from protocol.makers import record_of
from protocol.test_member import holding

from fabric.client.collectives.calls import CallFrame, Offer, Supply, judge
from fabric.client.collectives.collectives import CollectiveMembers
from fabric.errors import CollectiveFailed, ConfigError, Mismatch, NotAMember, RoundAborted
from fabric.model import Record
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.messages.member_events import PreparedRound

NAMES = "a b c"


@pytest.fixture(params=[True, False], ids=["shared memory", "tcp"])
def three(request):
    """Three members after the commit of step 4 in epoch 1."""
    with Parties(*NAMES.split(), shared_memory=request.param) as parties:
        parties.announce(NAMES, 1)
        for party in parties:
            party.commit(4)
        yield parties


def everywhere(parties, names, method, argument, **options):
    """Call one collective on these members at once; return the results by member."""
    futures = {
        name: parties[name].later(getattr(parties[name], method), argument(name), **options)
        for name in names.split()
    }
    return {name: future.result(60) for name, future in futures.items()}


def values(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(ord(name))
    return torch.randn(7, 11, generator=generator)


def test_all_members_get_the_same_bits(three):
    results = everywhere(three, NAMES, "all_reduce", values)
    assert torch.allclose(results["a"], sum(values(x) for x in NAMES.split()))
    assert torch.equal(results["a"], results["b"]) and torch.equal(results["a"], results["c"])
    means = everywhere(three, NAMES, "all_reduce", values, op="mean")
    assert torch.allclose(means["b"], results["b"] / 3) and torch.equal(means["b"], means["c"])
    highest = everywhere(three, NAMES, "all_reduce", values, op="max")
    assert torch.equal(highest["c"], torch.stack([values(x) for x in NAMES.split()]).amax(0))


def test_bytes_of_any_type_arrive_unchanged(three):
    def odd(name):
        return torch.tensor([float("nan"), -0.0, ord(name)], dtype=torch.float16)

    sent = everywhere(three, NAMES, "broadcast", odd, source="b")
    assert all(torch.equal(x.view(torch.int16), odd("b").view(torch.int16)) for x in sent.values())
    flags = everywhere(three, NAMES, "all_gather", lambda name: torch.tensor([name == "b", True, False]))
    for gathered in flags.values():
        assert list(gathered) == NAMES.split()
        assert [x.tolist() for x in gathered.values()] == [[y == "b", True, False] for y in "abc"]
    empty = everywhere(three, NAMES, "all_gather", lambda _: torch.empty(0, 3))
    assert all(x.shape == (0, 3) for x in empty["a"].values())
    scalar = everywhere(three, NAMES, "all_reduce", lambda name: torch.tensor(ord(name)))
    assert {x.item() for x in scalar.values()} == {sum(map(ord, "abc"))}


def test_a_barrier_waits_for_the_last_member(three):
    first = [three[x].later(three[x].barrier) for x in "ab"]
    assert not any(x.done() for x in first)
    three["c"].later(three["c"].barrier).result(60)
    assert [x.result(60) for x in first] == [None, None]


@pytest.mark.parametrize(
    ("method", "one", "other", "words"),
    [
        ("all_reduce", torch.zeros(3), torch.zeros(4), "all_reduce (sum) of float32 [3] on a and "),
        ("all_reduce", torch.zeros(3), torch.zeros(3).double(), "float64 [3] on c"),
        ("broadcast", torch.zeros(2), torch.zeros(3), "broadcast of float32 [3] on c"),
    ],
)
def test_unequal_calls_are_one_sentence_on_all_members(three, method, one, other, words):
    arguments = {"a": one, "b": one, "c": other}
    futures = [three[x].later(getattr(three[x], method), arguments[x]) for x in "abc"]
    sentences = []
    for future in futures:
        with pytest.raises(Mismatch) as refused:
            future.result(60)
        sentences.append(str(refused.value))
    assert len(set(sentences)) == 1 and words in sentences[0]
    assert "on a and " in sentences[0] and "on c" in sentences[0]
    again = everywhere(three, NAMES, "all_reduce", values)  # no link was harmed
    assert torch.equal(again["a"], again["c"])


def test_unequal_operations_and_kinds_are_named(three):
    futures = [
        three["a"].later(three["a"].all_reduce, torch.zeros(2), "max"),
        three["b"].later(three["b"].all_reduce, torch.zeros(2), "max"),
        three["c"].later(three["c"].barrier),
    ]
    for future in futures:
        with pytest.raises(Mismatch, match=r"is all_reduce \(max\) of float32 \[2\] on a and barrier on c"):
            future.result(60)


def test_a_late_member_ends_the_call_of_the_others_and_the_repeated_call_succeeds(three):
    words = r"collective 0 at step 5.* timed out: b, c did not call it in time.*repeat the call"
    for _ in range(2):  # a repeated call is the same collective
        with pytest.raises(CollectiveFailed, match=words):
            three["a"].later(three["a"].all_reduce, values("a"), timeout_s=0.2).result(60)
    results = everywhere(three, NAMES, "all_reduce", values)
    assert torch.equal(results["a"], results["b"])


def test_a_member_that_gives_up_does_not_end_the_wait_of_the_others(three):
    patient = three["b"].later(three["b"].all_reduce, values("b"))
    with pytest.raises(CollectiveFailed):
        three["a"].later(three["a"].all_reduce, values("a"), timeout_s=0.2).result(60)
    others = [three[x].later(three[x].all_reduce, values(x)) for x in "ac"]
    assert torch.equal(patient.result(60), others[0].result(60))


def test_a_death_ends_the_call_when_its_epoch_begins(three):
    everywhere(three, NAMES, "all_reduce", values)
    waiting = [three[x].collectives.start("all_reduce", values(x), "sum", 60.0) for x in "ab"]
    three["c"].die()
    three.announce("a b", 2, forced=2)
    for future in waiting:
        with pytest.raises(CollectiveFailed, match=r"c left the job \(epoch 2\); repeat the call"):
            future.result(60)
    results = everywhere(three, "a b", "all_reduce", values)
    assert torch.equal(results["a"], values("a") + values("b")) and torch.equal(results["a"], results["b"])


def test_calls_behind_a_failed_one_fail_too(three):
    calls = three["a"].collectives
    first = calls.start("all_reduce", values("a"), "sum", 0.2)
    second = calls.start("all_reduce", values("a"), "sum", 60.0)
    with pytest.raises(CollectiveFailed, match="timed out"):
        first.result(60)
    with pytest.raises(CollectiveFailed, match="was not tried, the one before it failed"):
        second.result(60)


def test_a_member_that_lost_its_result_gets_the_kept_one_from_idle_members(three, monkeypatch):
    lost = lose_next_result(three["b"], monkeypatch)
    futures = {x: three[x].later(three[x].all_reduce, values(x)) for x in "abc"}
    kept = futures["a"].result(60), futures["c"].result(60)
    lost.set()
    with pytest.raises(CollectiveFailed, match="its end of the ring closed; repeat the call"):
        futures["b"].result(60)
    result = three["b"].later(three["b"].all_reduce, values("b")).result(60)
    assert torch.equal(result, kept[0]) and torch.equal(result, kept[1])
    later = everywhere(three, NAMES, "all_gather", values)
    assert torch.equal(later["b"]["c"], values("c"))


def test_a_member_that_lost_its_result_gets_it_before_the_next_call_of_the_others(three, monkeypatch):
    lost = lose_next_result(three["b"], monkeypatch)
    futures = {x: three[x].later(three[x].all_reduce, values(x)) for x in "abc"}
    kept = futures["a"].result(60), futures["c"].result(60)
    following = {x: three[x].later(three[x].all_gather, values(x)) for x in "ac"}
    lost.set()
    with pytest.raises(CollectiveFailed):
        futures["b"].result(60)
    result = three["b"].later(three["b"].all_reduce, values("b")).result(60)
    assert torch.equal(result, kept[0])
    gathered = three["b"].later(three["b"].all_gather, values("b")).result(60)
    assert all(torch.equal(x.result(60)["b"], gathered["b"]) for x in following.values())


def test_a_survivor_gets_the_result_that_the_other_survivor_has(three, monkeypatch):
    """A member dies in the last moment of a collective: the result is that of all three."""
    lost = lose_next_result(three["b"], monkeypatch)
    futures = {x: three[x].later(three[x].all_reduce, values(x)) for x in "abc"}
    kept = futures["a"].result(60), futures["c"].result(60)
    three["c"].die()
    lost.set()
    three.announce("a b", 2, forced=2)
    with pytest.raises(CollectiveFailed):
        futures["b"].result(60)
    assert torch.equal(three["b"].later(three["b"].all_reduce, values("b")).result(60), kept[0])


def test_a_result_of_the_generation_before_is_not_kept_for_the_same_step(three):
    """After a cold start from an earlier state a step comes again, with other values."""
    everywhere(three, NAMES, "all_reduce", values)
    for name in NAMES.split():
        record = replace(three.record(NAMES, 2, forced=2), generation=2, cold=2)
        three[name].announce(record)
    three["b"].commit(4)
    three["b"].collectives._place = (-1, -1)  # its next collective is the first one of this step
    with pytest.raises(CollectiveFailed, match="timed out"):
        three["b"].later(three["b"].all_reduce, values("b"), timeout_s=0.5).result(60)


def lose_next_result(party, monkeypatch) -> threading.Event:
    """Let the next result of one member get lost, once the event is set."""
    exchanged, lost, losing = Offer.exchanged, threading.Event(), [party.name]

    def lose(offer, ring):
        result = exchanged(offer, ring)
        if ring.group.replica in losing:
            losing.clear()
            lost.wait(60)
            raise RoundAborted("the ring link to c was lost: its end of the ring closed")
        return result

    monkeypatch.setattr(Offer, "exchanged", lose)
    return lost


def test_a_newcomer_takes_part_after_its_first_commit_only():
    with Parties(*NAMES.split()) as parties:
        parties.announce("a b", 1)
        parties.announce(NAMES, 2, joining="c")
        for name in "ab":
            parties[name].compute(5)
        early = everywhere(parties, "a b", "all_reduce", values)
        assert torch.equal(early["a"], values("a") + values("b"))
        for party in parties:
            party.commit(5)
        late = everywhere(parties, NAMES, "all_gather", values)
        assert list(late["c"]) == NAMES.split()
        for party in parties:
            party.compute(6)
        assert list(everywhere(parties, NAMES, "all_gather", values)["a"]) == NAMES.split()


def test_a_planned_epoch_does_not_disturb_the_members_of_the_committed_round():
    with Parties(*NAMES.split()) as parties:
        parties.announce("a b", 1)
        for name in "ab":
            parties[name].commit(4)
        waiting = parties["a"].later(parties["a"].all_reduce, values("a"))
        parties.announce(NAMES, 2, joining="c")
        other = parties["b"].later(parties["b"].all_reduce, values("b"))
        assert torch.equal(waiting.result(60), other.result(60))


def test_no_member_and_no_tensor_are_refused_with_a_sentence(three):
    calls = three["a"]
    with pytest.raises(
        ConfigError, match="an all_reduce of bool is not possible: convert it to one of float32"
    ):
        calls.all_reduce(torch.tensor([True]))
    with pytest.raises(ConfigError, match="op is 'product': choose one of sum, mean, min, max"):
        calls.all_reduce(torch.zeros(1), op="product")
    with pytest.raises(ConfigError, match="timeout_s is 0: give a finite number"):
        calls.barrier(timeout_s=0)
    with pytest.raises(ConfigError, match="needs a dense tensor, not list"):
        calls.all_gather([1.0])
    three["a"].announce(three.record("b c", 2, forced=2))
    with pytest.raises(NotAMember, match="epoch 2 does not list it, go on to the next step"):
        calls.barrier()
    calls.collectives.members.end_step(io.Apply(1, 7, None, contributed=False, digest=False))
    with pytest.raises(
        NotAMember, match=r"it replays step 7, call collectives only where step\.replayed is false"
    ):
        calls.barrier()


def test_before_the_first_step_there_are_no_members():
    with Parties("a") as parties, pytest.raises(NotAMember, match="the first step has not begun"):
        parties["a"].barrier()


def test_the_earliest_collective_that_any_member_calls_goes_first():
    """One member has lost the result that the two others still hold."""
    ahead = CallFrame((5, 0, 1), "barrier", (5, 0, 0), "all_reduce", 12)
    behind = CallFrame((5, 0, 0), "all_reduce")
    assert judge(NAMES.split(), (ahead, behind, ahead)) == Supply(0, 12, (5, 0, 0))


def members_of(newest: Record, current: Record) -> CollectiveMembers:
    return CollectiveMembers(SimpleNamespace(newest=newest, current=current), "a", 1)


def test_a_forced_epoch_takes_a_dead_member_out_of_the_collectives_of_a_step():
    two, alone = record_of("a b", epoch=1), replace(record_of("a", epoch=2), forced=2)
    members = members_of(alone, two)
    members.begin_step(io.Compute(5, (0,)))
    assert members.group(members.phase).names == ("a",)


def test_a_newcomer_is_no_member_of_a_step_before_its_first_commit():
    a, b = record_of("a b").roster
    record = replace(record_of("a b"), roster=(a, replace(b, joining=True)))
    members = members_of(record, record)
    members.note(record)
    members.begin_step(io.Compute(5, (0,)))
    assert [x.replica for x in members.phase.members] == ["a"]
    members.end_step(
        io.Apply(1, 5, PreparedRound(record.epoch, 5, "", 1.0, (), ()), contributed=True, digest=False)
    )
    members.begin_step(io.Compute(6, (0,)))
    assert [x.replica for x in members.phase.members] == ["a", "b"]


def after_a_rack_died(epochs):
    """Return the members of "a" once it has learned of these epochs, and the Apply order of a decision.

    "a" prepared step 0 in epoch 1 and waits for votes. The members of the rack die one by one, each in an
    epoch of its own. The decision of the last epoch commits the prepared round.
    """
    trainer = holding()
    members = CollectiveMembers(trainer.core.epochs, "a", 1)
    members.note(trainer.core.epochs.current)
    trainer.do(io.LinkLost("b", 1, "it died"))
    for epoch in epochs:
        trainer.leader(m.Epoch(record_of("a", epoch=epoch)))
        for effect in trainer.found(io.LinkUp):
            members.note(effect.record)
    last = trainer.core.epochs.newest
    trainer.leader(m.Resume(last.fence, 1, (m.Assignment("a", (0, 1, 2, 3)),), "g0"))
    for effect in trainer.found(io.Switch):
        members.note(effect.record)
    (order,) = trainer.found(io.Apply)
    return members, order


@pytest.mark.parametrize("deaths", [1, 16, 400])
def test_a_prepared_round_is_committed_after_any_number_of_forced_epochs(deaths):
    members, order = after_a_rack_died(range(2, 2 + deaths))
    members.end_step(order)
    assert members.phase.epoch == 1 and [x.replica for x in members.phase.members] == ["a", "b"]


def test_the_epochs_before_a_committed_step_are_forgotten():
    members, order = after_a_rack_died(range(2, 42))
    members.end_step(order)
    assert sorted(members._records) == list(range(1, 42))
    members.end_step(io.Apply(1, 1, PreparedRound(41, 1, "", 1.0, (), ()), contributed=True, digest=False))
    assert sorted(members._records) == [41]


def test_the_epochs_before_a_replayed_step_are_forgotten():
    members, _ = after_a_rack_died(range(2, 42))
    members.end_step(io.Apply(1, 0, None, contributed=False, digest=False))
    assert sorted(members._records) == [41], "the epoch in force"


def test_a_store_that_counts_its_epochs_anew_takes_no_record_away():
    """A decision of the new store commits a step in its epoch 3; the old store had an epoch 3 too."""
    members, order = after_a_rack_died(range(2, 42))
    members.end_step(order)
    for epoch in range(2, 5):
        members.note(replace(record_of("a", epoch=epoch), store_id="another"))
    members.end_step(io.Apply(1, 1, PreparedRound(3, 1, "", 1.0, (), ()), contributed=True, digest=False))
    assert members.phase.members[0].replica == "a" and sorted(members._records) == [3, 4]
