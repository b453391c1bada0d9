"""In seeded worlds no invariant breaks, and every rare path occurs."""

import os
import subprocess
import sys

import pytest
import sim.lighthouse
import sim.run
import sim.trainer
from sim import coverage, noticing
from sim.checkers import Checks, Violation
from sim.clockwork import Clockwork, Process
from sim.network import Connection, End, Network
from sim.run import KINDS, hunt
from sim.world import World, run_seed

import fabric.client.control.engine
import fabric.lighthouse.jobs.job
import fabric.protocol.leader.core
import fabric.protocol.member.core

SEEDS = 1000


def test_the_simulator_drives_the_very_classes_that_the_shells_drive():
    assert sim.trainer.MemberCore is fabric.protocol.member.core.MemberCore
    assert fabric.client.control.engine.MemberCore is fabric.protocol.member.core.MemberCore
    assert sim.lighthouse.LeaderCore is fabric.protocol.leader.core.LeaderCore
    assert fabric.lighthouse.jobs.job.LeaderCore is fabric.protocol.leader.core.LeaderCore


def test_without_faults_every_world_finishes_in_its_first_epochs():
    for seed in range(20):
        world = run_seed(seed, faultless=True)
        assert world.clockwork.counts["member: outside"] == 0, seed
        assert world.clockwork.counts["path: cold start"] == 0, seed
        assert world.store.record is not None and world.store.record.complete, seed


def test_worlds_keep_every_invariant_and_meet_every_rare_path():
    noticing.meet("plain", coverage.REQUIRED, SEEDS)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_failure_in_worlds_of_any_kind_replays_from_the_printed_line(kind, monkeypatch, capsys):
    def broken(world: World, *_: object) -> None:
        raise Violation(f"found at {world.clockwork.now}")

    # Whatever stops a world early, the checker still demands the end of the job.
    monkeypatch.setattr(World, "_demand", broken)
    _, [line] = hunt(3, 4, kind)
    found, _, command = line.partition("\n    replay: python tests/sim/run.py ")
    monkeypatch.setattr(sys, "argv", ["run.py", *command.split()])
    assert sim.run.main() == 1
    assert found.removeprefix("seed 3: ") in capsys.readouterr().err


@pytest.mark.parametrize("seed", [0, 5, 254])
def test_a_seed_replays_exactly(seed):
    first, second = run_seed(seed, tracing=True), run_seed(seed, tracing=True)
    assert first.clockwork.lines == second.clockwork.lines
    assert len(first.clockwork.lines) > 100


def test_a_seed_replays_exactly_in_another_process_with_other_hashes(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["run.py", "--seed", "5"])
    assert sim.run.main() == 0
    here = capsys.readouterr().out
    there = subprocess.run(
        [sys.executable, sim.run.__file__, "--seed", "5"],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        check=True,
        text=True,
        timeout=600,
    ).stdout
    assert here == there and len(here) > 10_000


# --- the simulator itself ----------------------------------------------------------------------------


def connected(seed=1):
    clockwork = Clockwork(seed)
    network = Network(clockwork)
    heard = []
    ends = [
        End(
            Process(clockwork, name),
            name,
            lambda message, name=name: heard.append((name, message)),
            lambda why, name=name: heard.append((name, f"closed: {why}")),
        )
        for name in ("a", "b")
    ]
    return clockwork, network, Connection(network, *ends), heard


def test_a_connection_keeps_the_order_of_what_is_sent():
    clockwork, network, connection, heard = connected()
    network.slow = 0.5
    for number in range(50):
        connection.send(0, number)
    connection.close(0, "done")
    clockwork.run(10.0, lambda: False)
    assert heard == [*(("b", number) for number in range(50)), ("b", "closed: done")]


def test_a_healed_partition_delivers_held_messages_in_order():
    clockwork, network, connection, heard = connected()
    network.block("a", "b")
    for number in range(5):
        connection.send(0, number)
    clockwork.run(0.5, lambda: False)
    assert heard == []
    network.heal()
    connection.send(0, 5)
    clockwork.run(1.0, lambda: False)
    assert heard == [("b", number) for number in range(6)]


def test_a_lasting_partition_ends_the_connection_at_both_ends():
    clockwork, network, connection, heard = connected()
    network.block("a", "b")
    connection.send(0, "lost")
    clockwork.run(10.0, lambda: False)
    assert sorted(heard) == [("a", "closed: timed out"), ("b", "closed: timed out")]


def test_a_stopped_process_hears_everything_when_it_is_continued():
    clockwork, _, connection, heard = connected()
    connection.ends[1].process.pause()
    connection.send(0, "one")
    connection.send(0, "two")
    clockwork.run(1.0, lambda: False)
    assert heard == []
    connection.ends[1].process.resume()
    clockwork.run(2.0, lambda: False)
    assert heard == [("b", "one"), ("b", "two")]


def test_the_checker_of_states_notices_a_difference():
    class Named:
        name, host, incarnation = "r0.1", "r0", 1

    checks = Checks(2, 1)
    checks.state(Named(), 1, 5, "a")
    checks.state(Named(), 2, 5, "b")
    with pytest.raises(Violation, match="state b at step 5 of generation 1"):
        checks.state(Named(), 1, 5, "b")
