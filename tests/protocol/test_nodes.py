"""The meeting of one replica's hosts, played without processes: hosts die and return; leaders change.

The played launchers obey as ``fabric launch`` does; ``tests/lighthouse/test_node_meeting.py`` has real ones.
"""

import itertools
import random
import sys
from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from fabric.model import Member, RankAddress
from fabric.protocol.leader.evidence import host_of
from fabric.protocol.nodes import BROKEN_S, SPARE, NodeEnd, NodeOrder, NodeSays, ReplicaNodes

TICK_S = 0.25
HELD_S = 10.0
SHAPE = "nodes of 2 ranks"


@dataclass
class Host:
    """One host: its launcher and its ranks."""

    name: str
    number: int
    nodes: int
    says: NodeSays
    runs: bool = True  # the launcher runs
    is_cut: bool = False
    ranks_run: bool = False
    knows: tuple[str, str, str] | None = None
    asked: float | None = None  # when its open request came
    pause: float = 0.0


class World:
    """Some hosts, one lighthouse at a time, and the facts that must hold."""

    def __init__(self, seed: int, nodes: int, spares: int) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.nodes = nodes
        self.ids = itertools.count()
        self.runs = itertools.count()
        self.hosts: list[Host] = []
        self.gone: list[Host] = []  # the lighthouse may still hold a request of theirs
        self.started: dict[tuple[str, int], str] = {}  # (run, node) -> launcher
        self.heads: dict[str, str] = {}
        self.judged: dict[str, NodeEnd] = {}
        self.suspects: set[str] = set()
        for number in range(nodes):
            self.add(f"host-{number}", number)
        for number in range(spares):
            self.add(f"spare-{number}", SPARE)
        self.lead()

    def add(self, name: str, number: int, shape: str = SHAPE, **hardware: object) -> Host:
        launcher = f"{name}.{next(self.ids)}"
        says = NodeSays(launcher, name, number, self.nodes, shape, f"{name}:1", **hardware)
        host = Host(name, number, self.nodes, says)
        self.hosts.append(host)
        return host

    def lead(self) -> None:
        """Let another lighthouse lead, which knows nothing."""
        self.table = ReplicaNodes(lambda: f"run-{next(self.runs)}")
        self.judged = {}
        for host in (*self.hosts, *self.gone):
            host.asked = None

    # --- faults -------------------------------------------------------------------------------------------

    def lose_power(self, host: Host) -> None:
        host.runs = host.ranks_run = False

    def kill_launcher(self, host: Host) -> None:
        self.lose_power(host)
        if host.asked is not None:
            self.table.answered(host.says.id, self.now, broken=True)
            host.asked = None

    def bring_back(self, host: Host) -> None:
        if not host.runs:
            self.hosts.remove(host)
            self.gone.append(host)
            self.add(host.name, host.number)

    def kill_rank(self, host: Host) -> None:
        if host.ranks_run:
            self.end(host, -9)

    def end(self, host: Host, code: int) -> None:
        lowest = host.says.node * 2
        host.ranks_run = False
        end = NodeEnd({lowest: code, lowest + 1: 75 if code else 0}, (lowest,) if code else (), 3.0)
        self.say(host, replace(host.says, end=end))

    # --- what happens by itself ---------------------------------------------------------------------------

    def say(self, host: Host, says: NodeSays) -> None:
        host.says, host.knows = says, None
        if host.asked is not None:
            self.table.answered(host.says.id, self.now, broken=True)
            host.asked = None

    def tick(self) -> None:
        self.now += TICK_S
        self.table.sweep(self.now)
        for host in (*self.random.sample(self.hosts, len(self.hosts)), *self.gone):
            self.live(host)
        for host in self.hosts:
            if host.ranks_run and not self.is_whole(host.says.run) and self.random.random() < 0.2:
                self.end(host, 75)

    def live(self, host: Host) -> None:
        if host.asked is not None and self.now - host.asked > HELD_S:
            self.table.answered(host.says.id, self.now)
            host.asked = None
        if not host.runs or host.is_cut or self.now < host.pause:
            return
        if host.asked is None:
            self.table.hear(host.says, self.now, self.suspects)
            host.asked = self.now
        order = self.table.order(host.says.id, self.now)
        if order.key != host.knows:
            self.table.answered(host.says.id, self.now)
            host.asked, host.knows = None, order.key
            self.obey(host, order)

    def obey(self, host: Host, order: NodeOrder) -> None:
        says = host.says
        if order.do == "start":
            assert not host.ranks_run, f"{says.id} is to start while its ranks run"
            assert self.started.setdefault((order.run, order.node), says.id) == says.id, "one node, two hosts"
            assert self.heads.setdefault(order.run, order.head) == order.head, "one run, two heads"
            host.ranks_run = True
            self.say(
                host,
                replace(
                    says,
                    run=order.run,
                    attempt=order.attempt,
                    node=order.node,
                    end=None,
                    instead=order.instead,
                ),
            )
        elif order.do == "stop" and host.ranks_run:
            self.end(host, 75)
        elif order.do == "judge":
            assert order.ended is not None
            assert says.end is not None, "ranks that run are judged"
            if not any("newer" in why for why in order.ended.lost):
                assert self.judged.setdefault(order.run, order.ended) == order.ended, "two outcomes"
            host.pause = self.now + self.random.choice([0.0, 1.0])
            self.say(host, replace(says, run="", end=None))

    def is_whole(self, run: str) -> bool:
        return sum(host.ranks_run and host.says.run == run for host in self.hosts) == self.nodes

    def rows(self) -> list[tuple[int, str, str, str]]:
        return [(x.node, x.host, x.state, x.why) for x in self.table.rows(self.now)]

    def all_run(self) -> bool:
        return any(self.is_whole(host.says.run) for host in self.hosts if host.ranks_run)

    def play(self, seconds: float) -> None:
        for _ in range(int(seconds / TICK_S)):
            self.tick()

    def until_all_run(self, within_s: float) -> float:
        began = self.now
        while not self.all_run():
            assert self.now - began < within_s, self.account()
            self.tick()
        return self.now - began

    def account(self) -> str:
        lines = [
            f"{h.says.id} runs={h.runs} ranks={h.ranks_run} {h.says.run!r} {h.says.node} {h.knows}"
            for h in self.hosts
        ]
        return "\n".join(["the replica does not run:", *lines])


def test_a_replica_starts_when_all_of_its_hosts_are_there():
    world = World(0, nodes=3, spares=0)
    late = world.hosts.pop()
    world.play(5)
    assert not world.started
    world.hosts.append(late)
    world.until_all_run(2)
    assert {node for _, node in world.started} == {0, 1, 2}
    assert set(world.heads.values()) == {"host-0:1"}


@pytest.mark.parametrize("node", [0, 1])
def test_a_dead_rank_ends_the_attempt_on_all_hosts(node):
    world = World(1, nodes=2, spares=0)
    world.until_all_run(2)
    world.kill_rank(world.hosts[node])
    world.tick()
    assert world.until_all_run(10) < 5
    assert len(world.heads) == 2
    (outcome,) = world.judged.values()
    assert outcome.codes[2 * node] == -9 and outcome.first == (2 * node,)


def test_a_spare_host_takes_the_place_of_a_lost_one_and_keeps_it():
    world = World(2, nodes=2, spares=1)
    world.until_all_run(2)
    world.lose_power(world.hosts[1])
    world.tick()
    assert world.until_all_run(60) < 30
    newest = max(world.heads, key=lambda run: int(run[4:]))
    assert world.started[newest, 1].startswith("spare-0")
    # The host that returns stands by, also under a new leader.
    world.bring_back(world.hosts[1])
    world.play(5)
    world.lead()
    world.play(20)
    assert world.all_run() and len(world.heads) == 2
    assert any("spare-0 is node 1" in host.knows[2] for host in world.hosts if host.name == "host-1")
    assert (1, "spare-0", "member", "in the place of host-1") in world.rows()


def test_a_failure_and_a_broken_connection_together_show_a_lost_host_within_a_second():
    world = World(2, nodes=2, spares=1)
    world.until_all_run(2)
    world.play(1)
    world.kill_launcher(world.hosts[1])
    world.kill_rank(world.hosts[0])
    world.play(BROKEN_S + 2 * TICK_S)
    (outcome,) = world.judged.values()
    assert outcome.lost == ("node 1 (host-1) has not been heard for 1 s",)
    world.until_all_run(4)
    assert world.table.is_elsewhere, "the spare host may have no state in memory"
    world.kill_rank(world.hosts[0])
    world.tick()
    world.until_all_run(10)
    assert not world.table.is_elsewhere


def test_a_launcher_that_returns_takes_its_number_again():
    world = World(3, nodes=2, spares=0)
    world.until_all_run(2)
    world.kill_launcher(world.hosts[0])
    world.bring_back(world.hosts[0])
    world.tick()
    world.until_all_run(15)
    assert len(world.heads) == 2


def test_a_new_leader_leaves_a_running_replica_alone():
    world = World(4, nodes=3, spares=1)
    world.until_all_run(2)
    for _ in range(3):
        world.lead()
        world.play(30)
        assert world.all_run() and len(world.heads) == 1


def test_a_number_given_twice_is_said_and_starts_nothing_twice():
    world = World(5, nodes=2, spares=0)
    world.add("other", 1)
    world.until_all_run(2)
    world.play(5)
    waiting = [host for host in world.hosts if not host.ranks_run]
    assert len(waiting) == 1 and "is node 1" in waiting[0].knows[2]


def test_a_number_given_twice_is_said_before_the_start_too():
    world = World(5, nodes=3, spares=0)
    world.hosts.pop()
    other = world.add("other", 1)
    world.play(5)
    assert other.knows[2] == "host-1 is node 1 too: this host stands by"
    assert not world.started


@pytest.mark.parametrize(
    "shape",
    ["2 nodes of 4 ranks, fabric 0.1", "3 nodes of 2 ranks, fabric 0.1", "2 nodes of 2 ranks, fabric 0.2"],
)
@pytest.mark.parametrize("number", [0, SPARE])
def test_a_host_with_other_ranks_nodes_or_release_is_named_and_stops_nobody(shape, number):
    world = World(6, nodes=2, spares=0)
    world.hosts.clear()
    for node in (0, 1):
        world.add(f"host-{node}", node, shape="2 nodes of 2 ranks, fabric 0.1")
    stranger = world.add("stranger", number, shape=shape)
    world.until_all_run(2)
    world.play(5)
    said = (
        f"host-0 was started with 2 nodes of 2 ranks, fabric 0.1, and stranger with {shape}: start both alike"
    )
    assert stranger.knows[2] == said and not stranger.ranks_run


GOOD = {"device": "H100", "devices": 8, "device_gb": 79.6, "memory_gb": 2015.0}
GOOD_WORDS = "8 x H100 of 80 GB and 2015 GB of memory"


@pytest.mark.parametrize(
    ("unlike", "words"),
    [
        ({"device": "A100"}, "8 x A100 of 80 GB and 2015 GB of memory"),
        ({"devices": 7}, "7 x H100 of 80 GB and 2015 GB of memory"),
        ({"device_gb": 40.0}, "8 x H100 of 40 GB and 2015 GB of memory"),
        ({"memory_gb": 1000.0}, "8 x H100 of 80 GB and 1000 GB of memory"),
        ({"device": "", "devices": 0, "device_gb": 0.0}, "no GPU and 2015 GB of memory"),
    ],
)
def test_a_spare_host_that_is_worse_than_the_lost_one_is_refused_with_its_name(unlike, words):
    world = World(8, nodes=2, spares=0)
    world.hosts.clear()
    for node in (0, 1):
        world.add(f"host-{node}", node, **GOOD)
    worse = world.add("worse", SPARE, **{**GOOD, **unlike})
    world.until_all_run(2)
    world.play(1)
    assert (
        worse.knows[2]
        == f"worse has {words}, and node 0 (host-0) has {GOOD_WORDS}: start a spare host like it"
    )
    runs = len(world.heads)
    world.lose_power(world.hosts[1])
    world.play(40)
    assert len(world.heads) == runs
    assert (
        worse.knows[2]
        == f"worse has {words}, and node 1 (host-1) has {GOOD_WORDS}: start a spare host like it"
    )
    world.add("like", SPARE, **{**GOOD, "devices": 9, "memory_gb": 1990.0})
    world.until_all_run(5)
    newest = max(world.heads, key=lambda run: int(run[4:]))
    assert world.started[newest, 1].startswith("like")


def test_a_spare_host_of_the_lost_ones_rack_is_taken_first():
    world = World(9, nodes=2, spares=0)
    world.hosts.clear()
    for name, number, rack in (("a", 0, "x"), ("b", 1, "y"), ("far", SPARE, "x"), ("near", SPARE, "y")):
        world.add(name, number, rack=rack)
    world.until_all_run(2)
    world.lose_power(world.hosts[1])
    world.tick()
    world.until_all_run(60)
    assert world.rows() == [
        (0, "a", "member", ""),
        (1, "near", "member", "in the place of b"),
        (SPARE, "far", "spare host", f"attempt {world.table.attempt[0]} runs: this host stands by"),
    ]


def test_a_spare_host_that_failed_often_is_taken_after_the_others():
    world = World(11, nodes=2, spares=2)
    world.until_all_run(2)
    world.suspects = {"spare-0"}
    for lost, instead in ((1, "spare-1"), (0, "spare-0")):
        world.lose_power(world.hosts[lost])
        world.tick()
        world.until_all_run(60)
        newest = max(world.heads, key=lambda run: int(run[4:]))
        assert world.started[newest, lost].startswith(instead)


def test_people_see_which_host_is_missing_and_who_waits_for_it():
    world = World(10, nodes=3, spares=0)
    late = world.hosts.pop()
    world.play(5)
    waiting = [(0, "host-0", "waiting", ""), (1, "host-1", "waiting", "")]
    assert world.rows() == [*waiting, (2, "", "missing", "node 2 has no host yet")]
    world.hosts.append(late)
    world.until_all_run(2)
    assert world.rows() == [(node, f"host-{node}", "member", "") for node in range(3)]
    world.lead()
    assert world.rows() == []
    world.play(1)
    assert world.rows() == [(node, f"host-{node}", "member", "") for node in range(3)]
    lost_at = world.now
    world.lose_power(world.hosts[2])
    world.play(60)
    rows = world.table.rows(world.now)
    assert [(x.host, x.state) for x in rows] == [
        ("host-0", "waiting"),
        ("host-1", "waiting"),
        ("host-2", "missing"),
    ]
    assert rows[2].why.startswith("node 2 (host-2) has not been heard for ")
    assert 0 < world.now - rows[2].for_s - lost_at < 30, "since then it has been missing"


def test_a_replica_that_has_finished_shows_no_hosts():
    world = World(11, nodes=2, spares=0)
    world.until_all_run(2)
    for host in world.hosts:
        world.end(host, 0)
        world.table.hear(host.says, world.now)
    assert world.rows() == []


def test_a_launcher_that_says_goodbye_is_lost_at_once():
    world = World(7, nodes=2, spares=1)
    world.until_all_run(2)
    leaving = world.hosts[1]
    world.say(leaving, replace(leaving.says, gone="SIGTERM ended its launcher"))
    world.table.hear(leaving.says, world.now)
    world.lose_power(leaving)
    assert world.until_all_run(10) < 5


@pytest.mark.parametrize("unlike", [False, True])
def test_a_request_costs_the_same_few_calls_for_each_launcher_that_is_there(unlike):
    """A tenant's launchers must not hold the loop of all jobs."""

    def calls(count: int) -> int:
        table = ReplicaNodes(lambda: "run")
        for k in range(count):
            shape = f"shape {k}" if unlike else SHAPE
            says = NodeSays(f"id-{k}", f"host-{k}", k % 700 - 1, 1024, shape, "a:1", rack=f"rack-{k % 9}")
            table.hear(says, 0.0)
            table.answered(says.id, 0.0)
        made = 0

        def note(_frame, event, _argument) -> None:
            nonlocal made
            made += event == "call"

        sys.setprofile(note)
        try:
            table.hear(says, 31.0)
            table.order(says.id, 31.0)
        finally:
            sys.setprofile(None)
        return made

    few, many = calls(64), calls(256)
    assert many < 5 * few and many < 15_000, (few, many)


@pytest.mark.parametrize("seed", range(60))
def test_faults_in_any_order_never_split_a_replica_and_never_stop_it_for_good(seed):
    draw = random.Random(seed)
    world = World(seed, nodes=draw.choice([2, 2, 3, 5]), spares=draw.choice([0, 1, 2]))
    faults = [world.lose_power, world.kill_launcher, world.kill_rank, world.bring_back]
    for _ in range(draw.randrange(4, 24)):
        world.play(draw.choice([0.25, 1.0, 4.0, 12.0]))
        what = draw.randrange(8)
        host = draw.choice(world.hosts)
        if what < 5:
            draw.choice(faults)(host)
        elif what == 5:
            world.lead()
        elif what == 6:
            host.is_cut = True
        else:
            host.is_cut = False
    for host in list(world.hosts):
        host.is_cut = False
        world.bring_back(host)
    world.until_all_run(120)
    world.play(30)
    assert world.all_run(), world.account()


def test_the_host_of_a_replica_is_the_first_of_its_addresses():
    """A launcher names its host by this address, and all ranks of the host have the same."""
    ranks = tuple(RankAddress(f"10.0.0.5,10.1.0.5:{port}", "") for port in (2, 3))
    member = Member("r0", 1, "10.0.0.5,10.1.0.5:1", "", ranks=ranks)
    assert host_of(member) == "10.0.0.5"
    elsewhere = (RankAddress("10.0.0.6,10.1.0.6:1", ""),)
    assert host_of(Member("r0", 1, "10.0.0.5,10.1.0.5:1", "", ranks=elsewhere)) == ""
