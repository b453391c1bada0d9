"""The cost of failures and of fewer bytes in accuracy, over five seeds.

Each seed runs undisturbed, with policy constant and with policy shrink under a failure every 20 steps, and
undisturbed over TCP with FABRIC_EXCHANGE=bfloat16 and int8. ``--exchange`` leaves the failures out.

A job is real: a lighthouse, three trainer processes with their checkpoint servers, real SIGKILLs in the
middle of a step, real restarts that catch up and join. To fit into minutes the trainers are forked from this
process, which has imported torch already, and the task is small: a classifier of 8 classes that a random
teacher network made, 200 steps of 48 samples. A micro-batch sleeps 2 ms in place of a device, and a step with
somebody missing 80 ms more, so that a restarted replica is back before the next failure.

The figure is the accuracy on 4,096 held-out samples, in percentage points, after the last step. The spread is
that of the undisturbed runs over the seeds, largest minus smallest.
"""

import argparse
import contextlib
import json
import os
import signal
import statistics
import sys
import time
from pathlib import Path

import torch
import torch._dynamo  # imported early: otherwise this import costs every trainer's first optimizer a second
from common import begin, die_with_parent, finish, say, table, verdict
from fleet import Fleet

import fabric.client

REPLICAS = 3
STEPS = 200
FAILURE_EVERY = 20
SEEDS = range(5)
FEATURES, CLASSES, HIDDEN = 24, 8, 48
RUN_S = 120.0
POLICIES = {"undisturbed": "constant", "constant": "constant", "shrink": "shrink"}
FORMS = ("bfloat16", "int8")


class Task(torch.utils.data.Dataset):
    """Samples that a random teacher labelled, one in twenty wrongly; the same for every seed of training."""

    def __init__(self, size: int, number: int) -> None:
        teacher = torch.Generator().manual_seed(99)
        first = torch.randn(FEATURES, 64, generator=teacher) / FEATURES**0.5
        second = torch.randn(64, CLASSES, generator=teacher)
        drawn = torch.Generator().manual_seed(number)
        self.x = torch.randn(size, FEATURES, generator=drawn)
        self.y = (torch.tanh(2 * self.x @ first) @ second).argmax(1)
        wrong = torch.rand(size, generator=drawn) < 0.05
        self.y[wrong] = torch.randint(0, CLASSES, (int(wrong.sum()),), generator=drawn)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def member() -> None:
    """One trainer; writes its accuracy and what was skipped to BENCHMARK_OUT."""
    torch.set_num_threads(1)
    seed = int(os.environ["ACCURACY_SEED"])
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, CLASSES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    session = fabric.client.attach(model, optimizer)
    data = session.loader(
        Task(4096, 1),
        global_batch_size=48,
        micro_batch_size=4,
        seed=seed,
        policy=os.environ["ACCURACY_POLICY"],
    )
    for step in session.steps(data, until=STEPS):
        if len(session.members) < REPLICAS:
            time.sleep(0.08)
        for x, y in step:
            time.sleep(0.002)
            step.backward(torch.nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    held_out = Task(4096, 2)
    with torch.no_grad():
        right = (model(held_out.x).argmax(1) == held_out.y).float().mean().item()
    out = {"accuracy": 100 * right, "digest": session.digest()}
    Path(os.environ["BENCHMARK_OUT"]).write_text(json.dumps(out))
    session.close()


class Child:
    """A forked trainer, with what Fleet asks of a process."""

    def __init__(self, environment: dict[str, str], log: Path) -> None:
        self.code: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            self._run(environment, log)

    @staticmethod
    def _run(environment: dict[str, str], log: Path) -> None:
        die_with_parent()
        descriptor = os.open(log, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        for target in (1, 2):
            os.dup2(descriptor, target)
        os.environ.update(environment)
        code = 1
        try:
            member()
            code = 0
        except SystemExit as error:
            code = error.code if isinstance(error.code, int) else 1
        except BaseException:  # noqa: BLE001  (the child must never return into the parent's loop)
            sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
        os._exit(code)

    def poll(self) -> int | None:
        """The exit code, negative for a signal, or None while it runs."""
        if self.code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
        return self.code

    def kill(self) -> None:
        """SIGKILL."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Wait until the trainer has ended."""
        if self.code is None:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class ForkedFleet(Fleet):
    """Trainers forked from this process."""

    trainers: dict[str, Child]  # type: ignore[assignment]  # forked here, so no Popen

    def start(self, replica: str, **more: str) -> Child:  # type: ignore[override]
        """Start (or restart) one trainer."""
        environment = {
            "FABRIC_REPLICA": replica,
            "FABRIC_REPLICAS": str(REPLICAS),
            "FABRIC_LIGHTHOUSE": self._url,
            "FABRIC_TOKEN_FILE": str(self.folder / "token"),
            "FABRIC_RUN_DIR": str(self.folder / "run" / replica),
            "FABRIC_JOURNAL": str(self.folder / "journal" / f"{replica}.jsonl"),
            "BENCHMARK_OUT": str(self.folder / f"{replica}.json"),
            **more,
        }
        self.trainers[replica] = Child(environment, self.folder / f"{replica}.log")
        return self.trainers[replica]

    def skipped(self) -> int:
        """Micro-batches that the commits left out, by r0's journal."""
        found: dict[int, int] = {}
        for line in (self.folder / "journal" / "r0.jsonl").read_text().splitlines():
            with contextlib.suppress(ValueError):
                body = json.loads(line)
                if body["event"] == "commit":
                    found[body["step"]] = len(body["skipped"])
        return sum(found.values())


def plan_failures() -> dict[str, list[int]]:
    """At which steps each replica is killed: one every FAILURE_EVERY steps, in turn."""
    steps = range(FAILURE_EVERY, STEPS, FAILURE_EVERY)
    return {f"r{i}": [s for n, s in enumerate(steps) if n % REPLICAS == i] for i in range(REPLICAS)}


def run(seed: int, mode: str) -> tuple[float, int, int]:
    """One job to its end: (accuracy, kills, micro-batches skipped)."""
    fails = mode in POLICIES and mode != "undisturbed"
    failures = plan_failures() if fails else {f"r{i}": [] for i in range(REPLICAS)}
    common = {"ACCURACY_SEED": str(seed), "ACCURACY_POLICY": POLICIES.get(mode, "constant")}
    if mode in FORMS:
        common |= {"FABRIC_EXCHANGE": mode, "FABRIC_DATA_PLANE": "tcp"}
    kills = 0
    with ForkedFleet(__file__, REPLICAS) as fleet:

        def start(replica: str) -> None:
            points = ",".join(f"forward@{step}=kill" for step in failures[replica])
            fleet.start(replica, FABRIC_TEST_POINTS=points, **common)

        for replica in failures:
            start(replica)
        deadline = time.monotonic() + RUN_S
        while any(child.poll() != 0 for child in fleet.trainers.values()):
            for replica, child in list(fleet.trainers.items()):
                code = child.poll()
                if code == -signal.SIGKILL and failures[replica]:
                    kills += 1
                    failures[replica].pop(0)
                    start(replica)
                elif code == 75:
                    start(replica)
                elif code not in (None, 0):
                    fleet.fail(f"{replica} ended with {code}")
            if time.monotonic() > deadline:
                fleet.fail(f"seed {seed}, {mode}: not done within {RUN_S:g} s")
            time.sleep(0.01)
        outs = [json.loads((fleet.folder / f"{replica}.json").read_text()) for replica in failures]
        if len({out["digest"] for out in outs}) != 1:
            fleet.fail(f"seed {seed}, {mode}: the replicas ended with different states")
        return outs[0]["accuracy"], kills, fleet.skipped()


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("--exchange", action="store_true", help="undisturbed jobs alone")
    modes = ("undisturbed", *FORMS) if parser.parse_args().exchange else (*POLICIES, *FORMS)
    begin()
    torch.set_num_threads(1)
    found: dict[str, list[float]] = {mode: [] for mode in modes}
    rows, kills, skipped = [], 0, 0
    for seed in SEEDS:
        row: list[object] = [seed]
        for mode, accuracies in found.items():
            accuracy, died, left_out = run(seed, mode)
            accuracies.append(accuracy)
            kills += died
            skipped += left_out if mode == "shrink" else 0
            row += [f"{accuracy:.2f} %", died, left_out]
        rows.append(row)
        say(f"seed {seed}: " + ", ".join(f"{mode} {values[-1]:.2f} %" for mode, values in found.items()))
    columns = ["seed"]
    for mode in modes:
        columns += [mode, "kills", "skipped"]
    table(f"Held-out accuracy after {STEPS} steps, kills and micro-batches skipped", columns, rows)
    base = found["undisturbed"]
    spread = max(base) - min(base)

    def difference(mode: str) -> float:
        return statistics.mean(a - b for a, b in zip(found[mode], base, strict=True))

    for mode in (mode for mode in modes if mode not in ("undisturbed", "shrink")):
        verdict(
            f"{mode} against undisturbed, points, within the seeds' spread",
            abs(difference(mode)),
            at_most=spread,
        )
    figures = {
        **{f"{mode}_minus_undisturbed": round(difference(mode), 4) for mode in modes[1:]},
        "seed_spread": round(spread, 4),
        "kills": kills,
        "shrink_skipped_share": round(skipped / (len(SEEDS) * STEPS * 12), 4),
    }
    finish(figures)


if __name__ == "__main__":
    main()
