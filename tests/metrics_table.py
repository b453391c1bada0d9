"""Write docs/metrics.md from the metrics themselves: ``python tests/metrics_table.py``."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from fabric.ckpt_server.server.metrics import CkptMetrics
from fabric.lighthouse.history.recovery import Absence, RecoveryRecord
from fabric.lighthouse.telemetry import JobGauges, LighthouseMetrics, ReplicaTrouble
from fabric.model import HostFailure

PAGE = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD = """# Metrics

Each lighthouse and each checkpoint server answers `GET /metrics` in Prometheus' text format
([http.md](http.md)). Some metrics exist only after what they count has happened. `_total` ends a counter's
name; others are gauges, but for two histograms. Each metric of a job also has the label `job`.
`python tests/metrics_table.py` writes this page.
"""


def of_lighthouse() -> str:
    """Return a scrape of a lighthouse, after each kind of event has been counted."""
    metrics = LighthouseMetrics()
    absent = Absence("r1", "down", "its process died", 1.0, "10.0.0.1", False)
    trouble = ReplicaTrouble("r1", "slow", "10.0.0.1", "its rank")
    more = {"ledger": {"training": 1.0}, "slowdowns": {"rank": 1}, "troubles": [trouble]}
    more |= {"failures": [HostFailure("r1", "10.0.0.1", 1, 1.0)]}
    gauges = JobGauges("job", absent=[absent], recoverable_step=1, recoverable_age_seconds=1.0, **more)
    metrics.observe(lambda: True, lambda: [gauges])
    metrics.recovery(
        "job", RecoveryRecord(1, "death", "", 1, 1.0, epoch_committed=1.1, links_up=1.2, step_committed=1.3)
    )
    metrics.event("job", "epoch")
    metrics.evicted("job", 1)
    metrics.record_write("job", "written", 0.1)
    return metrics.render().decode()


def of_checkpoint_server() -> str:
    """Return a scrape of a server that holds a snapshot and a gradient, and has written a checkpoint."""
    content = SimpleNamespace(step=1, taken=time.monotonic())
    slots = SimpleNamespace(contents=lambda _: [content], slots=list)
    durable: Any = SimpleNamespace(newest=SimpleNamespace(step=1), seconds=1.0, failures=0)
    trainer: Any = SimpleNamespace(state="running")
    rank: Any = SimpleNamespace(slots=slots, trainer=trainer, durable=durable)
    return CkptMetrics({0: rank}).render().decode()


def families(text: str) -> Iterator[Metric]:
    yield from (x for x in text_string_to_metric_families(text) if not x.name.endswith("_created"))


def sample(family: Metric) -> str:
    return family.name + "_total" if family.type == "counter" else family.name


def labels(family: Metric) -> str:
    shown = [f"`{x}`" for x in sorted({x for s in family.samples for x in s.labels} - {"le", "job"})]
    return ", ".join(shown) + (" (histogram)" if family.type == "histogram" else "")


def table(text: str) -> str:
    """Return a table with a row for each metric of a scrape."""
    rows = [f"| `{sample(x)}` | {labels(x)} | {x.documentation} |" for x in families(text)]
    return "\n".join(["| metric | labels | meaning |", "|---|---|---|", *sorted(rows)])


def page() -> str:
    return (
        f"{HEAD}\n## Lighthouse\n\n{table(of_lighthouse())}\n\n"
        f"## Checkpoint server\n\n{table(of_checkpoint_server())}\n"
    )


if __name__ == "__main__":
    PAGE.write_text(page())
