"""The leader with replicas of several ranks: the lanes that servers hold, and a rank that is gone or
stopped.
"""

from protocol.makers import member_of, session_of
from protocol.test_lanes import LINEAR, sharded, single
from protocol.test_leader import Lighthouse

from fabric.model import RankAddress, SnapshotRef
from fabric.protocol.leader.liveness import LastStatus, Liveness, LivenessConfig, ServerStatuses, lanes
from fabric.protocol.messages import leader_events as io
from fabric.protocol.messages import network as m
from fabric.protocol.rules.layout_text import layout_text

OLD, NEW = SnapshotRef(1, 5, "old"), SnapshotRef(1, 9, "new")


def addresses(name):
    return (RankAddress(f"{name}:2", f"http://{name}/1#1"),)


def status(lighthouse, name, rank, *snapshots, trainer="running", incarnation=1, parts=()):
    url = f"http://{name}/{rank}#{rank}" if rank else f"http://{name}"
    beat = m.TrainerStatus(name, incarnation, trainer, 1, url, tuple(snapshots), rank=rank, parts=parts)
    return lighthouse.do(io.TrainerStatusSeen(beat))


def started():
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.open("a", ranks=addresses("a"))
    lighthouse.open("b", ranks=addresses("b"))
    assert [x.ranks for x in lighthouse.records[-1].roster] == [addresses("a"), addresses("b")]
    return lighthouse


def test_lanes_are_counted_without_a_gap():
    assert lanes(set()) == 0
    assert lanes({"http://a"}) == 1
    assert lanes({"http://a", "http://b#1"}) == 2
    assert lanes({"http://a#1"}) == 0
    assert lanes({"http://a", "http://b#2"}) == 1


def test_a_cold_start_begins_at_the_newest_state_of_which_every_lane_has_a_holder():
    lighthouse = Lighthouse(start_replicas=2)
    # Servers hold only one lane of the newest snapshot, but every lane of the older snapshot.
    status(lighthouse, "a", 0, OLD, NEW)
    status(lighthouse, "b", 1, OLD)
    lighthouse.open("a", ranks=addresses("a"))
    lighthouse.open("b", ranks=addresses("b"))
    base = lighthouse.records[-1].base
    assert (base.step, base.digest) == (5, "old")
    assert base.sources == ("http://a", "http://b/1#1")


def test_the_freshest_state_is_the_newest_with_a_living_holder_of_each_lane():
    liveness = Liveness(LivenessConfig(), 0.0)
    liveness.servers.of_rank(0)["a"] = LastStatus(1, "gone", 0.0, 0.0, True, "http://a", (OLD, NEW))
    other = liveness.servers.of_rank(1)["b"] = LastStatus(1, "running", 0.0, 0.0, True, "http://b#1", (OLD,))
    assert liveness.servers.freshest(2) == OLD
    assert liveness.servers.freshest(1) == NEW
    other.snapshots = (OLD, NEW)
    assert liveness.servers.freshest(2) == NEW
    other.connected = False
    assert liveness.servers.freshest(2) is None


def test_a_state_of_another_number_of_ranks_is_whole_when_all_of_its_own_lanes_are_there():
    """Two replicas of one rank replace two replicas of three ranks; of the newest state a lane is lost."""
    lighthouse = Lighthouse(start_replicas=2)
    status(lighthouse, "a", 0, OLD, NEW, parts=(3, 3))
    status(lighthouse, "a", 1, OLD, NEW, parts=(3, 3))
    status(lighthouse, "b", 2, OLD, parts=(3,))
    for name in "ab":
        lighthouse.open(name, incarnation=2, predecessors=(1,))
    base = lighthouse.records[-1].base
    assert (base.step, base.sources) == (5, ("http://a", "http://a/1#1", "http://b/2#2"))


def test_layouts_of_one_state_are_whole_each_for_itself():
    """With unequal replicas one state has one name in every layout, with other numbers of parts."""
    servers = ServerStatuses()

    def serve(name, rank, parts):
        url = f"http://{name}#{rank}" if rank else f"http://{name}"
        beat = LastStatus(1, "running", 0.0, 0.0, True, url, (NEW,), parts=(parts,))
        servers.of_rank(rank)[name] = beat

    serve("whole", 0, 1)
    serve("torn", 1, 3)
    serve("torn", 2, 3)
    assert servers.whole(1) == {NEW: {"http://whole", "http://torn#1", "http://torn#2"}}
    del servers.of_rank(0)["whole"]
    serve("half", 0, 2)
    assert servers.whole(2) == {}, "rank 0 of two ranks and ranks 1 and 2 of three make no state"
    serve("torn", 0, 3)
    assert set(servers.whole(2)) == {NEW}


def test_a_state_is_as_old_as_its_oldest_holder_says():
    liveness = Liveness(LivenessConfig(), 0.0)
    assert liveness.servers.age_s(NEW, 100.0) is None
    liveness.servers.of_rank(0)["a"] = LastStatus(
        1, "gone", 0.0, 0.0, True, "http://a", (OLD, NEW), (), (50.0, 90.0)
    )
    other = liveness.servers.of_rank(1)["b"] = LastStatus(
        1, "running", 0.0, 0.0, True, "http://b#1", (NEW,), (), (88.0,)
    )
    liveness.servers.of_rank(0)["c"] = LastStatus(
        1, "running", 0.0, 0.0, True, "http://c", (NEW,)
    )  # the session of an older release
    assert (liveness.servers.age_s(OLD, 100.0), liveness.servers.age_s(NEW, 100.0)) == (50.0, 12.0)
    other.connected = False
    assert liveness.servers.age_s(NEW, 100.0) == 10.0


def test_a_rank_that_is_gone_takes_its_replica_out():
    lighthouse = started()
    status(lighthouse, "b", 0)
    status(lighthouse, "b", 1)
    status(lighthouse, "b", 1, trainer="gone")
    lighthouse.wait(1.0)
    record = lighthouse.records[-1]
    assert record.names == ("a",) and "the process of its rank 1 is gone" in record.reason


def test_a_stopped_rank_is_waited_for_shortly():
    lighthouse = started()
    status(lighthouse, "b", 0)
    status(lighthouse, "b", 1, trainer="stopped")
    assert lighthouse.records[-1].names == ("a", "b")
    lighthouse.wait(0.3)
    assert lighthouse.records[-1].names == ("a",)


def test_the_end_of_a_rank_does_not_prove_the_end_of_rank_0():
    liveness = Liveness(LivenessConfig(), 0.0)
    member = member_of("a", ranks=addresses("a"))
    liveness.servers.hear(m.TrainerStatus("a", 1, "gone", 1, "http://a/1", rank=1), {1}, 0.0)
    assert "rank 1" in liveness.rank_trouble(member, 0.0)
    assert not liveness.proven_dead(member)


def test_another_number_of_ranks_is_refused_by_name():
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.open("a", ranks=addresses("a"))
    effects = lighthouse.do(io.SessionOpened(session_of("b")))
    (refused,) = [e.message for e in effects if isinstance(getattr(e, "message", None), m.Rejected)]
    assert "b has other ranks (1 and not 2) than a" in refused.reason


def test_another_number_of_ranks_may_join_where_all_say_that_layouts_may_be_unequal():
    lighthouse = Lighthouse(start_replicas=2)
    two, one = layout_text(sharded(LINEAR, 2)), layout_text(single(LINEAR))
    lighthouse.open("a", ranks=addresses("a"), cuts=two)
    lighthouse.open("b", cuts=one)
    roster = lighthouse.records[-1].roster
    assert [(x.replica, x.cuts, len(x.ranks)) for x in roster] == [("a", two, 1), ("b", one, 0)]


def test_layouts_of_two_models_are_refused_with_what_differs():
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.open("a", cuts=layout_text(single({"w": (4,)})))
    effects = lighthouse.do(io.SessionOpened(session_of("b", cuts=layout_text(single({"w": (5,)})))))
    (refused,) = [e.message for e in effects if isinstance(getattr(e, "message", None), m.Rejected)]
    assert (
        "b has other parts of the parameters than a (w is float32[5] in b and float32[4] in a"
        in refused.reason
    )


def test_a_replica_that_does_not_allow_unequal_layouts_is_refused_with_the_name_of_the_setting():
    lighthouse = Lighthouse(start_replicas=2)
    lighthouse.open("a", cuts="x")
    effects = lighthouse.do(io.SessionOpened(session_of("b")))
    (refused,) = [e.message for e in effects if isinstance(getattr(e, "message", None), m.Rejected)]
    assert "b has other settings (FABRIC_UNEQUAL is not the same) than a" in refused.reason


def test_a_rank_whose_server_was_started_again_elsewhere_is_served_from_there():
    liveness = Liveness(LivenessConfig(), 0.0)
    member = member_of("a", ranks=addresses("a"))
    liveness.servers.of_rank(1)["a"] = LastStatus(1, "running", 0.0, 0.0, True, "http://new#1")
    assert liveness.servers.urls_of(member) == ["http://a", "http://new#1"]
