"""Recipes in ops/ agree with the commands, settings and metrics that they name. These tests run no recipe."""

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import metrics_table
import pytest
import yaml
from msgspec.structs import fields
from prometheus_process import require_prometheus

from fabric.ckpt_server.__main__ import parse
from fabric.cli.main import cli
from fabric.lighthouse.http.routes import OPEN_PATHS
from fabric.runtime.config import Settings, parse_replicas

OPS = Path(__file__).resolve().parents[2] / "ops"
DOCS = OPS.parent / "docs"
# test_helm.py has the templates of the chart, which only helm can read.
FILES = sorted(
    path
    for path in OPS.rglob("*")
    if path.is_file()
    and path.name != "README.md"
    and OPS / "helm" not in path.parents
    and path.parent.name != "__pycache__"
)
KUBERNETES = sorted((OPS / "kubernetes").rglob("*.yaml"))
BASE = sorted((OPS / "kubernetes" / "base").glob("*.yaml"))
JOB = OPS / "kubernetes" / "trainer-job.yaml"
HOSTS_JOB = OPS / "kubernetes" / "replica-job.yaml"
OUR_COMMANDS = ("lighthouse", "ckpt-server", "launch")
OVERLAYS = ["", "overlays/tls", "overlays/external-etcd", "overlays/monitoring"]


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
    """Return (file, arguments after ``fabric``) of every `fabric` command line."""
    found = []
    for path in FILES:
        if path.suffix == ".yaml":
            for mapping in (m for d in documents(path) for m in walk(d)):
                for key in ("args", "command"):
                    words = mapping.get(key)
                    if isinstance(words, list) and words[:1] == ["fabric"]:
                        words = words[1:]
                    if isinstance(words, list) and words and words[0] in OUR_COMMANDS:
                        found.append((path.name, [str(word) for word in words]))
        for line in path.read_text().splitlines():
            command = re.match(r"ExecStart=\S*/fabric (.*)", line)
            if command:
                found.append((path.name, shlex.split(command[1])))
    return found


def test_the_manifests_have_command_lines_of_lighthouse_server_and_launcher():
    used = {arguments[0] for _, arguments in command_lines()}
    assert used == {"lighthouse", "ckpt-server", "launch"} and len(command_lines()) >= 7


@pytest.mark.parametrize("name, arguments", command_lines(), ids=lambda x: x if isinstance(x, str) else "")
def test_our_own_parser_takes_every_command_line(name, arguments):
    if arguments[0] == "ckpt-server":
        parse(arguments[1:])
        return
    command = cli.get_command(click.Context(cli), arguments[0])
    assert command is not None
    command.make_context(arguments[0], list(arguments[1:]))


def test_a_trainer_gets_the_token_of_its_own_job_alone():
    """Every trainer had the lighthouse's own token, which opens every job."""
    (job,) = [document for document in documents(JOB) if document["kind"] == "Job"]
    mounted = [m["secret"] for m in walk(job) if isinstance(m.get("secret"), dict)]
    name = job["metadata"]["name"]
    assert [(x["secretName"], x["items"]) for x in mounted] == [
        ("fabric-job-tokens", [{"key": name, "path": "token"}])
    ]
    commands = [*command_lines(), *(("compose.yaml", words) for words in compose_lighthouses())]
    lighthouses = [words for _, words in commands if words[0] == "lighthouse"]
    assert len(lighthouses) == 7 and all("--job-tokens" in " ".join(words) for words in lighthouses)
    trainer, script = (OPS / "systemd" / "fabric-trainer@.service", OPS / "slurm" / "train.sbatch")
    assert "FABRIC_TOKEN_FILE=/etc/fabric/job-token\n" in trainer.read_text()
    assert "/etc/fabric/token" not in trainer.read_text()
    assert "FABRIC_TOKEN_FILE=$HOME/.fabric/gpt-7" in script.read_text()


def compose_lighthouses() -> list[list[str]]:
    (compose,) = documents(OPS / "compose" / "compose.yaml")
    return [s["command"] for s in compose["services"].values() if s.get("command", [""])[0] == "lighthouse"]


def test_a_new_token_reaches_the_processes_of_every_unit():
    """systemd copies a credential once, at the start of a unit: a replaced token reached no process."""
    for unit in UNITS:
        settings = [line for line in unit.read_text().splitlines() if not line.startswith("#")]
        assert not any("LoadCredential" in line or "%d" in line for line in settings), unit
        assert any("/etc/fabric/" in line for line in settings), unit


def test_no_recipe_and_no_page_puts_a_secret_on_a_command_line():
    recipes = (path for path in OPS.rglob("*") if path.is_file() and path.parent.name != "__pycache__")
    for path in (*recipes, *DOCS.rglob("*.md"), OPS.parent / "README.md"):
        text = path.read_text()
        assert "--from-literal" not in text, path
        shown = r"(Bearer (\$|[0-9a-f]{16})|(--header|-H)[ =]['\"]?Authorization|--(pass|password|token)[ =])"
        found = re.search(
            rf"^ *[^#\n|]*\b(curl|wget|fabric|etcdctl|kubectl|helm)\b.*{shown}", text, re.MULTILINE
        )
        assert found is None, (path, found)


def test_trainers_are_started_by_the_launcher_that_knows_their_exit_codes():
    """torchrun turns every exit code into 1."""
    for path in FILES:
        if path.suffix != ".md":
            uses = [line for line in path.read_text().splitlines() if re.search(r"\btrain\.py\b", line)]
            assert all(re.search(r"fabric,? launch\b", line) for line in uses), path


# --- settings ---------------------------------------------------------------------------------------------


def test_every_setting_that_is_named_exists():
    known = {f"FABRIC_{field.name.upper()}" for field in fields(Settings)}
    used = {word for path in FILES for word in re.findall(r"\bFABRIC_[A-Z_]*[A-Z]\b", path.read_text())}
    assert used and used <= known


def test_replica_ranges_in_manifests_are_possible():
    (value,) = re.findall(r"FABRIC_REPLICAS, value: \"(.*?)\"", JOB.read_text())
    assert (
        parse_replicas(value)[1]
        == trainer_job()["spec"]["completions"]
        == trainer_job()["spec"]["parallelism"]
    )


# --- Kubernetes -------------------------------------------------------------------------------------------


def trainer_job() -> dict[str, Any]:
    (job,) = documents(JOB)
    return job


def everything() -> list[dict[str, Any]]:
    """Return the objects of the base and the example; overlays are read after their build."""
    return [d for path in [*BASE, JOB, HOSTS_JOB] for d in documents(path)]


def pods() -> list[tuple[str, dict[str, Any]]]:
    """Return (kind and name of the owner, the pod's spec) of every pod."""
    return [
        (f"{d['kind']} {d['metadata']['name']}", m)
        for d in everything()
        for m in walk(d)
        if "containers" in m
    ]


def containers(pod: dict[str, Any]) -> list[dict[str, Any]]:
    return [*pod["containers"], *pod.get("initContainers", [])]


def of_kind(kind: str, name: str) -> dict[str, Any]:
    return next(d for d in everything() if d["kind"] == kind and d["metadata"]["name"] == name)


def test_the_base_lists_every_file_of_it():
    listed = next(d for d in everything() if d["kind"] == "Kustomization")["resources"]
    assert set(listed) == {path.name for path in BASE} - {"kustomization.yaml"}


def test_selectors_find_pods_that_exist():
    labels = [m["labels"] for d in everything() for m in walk(d) if isinstance(m.get("labels"), dict)]
    monitors = documents(OPS / "kubernetes" / "overlays" / "monitoring" / "monitors.yaml")
    for document in [*everything(), *monitors]:
        spec = document.get("spec", {})
        for mapping in walk(spec):
            wanted = mapping.get("matchLabels")
            if wanted is not None:
                assert any(wanted.items() <= found.items() for found in labels), (document["kind"], wanted)
        if document["kind"] == "Service":
            assert any(spec["selector"].items() <= found.items() for found in labels)


def allowed(policy: dict[str, Any]) -> set[str]:
    """The names of the pods that a NetworkPolicy lets in."""
    peers = [peer for rule in policy["spec"]["ingress"] for peer in rule["from"]]
    return {peer["podSelector"]["matchLabels"]["app.kubernetes.io/name"] for peer in peers}


def test_only_pods_that_need_it_can_reach_a_pod():
    """The lighthouse must reach the checkpoint servers, or every diagnosis would be "unknown"."""
    assert allowed(of_kind("NetworkPolicy", "fabric-trainer")) == {"fabric-trainer", "fabric-lighthouse"}
    assert allowed(of_kind("NetworkPolicy", "fabric-lighthouse")) == {"fabric-trainer", "fabric-lighthouse"}
    assert allowed(of_kind("NetworkPolicy", "fabric-etcd")) == {"fabric-lighthouse", "fabric-etcd"}


def test_containers_mount_what_their_pod_has_and_probe_ports_that_they_name():
    assert len(pods()) == 4
    for _, pod in pods():
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        for container in containers(pod):
            mounts = {mount["name"] for mount in container.get("volumeMounts", [])}
            assert mounts <= volumes | {"data"}, "data is the StatefulSet's own claim"
            ports = {port["name"] for port in container.get("ports", [])}
            for mapping in walk(container):
                if "httpGet" in mapping:
                    assert mapping["httpGet"]["port"] in ports


@pytest.mark.parametrize("name, pod", pods(), ids=lambda x: x if isinstance(x, str) else "")
def test_every_pod_may_run_where_pods_are_restricted(name, pod):
    """Every pod meets the standard "restricted", and lacks further rights that it does not need."""
    (namespace,) = (d for d in everything() if d["kind"] == "Namespace")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    whole = pod["securityContext"]
    assert whole["runAsNonRoot"] is True and whole["runAsUser"] > 0
    assert whole["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in containers(pod):
        own = container["securityContext"]
        assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}
        assert own["readOnlyRootFilesystem"] is True
        assert "memory" in container["resources"]["limits"], container["name"]


@pytest.mark.parametrize("name, pod", pods(), ids=lambda x: x if isinstance(x, str) else "")
def test_pods_of_a_kind_do_not_share_a_node(name, pod):
    (spread,) = pod["topologySpreadConstraints"]
    assert spread["topologyKey"] == "kubernetes.io/hostname" and spread["maxSkew"] == 1
    assert spread["whenUnsatisfiable"] == ("ScheduleAnyway" if name.startswith("Job") else "DoNotSchedule")


def test_services_are_probed_with_time_to_answer():
    """The kubelet's default of one second is shorter than a lighthouse's wait for a hanging store."""
    probed = {}
    for _, pod in pods():
        for container in containers(pod):
            found = {k: v for k, v in container.items() if k.endswith("Probe")}
            assert all(probe["timeoutSeconds"] >= 5 for probe in found.values()), container["name"]
            probed[container["name"]] = {k: v["httpGet"]["path"] for k, v in found.items()}
    assert probed == {
        "etcd": {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/health"},
        "lighthouse": {"livenessProbe": "/livez", "readinessProbe": "/readyz"},
        "ckpt-server": {"startupProbe": "/healthz", "livenessProbe": "/healthz"},
        # Trainers need no probe, because fabric itself watches them.
        "trainer": {},
    }


def test_the_lighthouse_has_the_paths_that_are_probed():
    assert {"/healthz", "/livez", "/readyz"} <= OPEN_PATHS


def test_a_mistake_ends_one_replica_and_a_lost_pod_none():
    spec = trainer_job()["spec"]
    pod = spec["template"]["spec"]
    fail, ignore = spec["podFailurePolicy"]["rules"]
    names = {container["name"] for container in pod["containers"]}
    assert fail["action"] == "FailIndex" and 1 in fail["onExitCodes"]["values"]
    assert not {0, 75, 137, 143} & set(fail["onExitCodes"]["values"])
    assert fail["onExitCodes"]["containerName"] in names
    assert ignore["action"] == "Ignore" and ignore["onPodConditions"][0]["type"] == "DisruptionTarget"
    # The Kubernetes API demands these values for a job with a pod failure policy.
    assert pod["restartPolicy"] == "Never" and spec["completionMode"] == "Indexed"
    assert "backoffLimit" not in spec and spec["podReplacementPolicy"] == "Failed"


def test_a_replica_of_several_hosts_has_a_pod_for_each_and_the_policy_of_the_other_example():
    (job,), other = documents(HOSTS_JOB), trainer_job()["spec"]
    spec = job["spec"]
    (trainer,) = spec["template"]["spec"]["containers"]
    launch = cli.get_command(click.Context(cli), "launch")
    with launch.make_context("launch", trainer["command"][2:]) as context:
        assert context.params["nodes"] == spec["completions"] == spec["parallelism"]
        assert context.params["stop_s"] < spec["template"]["spec"]["terminationGracePeriodSeconds"]
    for name in ("completionMode", "podFailurePolicy", "backoffLimitPerIndex", "podReplacementPolicy"):
        assert spec[name] == other[name]
    settings = {entry["name"]: entry.get("value") for entry in trainer["env"]}
    (example,) = other["template"]["spec"]["containers"]
    alike = {entry["name"]: entry.get("value") for entry in example["env"]}
    assert {name: alike[name] for name in settings if name != "FABRIC_REPLICA"} == {
        name: value for name, value in settings.items() if name != "FABRIC_REPLICA"
    }
    # Drained, the other pods would finish, and Kubernetes would not start them again.
    assert "lifecycle" not in trainer and not any("leave-file" in word for word in trainer["command"])


def test_a_pod_that_has_to_go_is_drained_first():
    pod = trainer_job()["spec"]["template"]["spec"]
    (trainer,) = pod["containers"]
    shell, option, script = trainer["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("sh", "-c")
    environment = {entry["name"] for entry in trainer["env"]}
    assert set(re.findall(r"\$(\w+)", script)) <= environment
    drain = shlex.split(re.findall(r"fabric (drain .*?) &&", script)[0])
    cli.get_command(click.Context(cli), "drain").make_context("drain", drain[1:])
    assert {"FABRIC_LIGHTHOUSE", "FABRIC_JOB", "FABRIC_TOKEN_FILE"} <= environment
    assert pod["terminationGracePeriodSeconds"] >= 300
    assert trainer["command"][:3] == ["fabric", "launch", "--leave-file=$(LEAVE_FILE)"]


def test_the_sidecar_and_its_trainer_agree():
    pod = trainer_job()["spec"]["template"]["spec"]
    (trainer,), (server,) = pod["containers"], pod["initContainers"]
    told = {entry["name"]: entry.get("value") for entry in trainer["env"]}
    options = dict(argument[2:].split("=", 1) for argument in server["args"][1:])
    assert options["job"] == told["FABRIC_JOB"] and options["replica"] == told["FABRIC_REPLICA"]
    assert options["run-dir"] == told["FABRIC_RUN_DIR"] and options["lighthouse"] == told["FABRIC_LIGHTHOUSE"]
    assert int(options["port"]) == server["ports"][0]["containerPort"]
    assert pod["shareProcessNamespace"] is True and server["restartPolicy"] == "Always"


def test_images_are_pinned_to_a_version():
    (images,) = (d["images"] for d in everything() if d["kind"] == "Kustomization")
    versioned = {image["name"] for image in images if image.get("newTag", "latest") != "latest"}
    for _, pod in pods():
        for container in containers(pod):
            name, _, tag = container["image"].rpartition("/")[2].partition(":")
            assert (tag and tag != "latest") or name in versioned, container["image"]


def test_every_etcd_forgets_old_revisions_and_knows_its_quota():
    commands = [
        words
        for path in FILES
        if path.suffix == ".yaml"
        for d in documents(path)
        for m in walk(d)
        if isinstance(words := m.get("command"), list) and words and words[0] == "etcd"
    ]
    assert len(commands) == 3 + 2, "of compose, of the base and of the TLS overlay"
    for words in commands:
        assert {"--auto-compaction-mode=periodic", "--auto-compaction-retention=1h"} <= set(words)
        (quota,) = [word for word in words if word.startswith("--quota-backend-bytes=")]
        assert int(quota.partition("=")[2]) == 2 << 30


def test_replicas_and_addresses_agree():
    """The command lines name as many etcds and lighthouses as the recipes start."""
    sets = {d["metadata"]["name"]: d["spec"]["replicas"] for d in everything() if d["kind"] == "StatefulSet"}
    for name, count in sets.items():
        for path in KUBERNETES:
            named = {int(index) for index in re.findall(rf"{name}-(\d+)\.{name}:", path.read_text())}
            assert named in (set(), set(range(count))), (path, name)


def built(overlay: str) -> list[dict[str, Any]]:
    command = ["kubectl", "kustomize", str(OPS / "kubernetes" / overlay)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return [d for d in yaml.safe_load_all(done.stdout) if d is not None]


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_builds_it(overlay):
    found = built(overlay)
    kinds = {d["kind"] for d in found}
    assert {"Namespace", "StatefulSet", "Service", "PodDisruptionBudget", "NetworkPolicy"} <= kinds
    assert all(d["metadata"].get("namespace") == "fabric" for d in found if d["kind"] != "Namespace")
    sets = {d["metadata"]["name"]: d["spec"]["template"]["spec"] for d in found if d["kind"] == "StatefulSet"}
    wanted = (
        {"fabric-lighthouse"} if overlay.endswith("external-etcd") else {"fabric-lighthouse", "fabric-etcd"}
    )
    assert set(sets) == wanted
    (lighthouse,) = sets["fabric-lighthouse"]["containers"]
    assert lighthouse["image"] == "fabric:0.1" and lighthouse["args"][0] == "lighthouse"
    cli.get_command(click.Context(cli), "lighthouse").make_context("lighthouse", lighthouse["args"][1:])
    for pod in sets.values():
        volumes = {volume["name"] for volume in pod.get("volumes", [])} | {"data"}
        assert {m["name"] for c in pod["containers"] for m in c["volumeMounts"]} <= volumes
        assert pod["securityContext"]["runAsNonRoot"] is True, "an overlay takes nothing away"


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
def test_with_tls_nothing_is_in_plain_text_but_metrics():
    for document in built("overlays/tls"):
        if document["kind"] != "StatefulSet":
            continue
        (container,) = document["spec"]["template"]["spec"]["containers"]
        words = [*container.get("args", []), *container.get("command", [])]
        plain = [w for w in words if re.search(r"\b(http|etcd)://", w)]
        assert [w.partition("=")[0] for w in plain] in ([], ["--listen-metrics-urls"]), plain
        variables = {e["name"] for e in container["env"]}
        if document["metadata"]["name"] == "fabric-lighthouse":
            assert "FABRIC_TLS" in variables
            for probe in ("livenessProbe", "readinessProbe"):
                # With TLS the probe cannot be HTTP, because the kubelet has no certificate.
                assert "httpGet" not in container[probe]
                _, _, script, path = container[probe]["exec"]["command"]
                compile(script, "probe", "exec")
                assert f"/{path}" in OPEN_PATHS
        else:
            assert {"--client-cert-auth", "--peer-client-cert-auth"} <= set(words)


# --- compose ----------------------------------------------------------------------------------------------


def test_compose_names_only_things_it_defines():
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
            assert source in compose["volumes"] or inside.is_file() or source == "./jobs", source
        for argument in map(str, service.get("command", [])):
            for host in re.findall(r"(etcd\d+|lighthouse\d+):\d+", argument):
                assert host in services
    for scrape in yaml.safe_load((OPS / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]:
        for targets in scrape.get("static_configs", []):
            assert {target.partition(":")[0] for target in targets["targets"]} <= set(services)


def test_every_service_of_compose_is_confined_and_looked_after():
    (compose,) = documents(OPS / "compose" / "compose.yaml")
    for name, service in compose["services"].items():
        assert service["read_only"] is True and service["cap_drop"] == ["ALL"], name
        assert "no-new-privileges:true" in service["security_opt"] and service["mem_limit"], name
        assert service["healthcheck"]["test"][0] == "CMD" and service["restart"] == "always", name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name


# --- Prometheus -------------------------------------------------------------------------------------------


def scrapes() -> list[dict[str, Any]]:
    files = [OPS / "prometheus" / name for name in ("prometheus.yml", "kubernetes.yml")]
    return [job for file in files for job in yaml.safe_load(file.read_text())["scrape_configs"]]


def test_a_jobs_metrics_keep_its_name_wherever_they_are_scraped():
    """Alerts and panels use the label "job", which must keep the job's name in every scrape."""
    monitors = documents(OPS / "kubernetes" / "overlays" / "monitoring" / "monitors.yaml")
    for monitor in monitors:
        (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
        assert endpoint.get("honorLabels", False) is ("etcd" not in monitor["metadata"]["name"])
    for scrape in scrapes():
        assert scrape.get("honor_labels", False) is (scrape["job_name"] != "etcd")


def test_checkpoint_servers_and_etcds_are_scraped_and_may_be():
    """Three panels of the dashboard need the checkpoint servers' data, and one alert needs etcd's."""
    assert {"fabric-lighthouse", "fabric-ckpt", "etcd", "fabric"} == {job["job_name"] for job in scrapes()}
    ports = {}
    for _, pod in pods():
        for container in containers(pod):
            ports |= {port["name"]: port["containerPort"] for port in container.get("ports", [])}
    folder = OPS / "kubernetes" / "overlays" / "monitoring"
    scraped = {
        ports[m["spec"]["podMetricsEndpoints"][0]["port"]] for m in documents(folder / "monitors.yaml")
    }
    (policy,) = documents(folder / "network.yaml")
    (rule,) = policy["spec"]["ingress"]
    assert scraped == {8600, 8700, 2381} == {port["port"] for port in rule["ports"]}
    marked = {
        int(m["annotations"]["prometheus.io/port"])
        for d in everything()
        for m in walk(d)
        if "prometheus.io/port" in (m.get("annotations") or {})
    }
    assert marked == scraped


# --- metrics ----------------------------------------------------------------------------------------------


def known_metrics() -> set[str]:
    """Return the names of all samples of both services."""
    text = metrics_table.of_lighthouse() + metrics_table.of_checkpoint_server()
    return set(re.findall(r"^([a-z_]+)(?:\{| )", text, flags=re.MULTILINE))


def test_the_page_of_metrics_is_that_of_the_code():
    assert metrics_table.PAGE.read_text() == metrics_table.page(), "run python tests/metrics_table.py"


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


# Each alert, and the labels that say whom it is about. An alert about one replica names replica and host.
_ONE_REPLICA = {"job", "replica", "host"}
ALERTS: dict[str, set[str]] = {
    "FabricNoLeader": set(),
    "FabricTwoLeaders": set(),
    "FabricLighthouseMissing": set(),
    "FabricConnectionsRefused": {"instance"},
    "FabricStoreRefusesWrites": set(),
    "FabricStoreFillsUp": {"instance"},
    "FabricStoreWritesFail": {"what", "outcome"},
    "FabricStoreSlow": set(),
    "FabricStepsStandStill": {"job"},
    "FabricEveryLauncherEnded": {"job"},
    "FabricJobFailed": {"job"},
    "FabricReplicaDown": {*_ONE_REPLICA, "why"},
    "FabricMembersMissing": {"job"},  # replicas that this leader has never seen
    "FabricManyEvictions": {"job"},  # a query names its replicas and hosts
    "FabricGoodputLow": {"job"},
    "FabricSnapshotOld": {"job"},
    "FabricDurableFails": {*_ONE_REPLICA, "why"},
    "FabricReplicaSlow": {*_ONE_REPLICA, "why"},
    "FabricJobSlow": {"job"},
    "FabricSlowdownCostly": {"job"},
    "FabricSlowAgain": {"job"},
    "FabricCheckpointServerSilent": _ONE_REPLICA,
}


RULE_TESTS = sorted(Path(__file__).parent.glob("rules*_test.yml"))


def test_each_alert_names_whom_it_is_about_and_its_sentence_is_tested():
    (group,) = yaml.safe_load((OPS / "prometheus" / "rules.yml").read_text())["groups"]
    rules = {rule["alert"]: rule["annotations"]["summary"] for rule in group["rules"]}
    assert {name: set(re.findall(r"\$labels\.(\w+)", text)) for name, text in rules.items()} == ALERTS
    tests = [test for path in RULE_TESTS for test in yaml.safe_load(path.read_text())["tests"]]
    cases = [case for test in tests for case in test.get("alert_rule_test", ())]
    fired = {case["alertname"]: case["exp_alerts"] for case in cases if case["exp_alerts"]}
    assert set(fired) == set(ALERTS)
    for name, alerts in fired.items():
        for alert in alerts:
            assert ALERTS[name] <= alert["exp_labels"].keys(), name
            assert all(
                alert["exp_labels"][label] in alert["exp_annotations"]["summary"] for label in ALERTS[name]
            )


def test_each_alert_still_fires_after_hours_of_its_fault():
    """An alert about missing replicas ended by itself after an hour, and the replica was still away."""
    (day,) = [path for path in RULE_TESTS if "day" in path.name]
    cases = [case for test in yaml.safe_load(day.read_text())["tests"] for case in test["alert_rule_test"]]
    assert all(re.fullmatch("8h|23h", case["eval_time"]) for case in cases)
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(ALERTS)


def test_an_alert_gives_a_count_over_time_as_a_whole_number():
    """``increase`` goes on to the ends of its window, so three evictions were 3.027 evictions."""
    (group,) = yaml.safe_load((OPS / "prometheus" / "rules.yml").read_text())["groups"]
    over_time = {
        rule["alert"]: re.findall(r"{{ ([^{}]*\$value[^{}]*) }}", rule["annotations"]["summary"])
        for rule in group["rules"]
        if "increase(" in rule["expr"] or "_seconds" in rule["expr"]
    }
    shown = {"$value | humanizePercentage", 'printf "%.0f" $value'}
    assert {name: forms for name, forms in over_time.items() if not set(forms) <= shown} == {}


def test_the_dashboard_has_a_position_for_each_panel():
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


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", str(OPS / "prometheus" / "prometheus.yml")),
        ("check", "rules", str(OPS / "prometheus" / "rules.yml")),
        # The rules are tested on jobs that must alert, and on a complete job, which must not.
        *(("test", "rules", str(path)) for path in RULE_TESTS),
    ],
    ids=" ".join,
)
def test_promtool_accepts_the_alert_rules(arguments):
    require_prometheus()
    checked = subprocess.run(
        ["promtool", *arguments],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert checked.returncode == 0, checked.stderr + checked.stdout


# --- the rest ---------------------------------------------------------------------------------------------


UNITS = sorted((OPS / "systemd").glob("*.service"))
needs_systemd = pytest.mark.skipif(
    shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed"
)


def installed(unit: Path, folder: Path) -> Path:
    """Return a copy of the unit with existing programs, because the real paths exist only on target
    machines.
    """
    copy = folder / unit.name
    copy.write_text(re.sub(r"(?<==)/opt/fabric/bin/[\w-]+", "/bin/true", unit.read_text()))
    return copy


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_rates_the_units_as_well_confined(unit, tmp_path):
    """systemd rates a unit from 0 (safe) to 10; the first version of the units had 8.4 and 9.6."""
    command = [
        "systemd-analyze",
        "security",
        "--offline=true",
        "--threshold=30",
        str(installed(unit, tmp_path)),
    ]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert checked.returncode == 0, checked.stdout[-2000:] + checked.stderr


def test_units_bound_their_memory_and_end_where_a_restart_does_not_help():
    trainer, lighthouse = (
        next(path.read_text() for path in UNITS if name in path.name) for name in ("trainer", "lighthouse")
    )
    for text in (trainer, lighthouse):
        for bound in ("LimitNOFILE=", "MemoryMax=", "TasksMax=", "UMask=0077", "NoNewPrivileges=yes"):
            assert re.search(rf"^{bound}", text, re.MULTILINE), bound
    assert re.search(r"^User=(?!root)", trainer, re.MULTILINE) and "DynamicUser=yes" in lighthouse
    assert re.search(r"^RestartPreventExitStatus=1\b", trainer, re.MULTILINE)
    assert re.search(r"^WatchdogSec=", lighthouse, re.MULTILINE) and "Type=notify" in lighthouse


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_systemd_understands_the_units(unit, tmp_path):
    copy = installed(unit, tmp_path)
    command = ["systemd-analyze", "verify", str(copy)]
    checked = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    said = [line for line in checked.stderr.splitlines() if unit.stem.rstrip("@") in line]
    assert checked.returncode == 0 and not said, checked.stderr


def test_only_files_that_the_dockerfile_copies_get_into_the_build():
    lines = (OPS / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*", "what is not named stays out"
    copied = re.findall(r"^COPY (?!--from)(.+)$", (OPS / "docker" / "Dockerfile").read_text(), re.MULTILINE)
    sources = {source for line in copied for source in line.split()[:-1]}
    assert {rule[1:] for rule in rules if rule.startswith("!")} == sources


def test_the_image_copies_existing_files_and_finds_its_torch():
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
def test_shells_can_parse_the_scripts(script):
    shell = "bash" if "bash" in script.read_text().splitlines()[0] else "sh"
    checked = subprocess.run(
        [shell, "-n", str(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert checked.returncode == 0, checked.stderr
