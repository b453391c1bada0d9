"""Recipes in ops/ agree with the commands, settings and metrics that they name. None of them is run here."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from fabric.ckpt_server.__main__ import parse
from fabric.ckpt_server.durable.dispatch import Dispatch
from fabric.ckpt_server.memory import Memory
from fabric.ckpt_server.metrics import Metrics as CkptMetrics
from fabric.cli.main import cli
from fabric.lighthouse.metrics import JobGauges
from fabric.lighthouse.metrics import Metrics as LighthouseMetrics
from fabric.lighthouse.recovery import Recovery
from fabric.runtime.config import Settings, parse_replicas

OPS = Path(__file__).resolve().parents[2] / "ops"
DOCS = OPS.parent / "docs"
FILES = sorted(path for path in OPS.rglob("*") if path.is_file() and path.name != "README.md")
KUBERNETES = sorted((OPS / "kubernetes").glob("*.yaml"))


def documents(path: Path) -> list[dict[str, Any]]:
    return [d for d in yaml.safe_load_all(path.read_text()) if d is not None]


def walk(value: Any) -> Iterator[dict[str, Any]]:
    """Every mapping in a document."""
    if isinstance(value, dict):
        yield value
        for child in value.values():
            yield from walk(child)
    elif isinstance(value, list):
        for child in value:
            yield from walk(child)


# --- commands ---------------------------------------------------------------------------------------------


def command_lines() -> list[tuple[str, list[str]]]:
    """(file, arguments after ``fabric``) of every command line of ours."""
    found = []
    for path in FILES:
        if path.suffix == ".yaml":
            for mapping in (m for d in documents(path) for m in walk(d)):
                for key in ("args", "command"):
                    words = mapping.get(key)
                    if isinstance(words, list) and words and words[0] in ("lighthouse", "ckpt-server"):
                        found.append((path.name, [str(word) for word in words]))
        for line in path.read_text().splitlines():
            command = re.match(r"ExecStart=\S*/fabric (.*)", line)
            if command:
                found.append((path.name, shlex.split(command[1])))
    return found


def test_there_are_command_lines_of_both_services():
    used = {arguments[0] for _, arguments in command_lines()}
    assert used == {"lighthouse", "ckpt-server"} and len(command_lines()) >= 5


@pytest.mark.parametrize("name, arguments", command_lines(), ids=lambda x: x if isinstance(x, str) else "")
def test_our_own_parser_takes_every_command_line(name, arguments):
    if arguments[0] == "ckpt-server":
        parse(arguments[1:])
        return
    command = cli.get_command(click.Context(cli), arguments[0])
    assert command is not None
    command.make_context(arguments[0], list(arguments[1:]))


def test_trainers_are_started_politely():
    """Every torchrun of ours starts its script with ``fabric run``."""
    found = [
        re.sub(r"[\[\],\"]", "", line)
        for path in FILES
        for line in path.read_text().splitlines()
        if re.search(r"\btorchrun\b.*\btrain\.py\b", line)
    ]
    assert len(found) == 3
    assert all(re.search(r"--no-python \S*fabric run train\.py", line) for line in found), found


# --- settings ---------------------------------------------------------------------------------------------


def test_every_setting_that_is_named_exists():
    known = {f"FABRIC_{field.name.upper()}" for field in fields(Settings)}
    used = {word for path in FILES for word in re.findall(r"\bFABRIC_[A-Z_]*[A-Z]\b", path.read_text())}
    assert used and used <= known


def test_replica_ranges_are_ones_that_can_be():
    text = (OPS / "kubernetes" / "trainer-jobset.yaml").read_text()
    (jobset,) = documents(OPS / "kubernetes" / "trainer-jobset.yaml")
    (job,) = jobset["spec"]["replicatedJobs"]
    (value,) = re.findall(r"FABRIC_REPLICAS, value: \"(.*?)\"", text)
    assert parse_replicas(value)[1] == job["replicas"]


# --- Kubernetes -------------------------------------------------------------------------------------------


def everything() -> list[dict[str, Any]]:
    return [d for path in KUBERNETES for d in documents(path)]


def test_the_kustomization_lists_every_file_but_the_example():
    listed = next(d for d in everything() if d["kind"] == "Kustomization")["resources"]
    there = {path.name for path in KUBERNETES} - {"kustomization.yaml", "trainer-jobset.yaml"}
    assert set(listed) == there


def test_selectors_find_pods_that_exist():
    labels = [m["labels"] for d in everything() for m in walk(d) if isinstance(m.get("labels"), dict)]
    for document in everything():
        spec = document.get("spec", {})
        for mapping in walk(spec):
            wanted = mapping.get("matchLabels")
            if wanted is not None:
                assert any(wanted.items() <= found.items() for found in labels), (document["kind"], wanted)
        if document["kind"] == "Service":
            assert any(spec["selector"].items() <= found.items() for found in labels)


def test_the_lighthouse_may_ask_the_checkpoint_servers():
    """Without that every diagnosis would be "unknown"."""
    (policy,) = (
        d for d in everything() if d["kind"] == "NetworkPolicy" and d["metadata"]["name"] == "fabric-trainer"
    )
    allowed = [x["podSelector"]["matchLabels"] for rule in policy["spec"]["ingress"] for x in rule["from"]]
    names = {x["app.kubernetes.io/name"] for x in allowed}
    assert names == {"fabric-trainer", "fabric-lighthouse"}


def test_containers_mount_what_their_pod_has_and_probe_ports_that_they_name():
    pods = [m for d in everything() for m in walk(d) if "containers" in m]
    assert len(pods) == 3
    for pod in pods:
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounts <= volumes | {"data"}, "data is the StatefulSet's own claim"
            ports = {port["name"] for port in container.get("ports", [])}
            for mapping in walk(container):
                if "httpGet" in mapping:
                    assert mapping["httpGet"]["port"] in ports


def test_replicas_and_addresses_agree():
    """As many etcds and lighthouses are named in command lines as there are."""
    sets = {d["metadata"]["name"]: d["spec"]["replicas"] for d in everything() if d["kind"] == "StatefulSet"}
    text = "\n".join(path.read_text() for path in KUBERNETES)
    for name, count in sets.items():
        named = {int(index) for index in re.findall(rf"{name}-(\d+)\.{name}:", text)}
        assert named == set(range(count)), name


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_kustomize_builds_it():
    command = ["kubectl", "kustomize", str(OPS / "kubernetes")]
    built = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert built.returncode == 0, built.stderr
    kinds = {d["kind"] for d in yaml.safe_load_all(built.stdout)}
    assert {"StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= kinds


# --- compose ----------------------------------------------------------------------------------------------


def test_compose_names_only_what_it_has():
    (compose,) = documents(OPS / "compose" / "compose.yaml")
    services = compose["services"]
    assert sum(name.startswith("etcd") for name in services) == 3
    assert sum(name.startswith("lighthouse") for name in services) == 2
    for service in services.values():
        assert set(service.get("depends_on", [])) <= set(services)
        assert set(service.get("networks", [])) <= set(compose["networks"])
        for volume in service.get("volumes", []):
            source = volume.partition(":")[0]
            inside = (OPS / "compose" / source).resolve()
            assert source in compose["volumes"] or inside.is_file(), source
        for argument in map(str, service.get("command", [])):
            for host in re.findall(r"(etcd\d+|lighthouse\d+):\d+", argument):
                assert host in services
    (scrape,) = yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    (targets,) = scrape["static_configs"]
    assert {target.partition(":")[0] for target in targets["targets"]} <= set(services)
    # Alerts and panels go by the label "job", which is the job's name only where it is not renamed.
    assert scrape["honor_labels"] is True


# --- metrics ----------------------------------------------------------------------------------------------


class StillTrainer:
    state = "running"


def known_metrics() -> set[str]:
    """Every sample's name, of both services, with something of each kind counted."""
    lighthouse = LighthouseMetrics()
    gauges = JobGauges("job", 1, 1, 1, 1, 1, 1.0, ledger={"training": 1.0})
    lighthouse.observe(lambda: True, lambda: [gauges])
    phases = Recovery(1, "death", "", 1, 1.0, epoch_committed=1.1, links_up=1.2, step_committed=1.3)
    lighthouse.recovery("job", phases)
    lighthouse.event("job", "epoch")
    lighthouse.evicted("job", 1)
    lighthouse.record_write("job", "written", 0.1)
    memory = Memory()
    text = (
        lighthouse.render().decode()
        + CkptMetrics(memory, StillTrainer(), Dispatch("job", "r0", memory)).render().decode()
    )
    names = set(re.findall(r"^([a-z_]+)(?:\{| )", text, flags=re.MULTILINE))
    # Those of a slot exist once there is one.
    source = (OPS.parent / "fabric" / "ckpt_server" / "metrics.py").read_text()
    for suffix in re.findall(r"fabric_ckpt_\{kind\}(_\w+)\"", source):
        names |= {f"fabric_ckpt_{kind}{suffix}" for kind in ("snapshot", "gradient")}
    return names


def used_metrics(text: str) -> set[str]:
    return set(re.findall(r"\bfabric_(?:lighthouse|ckpt)_[a-z_]+", text))


def test_rules_and_dashboard_use_metrics_that_exist():
    rules = (OPS / "prometheus" / "rules.yml").read_text()
    dashboard = (OPS / "grafana" / "fabric.json").read_text()
    assert len(used_metrics(rules)) >= 5 and len(used_metrics(dashboard)) >= 8
    assert used_metrics(rules) | used_metrics(dashboard) <= known_metrics()


def test_every_alert_has_a_severity_and_a_section_in_the_runbook():
    (group,) = yaml.safe_load((OPS / "prometheus" / "rules.yml").read_text())["groups"]
    headings = re.findall(r"^## (.*)$", (DOCS / "runbook.md").read_text(), flags=re.MULTILINE)
    anchors = {heading.lower().replace(" ", "-") for heading in headings}
    for rule in group["rules"]:
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert page == "docs/runbook.md" and anchor in anchors, rule["alert"]
        assert rule["labels"]["severity"] in ("warning", "critical")


def test_the_dashboard_has_a_place_for_each_panel():
    panels = json.loads((OPS / "grafana" / "fabric.json").read_text())["panels"]
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
        taken |= cells
    assert len({panel["id"] for panel in panels}) == len(panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", str(OPS / "prometheus" / "prometheus.yml")),
        ("check", "rules", str(OPS / "prometheus" / "rules.yml")),
        # Who alerts, and who must not: a job that is complete stands still for ever.
        ("test", "rules", str(Path(__file__).with_name("rules_test.yml"))),
    ],
    ids=" ".join,
)
def test_promtool_agrees(arguments):
    checked = subprocess.run(
        ["promtool", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr + checked.stdout


# --- the rest ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", sorted((OPS / "systemd").glob("*.service")), ids=lambda path: path.name)
def test_systemd_understands_the_units(unit, tmp_path):
    # The programs lie elsewhere on the machines that these are for.
    text = re.sub(r"/opt/fabric/bin/\w+", "/bin/true", unit.read_text())
    copy = tmp_path / unit.name
    copy.write_text(text)
    command = ["systemd-analyze", "verify", str(copy)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in checked.stderr.splitlines() if unit.stem.rstrip("@") in line]
    assert checked.returncode == 0 and not said, checked.stderr


def test_the_image_copies_what_there_is_and_finds_its_torch():
    text = (OPS / "docker" / "Dockerfile").read_text()
    sources = [
        x for line in re.findall(r"^COPY (?!--from)(.+)$", text, re.MULTILINE) for x in line.split()[:-1]
    ]
    assert "fabric" in sources and all((OPS.parent / source).exists() for source in sources)
    pinned = re.search(r"\$\((grep [^)]*constraints\.txt)\)", text)
    assert pinned is not None
    found = subprocess.run(
        ["sh", "-c", pinned[1]], cwd=OPS.parent, capture_output=True, text=True, timeout=60, check=True
    )
    assert re.fullmatch(r"torch==[0-9.]+\n", found.stdout), "exactly one torch, of one version"


@pytest.mark.parametrize(
    "script", [p for p in FILES if p.suffix in (".sh", ".sbatch")], ids=lambda path: path.name
)
def test_shells_can_read_the_scripts(script):
    shell = "bash" if "bash" in script.read_text().splitlines()[0] else "sh"
    checked = subprocess.run(
        [shell, "-n", str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stderr
