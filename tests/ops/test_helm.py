"""The Helm chart gives what the plain Kubernetes files give, and the API's schemas accept both."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import kubernetes_validate
import pytest
import yaml

from fabric.cli.main import cli

OPS = Path(__file__).resolve().parents[2] / "ops"
CHART = OPS / "helm" / "fabric"
PLAIN = OPS / "kubernetes"
# The oldest version that the recipes support, and the newest that the package of the schemas has.
VERSIONS = ("1.29", "1.37")
CUSTOM = {"PodMonitor", "Kustomization"}  # these kinds are not of the Kubernetes API itself
HOW_TO_GET_IT = (
    "helm is not on PATH: put a release archive's program there (or run ops/dev/ensure-helm.sh .venv)"
)


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run helm. Without helm the test is skipped, and under ``CI=true`` it fails."""
    beside = Path(sys.executable).with_name("helm")
    program = shutil.which("helm") or (str(beside) if beside.exists() else None)
    if program is None:
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(HOW_TO_GET_IT)
    return subprocess.run([program, *arguments], capture_output=True, text=True, timeout=60, check=False)


def rendered(**values: object) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the chart's objects by kind and name; ``job__name="x"`` sets job.name."""
    given = [
        word
        for name, value in values.items()
        for word in ("--set-json", f"{name.replace('__', '.')}={json.dumps(value)}")
    ]
    done = helm("template", "here", str(CHART), "--namespace", "fabric", *given)
    assert done.returncode == 0, done.stderr
    return by_name(done.stdout)


def by_name(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    documents = [document for document in yaml.safe_load_all(text) if document is not None]
    return {(document["kind"], document["metadata"]["name"]): document for document in documents}


def plain(*paths: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the objects of plain files, with the lighthouse's image as Kustomize writes it."""
    text = "\n---\n".join(path.read_text() for path in paths)
    return by_name(text.replace("image: fabric\n", "image: fabric:0.1\n"))


def specs(found: dict[tuple[str, str], dict[str, Any]]) -> dict[tuple[str, str], Any]:
    return {name: document["spec"] for name, document in found.items()}


def container(found: dict[tuple[str, str], dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    [only] = found[kind, name]["spec"]["template"]["spec"]["containers"]
    return only


# --- the chart --------------------------------------------------------------------------------------------


def test_the_linter_of_helm_has_no_complaint():
    done = helm("lint", "--strict", str(CHART))
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_defaults_are_the_objects_of_the_plain_base():
    base = plain(*(PLAIN / "base" / f"{name}.yaml" for name in ("etcd", "lighthouse", "network")))
    assert specs(rendered()) == specs(base)


def test_a_named_job_is_the_example_of_the_plain_files():
    added = specs(rendered(job__name="gpt"))
    assert added[("Job", "gpt")] == specs(plain(PLAIN / "trainer-job.yaml"))[("Job", "gpt")]


def test_monitoring_is_the_overlay_of_the_plain_files():
    folder = PLAIN / "overlays" / "monitoring"
    added = specs(rendered(monitoring__enabled=True))
    for name, spec in specs(plain(folder / "monitors.yaml", folder / "network.yaml")).items():
        assert added[name] == spec


def test_every_address_follows_the_numbers_of_replicas():
    found = rendered(lighthouse__replicas=3, etcd__replicas=5, job__name="a", job__replicas=8)
    store, cluster = (
        next(word for word in container(found, "StatefulSet", name)[key] if word.startswith(option))
        for name, key, option in (
            ("fabric-lighthouse", "args", "--store="),
            ("fabric-etcd", "command", "--initial-cluster="),
        )
    )
    assert all(f"fabric-etcd-{i}.fabric-etcd:2379" in store for i in range(5)) and store.count(",") == 4
    assert all(f"fabric-etcd-{i}=http" in cluster for i in range(5)) and cluster.count("=") == 6
    told = {entry["name"]: entry.get("value") for entry in container(found, "Job", "a")["env"]}
    assert told["FABRIC_LIGHTHOUSE"].count("http://") == 3 and told["FABRIC_REPLICAS"] == "1:8"
    assert found["Job", "a"]["spec"]["completions"] == 8


def test_an_upgrade_that_keeps_its_old_values_still_names_every_secret():
    """``helm upgrade --reuse-values`` has no default of a value that the release before did not have."""
    kept = rendered(job__name="a", job__image="b:1", jobTokensSecret=None)
    assert specs(kept) == specs(rendered(job__name="a", job__image="b:1"))


def test_an_etcd_of_your_own_replaces_the_charts():
    found = rendered(
        store="etcds://etcd-0.example.com:2379",
        storeCaSecret="ca",
        tokenSecret="mine",
        jobTokensSecret="jobs",
        monitoring__enabled=True,
    )
    assert not [name for _, name in found if "etcd" in name]
    lighthouse = container(found, "StatefulSet", "fabric-lighthouse")
    context = cli.get_command(click.Context(cli), "lighthouse").make_context(
        "lighthouse", lighthouse["args"][1:]
    )
    assert context.params["store"] == "etcds://etcd-0.example.com:2379"
    secrets = {
        volume["name"]: volume["secret"]["secretName"]
        for volume in found["StatefulSet", "fabric-lighthouse"]["spec"]["template"]["spec"]["volumes"]
    }
    assert secrets == {"token": "mine", "job-tokens": "jobs", "etcd-ca": "ca"}
    assert {mount["name"] for mount in lighthouse["volumeMounts"]} == set(secrets)


@pytest.mark.parametrize(
    "wrong, said",
    [
        ("lighthouse.replicas=0", "/lighthouse/replicas"),
        ("lighthouse.image=fabric", "/lighthouse/image"),
        ("etcd.replicas=2", "/etcd/replicas"),
        ("store=sqlite:///x.db", "/store"),
        ("replica=3", "replica"),
        ("job.name=a,job.minReplicas=4", "job.minReplicas is 4 and job.replicas 3"),
    ],
)
def test_a_wrong_value_is_refused_by_its_name(wrong, said):
    done = helm("template", "here", str(CHART), "--set", wrong)
    assert done.returncode == 1 and said in done.stderr, done.stderr


# --- the schemas of the Kubernetes API --------------------------------------------------------------------


def validate(documents: list[dict[str, Any]]) -> int:
    """Validate strictly against each version's schemas; return the number of validated objects."""
    ours = [document for document in documents if document["kind"] not in CUSTOM]
    for document in ours:
        for version in VERSIONS:
            kubernetes_validate.validate(document, version, strict=True)
    return len(ours)


def test_the_schemas_accept_the_chart():
    everything = rendered(job__name="gpt", job__env={"FABRIC_DURABLE": "/c"}, monitoring__enabled=True)
    assert validate(list(everything.values())) == 11
    assert validate(list(rendered(store="etcds://a:2379", storeCaSecret="ca").values())) == 5


@pytest.mark.parametrize("name", ["base", "overlays/monitoring", "."])
def test_the_schemas_accept_the_plain_files(name):
    paths = [path for path in (PLAIN / name).glob("*.yaml") if path.name != "kustomization.yaml"]
    documents = [document for path in paths for document in yaml.safe_load_all(path.read_text())]
    assert validate(documents) > 0


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")
@pytest.mark.parametrize("overlay", ["tls", "external-etcd"])
def test_the_schemas_accept_an_overlay(overlay):
    command = ["kubectl", "kustomize", str(PLAIN / "overlays" / overlay)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert validate(list(by_name(built).values())) > 0


def test_the_schemas_refuse_a_misspelt_field():
    [job] = plain(PLAIN / "trainer-job.yaml").values()
    job["spec"]["completion"] = 3
    with pytest.raises(kubernetes_validate.ValidationError, match="completion"):
        validate([job])
