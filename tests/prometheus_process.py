"""A real Prometheus for a test: configuration and alert rules of ops/prometheus, with other addresses.

The server listens on loopback, keeps its data in a folder of the test, and ends with the test.
"""

import json
import os
import shutil
import subprocess
import urllib.parse
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from etcd_process import die_with_parent, free_ports, wait_until

OPS = Path(__file__).parent.parent / "ops"
HOW_TO_GET_ONE = (
    "no prometheus and promtool on PATH: install your distribution's prometheus package, or put the programs "
    "of a release archive on PATH (on Debian, as root: ops/dev/ensure-prometheus.sh)"
)


def require_prometheus() -> str:
    """Return the path of prometheus. Without it the test is skipped, and under ``CI=true`` it fails."""
    path = shutil.which("prometheus")
    if path is None or shutil.which("promtool") is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(HOW_TO_GET_ONE)
    return path


class Prometheus:
    """One server, which scrapes ``targets``: addresses by the name of a scrape in prometheus.yml."""

    def __init__(self, folder: Path, targets: dict[str, list[str]]) -> None:
        program = require_prometheus()
        folder.mkdir()
        self.url = f"http://127.0.0.1:{free_ports(1)[0]}"
        (folder / "prometheus.yml").write_text(yaml.safe_dump(_configuration(targets)))
        command = [*die_with_parent(), program, f"--config.file={folder}/prometheus.yml"]
        command += [f"--storage.tsdb.path={folder}/data", f"--web.listen-address={self.url[7:]}"]
        self._log = folder / "prometheus.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def __enter__(self) -> "Prometheus":
        wait_until(self._is_ready, "Prometheus to be ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def ask(self, path: str, **query: str) -> Any:
        """Return the data of an answer of Prometheus' API."""
        with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}") as answer:
            return json.load(answer)["data"]

    def query(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Return the labels and the value of every series of ``expression``, as of now."""
        found = self.ask("query", query=expression)["result"]
        return [(series["metric"], float(series["value"][1])) for series in found]

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=2):
            return True
        return False


def _configuration(targets: dict[str, list[str]]) -> dict[str, Any]:
    """Return prometheus.yml with these addresses, a scrape of 4 Hz and the rules' absolute path."""
    shipped = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())
    shipped["global"] = {"scrape_interval": "250ms", "evaluation_interval": "250ms"}
    shipped["rule_files"] = [str(OPS / "prometheus" / name) for name in shipped["rule_files"]]
    kept = [scrape for scrape in shipped["scrape_configs"] if scrape["job_name"] in targets]
    for scrape in kept:
        scrape.pop("file_sd_configs", None)
        scrape["static_configs"] = [{"targets": targets[scrape["job_name"]]}]
    return {**shipped, "scrape_configs": kept}
