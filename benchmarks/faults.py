"""The cost of a fault for the survivors: the stall, the join, and evictions of replicas that did not fail.

    python benchmarks/faults.py
    python benchmarks/faults.py --joins 5     # kills and joins alone, phase by phase
    python benchmarks/faults.py --unequal 3   # beside a replica of another layout of ranks
    python benchmarks/faults.py --restored 3  # kills after the store was restored from an older copy
    python benchmarks/faults.py --hosts 3     # a replica of two hosts loses a rank, and a host

Three replicas of 84 million float32 parameters with AdamW (1.0 GB of state, 336 MB of gradients), default
settings, one lighthouse on SQLite, everything on this machine. The compute phase stands for a device: a timer
of 0.5 s (two micro-batches of 0.25 s) during which the trainer uses no CPU; then gradients are really written
and exchanged. The same with real products on the CPU is printed beside, without a limit.

*Stall* of a survivor: the step that met the fault (and the next one, where the recovery ended there), minus
the median undisturbed step, minus the time on inherited micro-batches, minus the repeated exchange, which is
what was exchanged beyond one undisturbed exchange because the fault had made it void. Detection, abort,
epoch, links and everything else count. A survivor's later steps have a smaller ring and more micro-batches;
the same stall is therefore also printed against the median undisturbed step of two members.

The first fault comes after eight steps, because the first steps are longer (printed).

Each replica has a standby, as under `fabric launch`, before it is killed.

A join is what the two others' steps take, from the start of a killed replica's new process to its first
contribution, over their median undisturbed step as two. Every kill is followed by a join.

Where torchft is installed it meets the same faults on the same model afterwards. It has no inherited work
and no repeated exchange: its stall is the time between the commits around the fault minus its median step.
"""

import argparse
import contextlib
import importlib.util
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial

import common
import faults_hosts
import faults_joins
import faults_torchft
import faults_unequal
from faults_fleet import REPLICAS, FaultFleet, durations
from faults_record import InjectedFault, RunRecord

SEED = 20260
KILLS, STOPS, CPU_KILLS = 10, 5, 2
# In these first steps the optimizer makes its state, and servers allocate memory for gradients and snapshots.
WARM_UP_STEPS = 8
UNDISTURBED_STEPS = 2
UNDISTURBED_STEPS_AS_TWO = 3
HOLD_S, BUSY_S, USER_CODE_S = 2.0, 20.0, 60.0
BUSY_PROCESSES = 4
# After these times the run skips figures without an aim, so that it ends within ten minutes.
CPU_UNTIL_S, PEER_UNTIL_S = 450.0, 500.0


class Disturbance:
    """Disturbs a fleet and remembers when; nothing is computed before the end."""

    def __init__(self, fleet: FaultFleet) -> None:
        self.fleet = fleet
        self.faults: list[InjectedFault] = []
        self.provoked: dict[str, tuple[float, float]] = {}
        self.standing_by: list[tuple[float, float]] = []
        self.chance = random.Random(SEED)
        self._began = time.monotonic()

    @property
    def elapsed(self) -> float:
        """Return the seconds since the fleet was complete."""
        return time.monotonic() - self._began

    def begin(self) -> None:
        """Start the trainers, and print how long their first steps take, which no fault meets."""
        for name in REPLICAS:
            self.fleet.begin(name)
        self.settle(len(REPLICAS), WARM_UP_STEPS)
        first = [f"{seconds:.1f}" for seconds, _ in durations(self.fleet.steps(REPLICAS[0])[:WARM_UP_STEPS])]
        common.say(f"  {self.elapsed:3.0f} s: warm; the first steps took {', '.join(first)} s")

    def settle(self, members: int, count: int) -> None:
        """Wait for ``count`` more steps of ``members`` replicas in an epoch of so many."""
        begun = time.monotonic()

        def settled() -> bool:
            ready = 0
            for name in REPLICAS:
                recent = self.fleet.steps(name)[-count:]
                later = [s for s in recent if s["end"] > begun and s["members"] == members]
                ready += len(later) == count
            return ready >= members

        self.fleet.wait(settled, f"{count} steps of {members} members")

    def fault(self, kind: str, mode: str = "timer") -> None:
        """Kill or stop somebody at a random phase of a step, and bring the replica back after a while."""
        fleet = self.fleet
        begun = time.monotonic()
        fleet.stand_by()
        self.standing_by.append((begun, time.monotonic()))
        self.settle(len(REPLICAS), UNDISTURBED_STEPS)
        victim, phase = self.chance.choice(REPLICAS), self.chance.random()
        steps = fleet.steps(next(name for name in REPLICAS if name != victim))
        length = statistics.median(seconds for seconds, _ in durations(steps[-UNDISTURBED_STEPS - 1 :]))
        time.sleep(max(0.0, steps[-1]["end"] + phase * length - time.monotonic()))
        sent = fleet.signal(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
        fault = InjectedFault(kind, victim, sent, mode, phase)
        self.settle(len(REPLICAS) - 1, 1 + (UNDISTURBED_STEPS_AS_TWO if kind == "kill" else 0))
        fault.started = fleet.begin(victim) if kind == "kill" else fleet.signal(victim, signal.SIGCONT)
        fleet.wait(lambda: self._contributed(fault), f"{victim} to be back")
        fault.back = self._contributed(fault)
        self.faults.append(fault)
        common.say(
            f"  {self.elapsed:3.0f} s: {kind} {victim} at phase {phase:.2f} ({mode}),"
            f" back {fault.back - fault.started:.1f} s after its return began"
        )

    def _contributed(self, fault: InjectedFault) -> float:
        """Return when a returned replica first contributed, or 0."""
        lines = [x for x in self.fleet.journal(fault.victim) if x["mono"] > fault.started]
        joined = next((x["mono"] for x in lines if x["event"] == "joined"), None)
        given = (x["mono"] for x in lines if x["event"] == "contribute" and joined and x["mono"] > joined)
        return next(given, 0.0)

    def provoke(self) -> None:
        """Run the events that only look like a death, one after the other; no replica may be evicted."""
        self.settle(len(REPLICAS), UNDISTURBED_STEPS)
        with self._watched("lock held"):
            for name in REPLICAS:
                self._act(name, "hold", HOLD_S)
        with self._watched("busy host"), busy(BUSY_PROCESSES):
            time.sleep(BUSY_S)
        with self._watched("user code"):
            self._act("r1", "user", USER_CODE_S)

    def _act(self, name: str, what: str, seconds: float) -> None:
        steps = len(self.fleet.steps(name))
        self.fleet.act(name, what, seconds)
        # Wait for two steps: the step under way may have no micro-batch left, but the next step has.
        self.fleet.wait(lambda: len(self.fleet.steps(name)) >= steps + 2, f"{name} to go on", 240.0)

    @contextlib.contextmanager
    def _watched(self, what: str) -> Iterator[None]:
        begun = time.monotonic()
        yield
        self.settle(len(REPLICAS), 1)
        self.provoked[what] = (begun, time.monotonic())
        common.say(f"  {self.elapsed:3.0f} s: {what} for {time.monotonic() - begun:.0f} s")

    def with_cpu(self) -> None:
        """Repeat the kills with computing that needs the CPU."""
        self.fleet.mode("cpu")
        self.settle(len(REPLICAS), UNDISTURBED_STEPS)
        for _ in range(CPU_KILLS):
            self.fault("kill", "cpu")


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Start this number of processes that compute without end."""
    processes = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description="what a fault costs those that survive it")
    parser.add_argument("--joins", type=int, metavar="N", help="only so many kills and joins, by phase")
    parser.add_argument("--unequal", type=int, metavar="N", help="only so many kills of unequal replicas")
    parser.add_argument("--restored", type=int, metavar="N", help="only so many kills past a restored store")
    parser.add_argument("--hosts", type=int, metavar="N", help="only so many rounds with two hosts")
    asked = parser.parse_args()
    common.begin()
    if asked.restored:
        past_restored_stores(asked.restored)
    elif asked.unequal or asked.hosts:
        figures = (
            faults_unequal.compare(asked.unequal) if asked.unequal else faults_hosts.measure(asked.hosts)
        )
        common.finish({key: round(value, 4) for key, value in figures.items()})
    elif asked.joins:
        joins_alone(asked.joins)
    else:
        everything()


def joins_alone(count: int) -> None:
    """Kills and joins, and which phase of a join costs the others what."""
    with FaultFleet() as fleet, faults_joins.ProcessorTime(fleet) as used:
        disturbance = Disturbance(fleet)
        disturbance.begin()
        for _ in range(count):
            disturbance.fault("kill")
        disturbance.settle(len(REPLICAS), UNDISTURBED_STEPS)
        record = RunRecord(fleet, disturbance.faults, disturbance.standing_by)
    tell_standbys(record, disturbance)
    tell_calm(record)
    tell_joins(record)
    faults_joins.tell_phases(record, disturbance.faults, used)
    figures = join_figures(record)
    common.say("")
    tell_verdict(figures)
    common.finish({key: round(value, 4) for key, value in figures.items()})


def past_restored_stores(count: int) -> None:
    """Kills after the store was put back to a copy from before the last kill and join."""
    with FaultFleet() as fleet:
        disturbance = Disturbance(fleet)
        disturbance.begin()
        for _ in range(count):
            fleet.copy_store()
            disturbance.fault("kill")
            restored = time.monotonic()
            fleet.restore_store()
            fleet.wait(
                partial(has_gone_on_above, fleet, restored),
                "the epoch above those that members know",
            )
            disturbance.fault("kill")
        record = RunRecord(fleet, disturbance.faults, disturbance.standing_by)
    record.faults[:] = record.faults[1::2]
    tell_faults(record)
    kills = stalls(record, "kill")
    result = {
        "restored_sigkill_stall_s": statistics.median(kills),
        "restored_sigkill_stall_max_s": max(kills),
        "steps_lost": sum(record.lost(fault) for fault in record.faults),
    }
    common.say("")
    common.verdict("SIGKILL stall past a restored store, median, s", statistics.median(kills), at_most=0.25)
    common.verdict("SIGKILL stall past a restored store, worst, s", max(kills), at_most=0.6)
    common.verdict("steps lost", result["steps_lost"], at_most=0)
    common.finish({key: round(value, 4) for key, value in result.items()})


def has_gone_on_above(fleet: FaultFleet, since: float) -> bool:
    """Whether the lighthouse has noticed the older copy. Until then it waits for its grace period."""
    epochs = [x for x in fleet.events() if x["kind"] == "epoch" and x["mono"] > since]
    return any("restored from an older copy" in x["why"] for x in epochs)


def everything() -> None:
    """Run all faults, the events that only look like one, and torchft where it is installed."""
    common.say(
        f"seed {SEED}: {KILLS} kills, each with a join, and {STOPS} stops; a device that computes is a timer"
    )
    with FaultFleet() as fleet:
        disturbance = Disturbance(fleet)
        disturbance.begin()
        kinds = ["kill"] * KILLS + ["stop"] * STOPS
        disturbance.chance.shuffle(kinds)
        for kind in kinds:
            disturbance.fault(kind)
        disturbance.provoke()
        if disturbance.elapsed < CPU_UNTIL_S:
            disturbance.with_cpu()
        disturbed = [*disturbance.provoked.values(), *disturbance.standing_by]
        record = RunRecord(fleet, disturbance.faults, disturbed)
        elapsed = disturbance.elapsed
    result = report(record, disturbance)
    if importlib.util.find_spec("torchft") is None:
        common.say("\ntorchft is not installed: no figures of it")
    elif elapsed > PEER_UNTIL_S:
        common.say("\ntorchft was left out: the run would have taken more than ten minutes")
    else:
        result |= faults_torchft.measure(SEED)
    common.finish({key: round(value, 4) for key, value in result.items()})


def report(record: RunRecord, disturbance: Disturbance) -> dict[str, float]:
    """Print the tables; return the figures of the last line."""
    tell_faults(record)
    tell_calm(record)
    tell_joins(record)
    common.table(
        "nobody failed",
        ["what", "seconds", "evictions"],
        [
            [what, f"{end - begun:.0f}", record.evictions(begun, end)]
            for what, (begun, end) in disturbance.provoked.items()
        ],
    )
    kills = stalls(record, "kill")
    stops = stalls(record, "stop")
    result = {
        "sigkill_stall_s": statistics.median(kills),
        "sigkill_stall_max_s": max(kills),
        "sigkill_stall_as_two_s": statistics.median(stalls(record, "kill", as_two=True)),
        "sigstop_stall_s": statistics.median(stops),
        "sigstop_stall_max_s": max(stops),
        "repeated_exchange_s": statistics.median(s.repeated for f in record.faults for s in f.stalls),
        "steps_lost": sum(record.lost(fault) for fault in record.faults),
        **join_figures(record),
        "false_evictions": sum(record.evictions(*times) for times in disturbance.provoked.values()),
    }
    if cpu := stalls(record, "kill", mode="cpu"):
        result["cpu_sigkill_stall_s"] = statistics.median(cpu)
    common.say("")
    common.verdict("SIGKILL stall, median, s", result["sigkill_stall_s"], at_most=0.25)
    common.verdict("SIGKILL stall, worst, s", result["sigkill_stall_max_s"], at_most=0.6)
    common.verdict("SIGSTOP stall, worst, s", result["sigstop_stall_max_s"], at_most=0.6)
    common.verdict("steps lost", result["steps_lost"], at_most=0)
    tell_verdict(result)
    common.verdict("false evictions", result["false_evictions"], at_most=0)
    return result


def join_figures(record: RunRecord) -> dict[str, float]:
    """Measure the joins' cost for the other members, and their duration."""
    joins = [fault for fault in record.faults if is_kill(fault)]
    ratios = [x for fault in joins for x in record.join_ratios(fault)]
    return {
        "join_step_ratio_p50": statistics.median(ratios),
        "join_step_ratio_p99": common.quantile(ratios, 0.99),
        "catch_up_s": statistics.median(fault.back - fault.started for fault in joins),
    }


def tell_verdict(figures: dict[str, float]) -> None:
    """Print whether the cost of a join for the others meets its aim."""
    common.verdict("others' steps during a join, median ratio", figures["join_step_ratio_p50"], at_most=1.05)


def is_kill(fault: InjectedFault) -> bool:
    """Whether this fault counts among the joins."""
    return fault.kind == "kill" and fault.mode == "timer"


def stalls(record: RunRecord, kind: str, mode: str = "timer", as_two: bool = False) -> list[float]:
    """Return for each fault of a kind the longest stall of a survivor."""
    faults = [fault for fault in record.faults if (fault.kind, fault.mode) == (kind, mode)]
    return [max(s.as_two if as_two else s.stall for s in fault.stalls) for fault in faults]


def tell_faults(record: RunRecord) -> None:
    """Print one row per fault: the survivor with the longest stall, and the times of the recovery."""
    rows = []
    for fault in record.faults:
        worst = max(fault.stalls, key=lambda s: s.stall)
        row = [f"{fault.kind} {fault.victim} at phase {fault.phase:.2f}, {fault.mode}"]
        row += [f"{x:.3f}" for x in (worst.stall, worst.as_two, worst.inherited, worst.repeated)]
        row += [f"{x * 1000:.0f}" for x in record.stages(fault).values()]
        rows.append(row)
    common.table(
        "stalls in seconds (the survivor that it cost most); milliseconds after the fault until the leader\n"
        "evicting, its epoch was stored, the last survivor had aborted, the last one was told how to go on",
        ["fault", "stall", "as two", "inherited", "repeated", "evicting", "stored", "aborted", "told"],
        rows,
    )


def tell_standbys(record: RunRecord, disturbance: Disturbance) -> None:
    """Print what the imports of standbys cost the steps beside them."""
    calm = statistics.median(record.calm("timer", len(REPLICAS)))
    ratios = [
        seconds / calm
        for name in REPLICAS
        for seconds, step in durations(record.steps[name])
        if any(begun < step["end"] <= end for begun, end in disturbance.standing_by)
    ]
    seconds = statistics.median(end - begun for begun, end in disturbance.standing_by)
    ratio = f"{statistics.median(ratios):.2f}" if ratios else "none"
    common.say(f"standbys: {seconds:.1f} s until they wait; steps meanwhile over undisturbed ones: {ratio}")


def tell_calm(record: RunRecord) -> None:
    """Print the undisturbed steps, the reference of all figures."""
    rows = []
    for mode in ("timer", "cpu"):
        for members in (3, 2):
            if calm := record.calm(mode, members):
                exchange = f"{record.exchange(mode):.3f} s" if members == len(REPLICAS) else ""
                rows.append([f"{mode}, {members} members", len(calm), common.describe(calm), exchange])
    common.table("undisturbed steps", ["", "steps", "median (range)", "exchange"], rows)


def tell_joins(record: RunRecord) -> None:
    """Print one row per join: the times of its phases, and the others' steps meanwhile."""
    rows = []
    for fault in record.faults:
        if is_kill(fault):
            stages, ratios = record.join_stages(fault), record.join_ratios(fault)
            row = [fault.victim, *(f"{stages[x]:.1f}" for x in ("registered", "loaded", "member", "given"))]
            rows.append([*row, f"{statistics.median(ratios):.2f}", f"{max(ratios):.2f}"])
    common.table(
        "joins: seconds after the process start; others' steps over theirs undisturbed",
        ["who", "registered", "state loaded", "member", "contributed", "median ratio", "worst ratio"],
        rows,
    )


if __name__ == "__main__":
    main()
