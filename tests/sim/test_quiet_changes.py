"""A join, a drain and the end of the job abort no round."""

from sim.world import HEAL_LIMIT_S, World

SEEDS = 40


class QuietWorld(World):
    """Nothing goes wrong. The last replica starts late, and joins; in half of the worlds another leaves."""

    def __init__(self, seed: int) -> None:
        self.late = True
        super().__init__(seed, faultless=True)
        # no streaming, because a gradient that changes during its transfer aborts a round
        self.settings.streaming = False

    def start_trainer(self, name: str) -> None:
        if self.late and name == f"r{self.settings.replicas - 1}":
            self.late = False
            self.clockwork.at(4.0, lambda: self.start_trainer(name))
        else:
            super().start_trainer(name)

    def _is_one_drained(self) -> bool:
        return any(host.drained for host in self.hosts.values())

    def run(self) -> None:
        """Start without the last replica, admit it, drain another, and finish."""
        self.clockwork.run(4.5, lambda: False)
        self._demand("the late one has joined", HEAL_LIMIT_S, self._is_whole())
        if self.clockwork.seed % 2 and self.settings.replicas > self.settings.min_replicas + 1:
            self.faults.over = False
            self.faults.strike("drain", "r0")
            self._demand("one has been drained", HEAL_LIMIT_S, self._is_one_drained)
        self.until = max(t.main.step for t in self.living()) + 3
        self._demand("everybody finishes", HEAL_LIMIT_S, self._is_finished)


def test_joins_drains_and_ends_abort_no_round():
    joins = drains = 0
    for seed in range(SEEDS):
        world = QuietWorld(seed)
        world.run()
        counts = world.clockwork.counts
        assert not counts["member: abort"] and not counts["leader: aborted"], f"seed {seed}"
        joins, drains = joins + counts["path: join"], drains + counts["drained"]
    assert joins > SEEDS / 2 and drains > SEEDS / 4
