"""A day of training in virtual time: twelve replicas that fail at the published rate.

Real: the leader core, the member cores and the codec, in the simulator of the tests with all of its checks.
Mock: everything else. Beats and statuses come every ``BEAT_S``, and silence counts from ``SILENCE_S`` on, so
that a day takes minutes. Statuses tell of deaths, not silence. A death takes a whole replica, whose processes
come back ``RESTART_S`` later and catch up by replay; FT-HSDP's published figures have the same time. The
others compute the dead replica's part.
"""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

if str(TESTS := Path(__file__).resolve().parent.parent / "tests") not in sys.path:
    sys.path[:0] = [str(TESTS.parent), str(TESTS)]

from sim import server
from sim.world import Settings, World

from fabric.model import Policy
from fabric.protocol.leader.core import LeaderConfig
from fabric.protocol.leader.liveness import LivenessConfig
from fabric.protocol.member.state import MemberConfig

DAY_S = 86400.0
MTBF_S = 1080.0  # between failures of 98,304 GPUs (arXiv 2602.00277)
RESTART_S = 600.0  # from a death until the processes of the replica train again (same source)
STEP_S = 20.0
MICRO_BATCHES = 32  # of each replica in a step
BEAT_S, SILENCE_S = 4.0, 10.0
# The simulator's micro-batches take 0.7 to 1.5 times their length, and a step waits for the slowest replica.
_OF_A_STEP = 1 / (1.1 * 1.06)


class DayWorld(World):
    """A job without the simulator's faults; ``fail`` schedules deaths."""

    replicas = 12

    def choose(self) -> Settings:
        policy = Policy(min_replicas=1, start_replicas=self.replicas, start_wait_s=120.0)
        return Settings(
            replicas=self.replicas,
            lighthouses=1,
            micro_batches=MICRO_BATCHES * self.replicas,
            compute_s=STEP_S / MICRO_BATCHES * _OF_A_STEP,
            min_replicas=1,
            leader=LeaderConfig(policy=policy, failures=0, liveness=LivenessConfig(silence_s=SILENCE_S)),
            member=MemberConfig(beat_s=BEAT_S),
        )

    def steps(self) -> int:
        """Return the number of committed steps."""
        return max((x.main.step for x in self.living()), default=0)


@dataclass(slots=True)
class Day:
    """What a day gave. ``step_s``: the mean length of a step before any death."""

    seconds: float
    steps: int
    deaths: int
    step_s: float
    fewest: int  # the fewest replicas that ran at a time

    @property
    def effective(self) -> float:
        """The share of the time that undisturbed replicas would have needed for the same steps."""
        return self.steps * self.step_s / self.seconds


def play(seconds: float = DAY_S, seed: int = 1, undisturbed_steps: int = 30) -> Day:
    """Play so much time after ``undisturbed_steps`` steps without a death."""
    server.STATUS_S = BEAT_S
    world = DayWorld(seed, faultless=True)
    clockwork, drawn = world.clockwork, random.Random(seed)
    clockwork.run(STEP_S * 100, lambda: world.steps() >= 1)
    began = clockwork.now
    clockwork.run(began + 2 * STEP_S * undisturbed_steps, lambda: world.steps() > undisturbed_steps)
    step_s = (clockwork.now - began) / undisturbed_steps
    first, began = world.steps(), clockwork.now
    day = Day(seconds, 0, 0, step_s, world.replicas)
    at = began + drawn.expovariate(1 / MTBF_S)
    while at < began + seconds:
        clockwork.run(at, lambda: False)
        struck = drawn.choice(sorted(world.hosts))
        day.deaths += world.kill_trainer(struck, RESTART_S)  # a replica that is away cannot fail
        day.fewest = min(day.fewest, len(world.living()))
        at += drawn.expovariate(1 / MTBF_S)
    clockwork.run(began + seconds, lambda: False)
    day.steps = world.steps() - first
    return day
