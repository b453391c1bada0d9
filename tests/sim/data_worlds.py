"""Worlds in which the data of a job change: by stages of its loops, or by a restart with another batch size.

In a curriculum every loop changes its data at the same steps, with user code between two stages. Steps of
different stages have different numbers of micro-batches. A newcomer walks through the stages that it missed,
and loads the job's state in the stage that needs it. In the other worlds all replicas are stopped in the
middle of a stage, and start again with twice the micro-batches.
"""

from typing import Any

from msgspec.structs import replace
from sim.checkers import Checks, demand
from sim.main_thread import MainThread
from sim.trainer import Trainer
from sim.world import Settings, World

from fabric.exit_codes import RESTART
from fabric.model import DataPlan
from fabric.protocol.messages import member_events as io
from fabric.protocol.messages import network as m

REQUIRED = (
    "data: a stage began",
    "data: a newcomer skips a stage",
    "data: a step is divided when its stage begins",
)
_STAGE_S = 0.3  # the most time for user code between two stages


class StagedMain(MainThread):
    """A loop with stages: ``stage`` is the data of the present one."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        self.stage = DataPlan(0, "", 0, 0)
        self._told: DataPlan | None = None
        self._held: io.Install | None = None

    @property
    def world(self) -> "CurriculumWorld":
        world = self.trainer.world
        assert isinstance(world, CurriculumWorld)
        return world

    def news(self) -> DataPlan | None:
        plan, before, self._told = self.stage, self._told, self.stage
        demand(plan.covers(self.step) or self.closing, f"step {self.step} is none of {plan}")
        return plan if plan != before else None

    def _ready(self) -> None:
        if self.step >= self.stage.until and self.step < self.world.until_of(self.trainer):
            self._begin_next_stage(super()._ready)
        else:
            super()._ready()

    def _begin_next_stage(self, then: object) -> None:
        """Run the user's code between two stages."""

        def begun() -> None:
            self.stage = self.world.plan_at(self.stage.until)
            self.trainer.clockwork.counts["data: a stage began"] += 1
            then()  # type: ignore[operator]

        self._work(self.trainer.clockwork.between(0.0, _STAGE_S), begun)

    def _install(self, order: io.Install) -> None:
        if order.step < self.stage.begin:
            # The stages before are over in this process, so it cannot train them again.
            self.trainer.stop(io.Stop(RESTART, "the job goes on at a step before this stage"))
        elif order.step >= self.stage.until and order.step < self.world.until_of(self.trainer):
            self.trainer.clockwork.counts["data: a newcomer skips a stage"] += 1
            self._begin_next_stage(lambda: self._install(order))
        else:
            super()._install(order)


class StagedTrainer(Trainer):
    main_class = StagedMain

    def feed(self, event: io.Event) -> None:
        message = event.message if isinstance(event, io.FromLeader) else None
        if isinstance(message, m.Resume) and message.undivided:
            self.clockwork.counts["data: a step is divided when its stage begins"] += 1
        super().feed(event)


class StagedChecks(Checks):
    """Knows how many micro-batches the steps of each stage have."""

    world: "CurriculumWorld"

    def micro_batches_at(self, step: int) -> int:
        return self.world.plan_at(step).micro_batches


class CurriculumWorld(World):
    """A plain world, in which stages of three to eight steps follow each other."""

    trainer_class = StagedTrainer
    checks_class = StagedChecks

    def __init__(self, seed: int, **options: Any) -> None:
        self._plans: list[DataPlan] = []
        super().__init__(seed, **options)

    def choose(self) -> Settings:
        chosen, random = super().choose(), self.clockwork.random
        begin = 0
        while begin < 4000:
            length = random.randrange(3, 9)
            size = random.randrange(chosen.replicas, 9)
            described = f"dataset {len(self._plans)} micro_batches {size}"
            self._plans.append(DataPlan(size, described, begin, begin + length))
            begin += length
        return replace(chosen, micro_batches=self._plans[0].micro_batches)

    def plan_at(self, step: int) -> DataPlan:
        """Return the data of ``step``."""
        return next(plan for plan in self._plans if plan.covers(step))

    def first_plan(self) -> DataPlan | None:
        return self._plans[0]

    @property
    def checks(self) -> StagedChecks:
        return self._checks

    @checks.setter
    def checks(self, checks: StagedChecks) -> None:
        self._checks, checks.world = checks, self


class RebatchedWorld(World):
    """All replicas start again with twice the micro-batches, without the first replica that had a session."""

    def __init__(self, seed: int, tracing: bool = False) -> None:
        super().__init__(seed, tracing, faultless=True)
        self.faults.not_before, self.faults.over = 6.0, False
        self.clockwork.at(2.5, self._stop_all)

    def choose(self) -> Settings:
        chosen = super().choose()
        policy = replace(chosen.leader.policy, min_replicas=1, start_replicas=3)
        return replace(
            chosen,
            replicas=3,
            lighthouses=1,
            min_replicas=1,
            micro_batches=6,
            leader=replace(chosen.leader, policy=policy),
            member=replace(chosen.member, min_replicas=1),
        )

    def _stop_all(self) -> None:
        core = next(x.core for x in self.lighthouses.values() if x.leads)
        assert core is not None
        first = next(iter(core.state.liveness.peers))
        self.clockwork.counts["data: all started again with other batches"] += 1
        for name in self.hosts:
            self.kill_trainer(name, 10**6 if name == first else 0.5)
        self.hosts[first].drained = True
        self.settings.micro_batches = self.checks.micro_batches = 12
