"""A failure has one incident id for members, for every leader, and in the epoch that answers it."""

from protocol.makers import record_of
from protocol.test_leader import Lighthouse, runs, started

from fabric.model import incident_id_of
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m


def test_a_death_has_one_id_from_the_first_sign_to_the_decision():
    lighthouse = started("a b c")
    lighthouse.status("b", "gone")
    [seen], [condemned] = lighthouse.told("trainer gone"), lighthouse.told("evicting")
    lighthouse.wait(0.05)
    assert lighthouse.record.epoch == 2 and lighthouse.record.incident_id == "e2"
    assert (
        {seen.incident_id, condemned.incident_id}
        == {"e2"}
        == {e.incident_id for e in lighthouse.told("epoch")}
    )
    runs(lighthouse, "a c", 5)
    lighthouse.say("a", m.Aborted(lighthouse.record.fence, 5, "the ring broke", "c"))
    assert [e.incident_id for e in lighthouse.told("aborted")] == ["e3"], "what comes next is another failure"


def test_a_return_belongs_to_the_loss_it_ends():
    lighthouse = started("a b c")
    lighthouse.status("b", "gone")
    lighthouse.wait(0.05)
    runs(lighthouse, "a c", 5)
    lighthouse.open("b", incarnation=2, generation=1, step=5, epoch=2)
    assert [e.incident_id for e in lighthouse.told("session opened")] == ["e2"]
    lighthouse.status("b", incarnation=2)
    lighthouse.beat("b", 5)
    lighthouse.wait(1.0)
    assert (lighthouse.record.epoch, lighthouse.record.names) == (3, ("a", "c", "b"))
    assert lighthouse.record.incident_id == "e2"
    lighthouse.open("d", generation=1, step=5, epoch=3)
    assert [e.incident_id for e in lighthouse.told("session opened")] == [""], "nothing happened to d"


def test_the_next_leader_names_an_unanswered_failure_alike():
    record = record_of("a b c", epoch=7)
    causes = []
    for commits in (False, True):  # the first leader's write never reaches the store
        lighthouse = Lighthouse(record, commits=commits)
        for name in ("a", "b", "c"):
            lighthouse.open(name, generation=1, step=5, epoch=7)
        lighthouse.status("b", "gone")
        causes += [e.incident_id for e in lighthouse.told("evicting")]
        lighthouse.wait(0.05)
    assert (
        causes == ["e8", "e8"]
        and lighthouse.record.incident_id == incident_id_of(lighthouse.record.epoch) == "e8"
    )


def test_a_first_start_and_a_drain_have_ids_of_their_own():
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.open("a", "b")
    assert lighthouse.record.incident_id == "e1"
    lighthouse = started("a b")
    lighthouse.do(io.Operator("drain", "b", "me", "its host is hot"))
    lighthouse.beat("a", 5)
    assert (lighthouse.record.epoch, lighthouse.record.incident_id) == (2, "e2")


def test_a_trainer_that_ends_with_the_job_is_not_an_incident():
    lighthouse = started()
    for name in ("a", "b"):
        lighthouse.say(name, m.Finished(lighthouse.record.fence, 9))
    assert lighthouse.record.complete
    lighthouse.status("a", "gone")
    assert [e.incident_id for e in lighthouse.told("trainer gone")] == [""], "no epoch answers it"
