"""A cluster and its job as users describe them, and the published clusters as presets."""

import math

from fabric.model import Value
from fabric.plan.engine import SimulatedJob
from fabric.plan.failures import FailureModel, Fixed, Lemons, Racks, Repair, WeibullRenewal, weibull

ARRIVALS = ("poisson", "weibull", "fixed", "lemons", "racks")
DAY_S = 86400.0


class Cluster(Value):
    """A cluster and its job. Times in seconds, sizes in bytes."""

    gpus: int
    replica_gpus: int  # GPUs of one replica
    mtbf_s: float  # mean time between failures of the whole system
    step_s: float = 10.0  # an optimizer step without failures
    exchange_s: float = 0.5  # the all-reduce, which is a part of step_s
    restart_s: float = 600.0  # length of a global restart, and of the return of one replica
    # The time for which a failed machine is away in addition to a restart: median and sigma of a log-normal.
    # With a median of 0 another machine takes the failed machine's place at once.
    repair_median_s: float = 0.0
    repair_sigma: float = 1.0
    save_s: float = 60.0  # a durable checkpoint blocks all replicas for this time
    # The size of the state and the link bound how fast a spare can join.
    state_bytes: float = 0.0
    link_bytes_s: float = 10e9
    micro_batches: int = 8  # micro-batches per replica and step
    steps: int = 5000
    stall_s: float = 0.5  # the survivors' lost time at a failure under fabric's policy, a measured value
    arrivals: str = "poisson"
    shape: float = 0.78  # shape parameter of Weibull arrivals
    rack_replicas: int = 0  # replicas in one rack, for arrivals of "racks"
    rack_share: float = 0.1  # the share of replicas' failures in which a whole rack fails
    source: str = "given"

    def __post_init__(self) -> None:
        if self.gpus < 1 or self.replica_gpus < 1:
            raise ValueError(
                f"gpus and replica_gpus must be 1 or more, not {self.gpus} and {self.replica_gpus}"
            )
        if self.gpus // self.replica_gpus < 2:
            raise ValueError(
                f"{self.gpus} GPUs make fewer than 2 replicas of {self.replica_gpus}: nothing could go on"
                f" after a failure"
            )
        for name in ("mtbf_s", "step_s", "restart_s", "link_bytes_s", "shape"):
            value = getattr(self, name)
            if not (value > 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be a positive number, not {value:g}")
        for name in ("exchange_s", "repair_median_s", "repair_sigma", "save_s", "state_bytes", "stall_s"):
            value = getattr(self, name)
            if not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"{name} must be zero or more, not {value:g}")
        if self.exchange_s >= self.step_s:
            raise ValueError(
                f"the exchange ({self.exchange_s:g} s) must be shorter than the step ({self.step_s:g} s)"
            )
        if self.mtbf_s < self.step_s / 100:
            raise ValueError(
                f"a failure every {self.mtbf_s:g} s leaves no step of {self.step_s:g} s undisturbed:"
                f" check the units"
            )
        if self.arrivals not in ARRIVALS:
            raise ValueError(f"arrivals must be one of {', '.join(ARRIVALS)}, not {self.arrivals!r}")
        if self.micro_batches < 1 or self.steps < 1:
            raise ValueError("micro_batches and steps must be 1 or more")
        self._check_racks()

    def _check_racks(self) -> None:
        if self.arrivals == "racks" and not 1 <= self.rack_replicas <= self.replicas:
            raise ValueError(
                f"arrivals=racks needs rack_replicas from 1 to {self.replicas}, not {self.rack_replicas}"
            )
        if self.arrivals != "racks" and self.rack_replicas:
            raise ValueError(f"rack_replicas goes with arrivals=racks, not with {self.arrivals}")
        if not 0 <= self.rack_share < 1:
            raise ValueError(f"rack_share must be 0 up to 1, not {self.rack_share:g}")

    @property
    def replicas(self) -> int:
        return self.gpus // self.replica_gpus

    @property
    def join_s(self) -> float:
        """The time of a spare's state transfer: the state's bytes over the link's rate, at least one step."""
        return max(self.step_s, self.state_bytes / self.link_bytes_s)

    def job(self) -> SimulatedJob:
        """Return the simulator's job without checkpoints, because each policy sets its own."""
        return SimulatedJob(
            groups=self.replicas,
            steps=self.steps,
            compute_s=self.step_s - self.exchange_s,
            exchange_s=self.exchange_s,
            jitter=0.02,
            save_s=self.save_s,
            restart_s=self.restart_s,
            restart_fails=True,
            repair=Repair(self.restart_s, self.repair_median_s, self.repair_sigma),
            spare_join_s=self.join_s,
        )

    def failures(self) -> FailureModel:
        unit_mtbf_s = self.mtbf_s * self.replicas
        if self.arrivals == "fixed":
            return Fixed(self.mtbf_s)
        if self.arrivals == "weibull":
            return weibull(self.mtbf_s, self.replicas, self.shape)
        if self.arrivals == "lemons":
            return Lemons(unit_mtbf_s)
        if self.arrivals == "racks":
            return Racks(unit_mtbf_s, self.rack_replicas, self.rack_share)
        return WeibullRenewal(unit_mtbf_s, shape=1.0)


def _spare(groups: int, exchange_s: float) -> Cluster:
    """SPARe's published simulations: 64 s per stack, a system MTBF of 300 s, restarts of an hour."""
    return Cluster(
        gpus=groups * 600,
        replica_gpus=600,
        mtbf_s=300.0,
        step_s=64.0 + exchange_s,
        exchange_s=exchange_s,
        restart_s=3600.0,
        save_s=60.0,
        arrivals="weibull",
        source=f"SPARe (arXiv 2603.00357), N = {groups}; replicas of 600 GPUs are assumed",
    )


# Published clusters. The source of each says where its figures come from, and what is assumed.
PRESETS: dict[str, Cluster] = {
    "llama3-16k": Cluster(
        gpus=16384,
        replica_gpus=128,
        mtbf_s=54 * DAY_S / 419,
        step_s=10.0,
        state_bytes=5.7e12 / 128,
        source="Llama 3 405B: 419 unexpected interruptions in 54 days on 16,384 GPUs; replicas of 128 GPUs;"
        " the step of 10 s and restarts of 10 min are assumed",
    ),
    "rsc-16k": Cluster(
        gpus=16384,
        replica_gpus=128,
        mtbf_s=DAY_S / (6.50 * 2.048),
        step_s=10.0,
        source="Meta RSC: 6.50 failures per 1,000 node-days, for 2,048 nodes of 8 GPUs; step and restart are"
        " assumed",
    ),
    "ft-hsdp-100k": Cluster(
        gpus=98304,
        replica_gpus=8192,
        mtbf_s=1080.0,
        step_s=20.0,
        exchange_s=1.0,
        micro_batches=32,
        source="FT-HSDP (arXiv 2602.00277): 98,304 GPUs in 12 replicas, a failure every 18 min, steps of"
        " 20 s, 10 min until a replica is back; 32 micro-batches are assumed",
    ),
    "spare-200": _spare(200, 2.0),
    "spare-600": _spare(600, 6.0),
    "spare-1000": _spare(1000, 10.0),
    "infinitehbd": Cluster(
        gpus=3200,
        replica_gpus=64,
        mtbf_s=DAY_S / (4.23 * 0.4),
        step_s=10.0,
        repair_median_s=20 * 3600.0,
        repair_sigma=1.95,
        arrivals="weibull",
        shape=0.62,
        source="statistics of the public InfiniteHBD trace: 400 nodes of 8 GPUs, 4.23 faults per 1,000"
        " node-days, Weibull 0.62, repairs of 20 h in the median and 133 h in the mean; replicas of 64 GPUs"
        " and the step are assumed",
    ),
    "torchpass-64": Cluster(
        gpus=64,
        replica_gpus=8,
        mtbf_s=3600.0,
        step_s=7.9,
        exchange_s=0.5,
        steps=3000,
        source="TorchPass's public benchmark: 64 H200, 3,000 steps, a failure every 2,700 to 4,500 s; the"
        " step of 7.9 s is inferred from its own 405 min",
    ),
}


def preset(name: str) -> Cluster:
    """Return a preset. Raises ValueError with the existing names."""
    if name not in PRESETS:
        raise ValueError(f"there is no preset {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]
