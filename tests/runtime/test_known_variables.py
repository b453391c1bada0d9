"""Unknown FABRIC_ variables: each spelling near a setting's name is refused with that name."""

import pytest
from click.testing import CliRunner

from fabric.cli.doctor import examine
from fabric.cli.main import cli
from fabric.errors import ConfigError
from fabric.runtime.config import Settings, refuse_unknown_variables, settings
from fabric.runtime.guarded_processes import MARK
from fabric.runtime.process_environment import LAUNCH_MARK, LAUNCH_RESTARTS

GOOD = {"FABRIC_REPLICA": "r0", "FABRIC_LIGHTHOUSE": "http://127.0.0.1:1"}
NAMES = sorted(f"FABRIC_{name.upper()}" for name in Settings.__struct_fields__)


def misspelt(name):
    """Yield the name with two letters swapped, with one left out, and with one doubled."""
    for at in range(len("FABRIC_"), len(name) - 1):
        yield name[:at] + name[at + 1] + name[at] + name[at + 2 :]
        yield name[:at] + name[at + 1 :]
        yield name[: at + 1] + name[at:]


def test_every_setting_and_every_mark_of_our_own_processes_is_known():
    marks = dict.fromkeys((MARK, LAUNCH_MARK, LAUNCH_RESTARTS, "FABRIC_TEST_POINTS"), "x")
    settings({**dict.fromkeys(NAMES, ""), **GOOD, **marks})
    refuse_unknown_variables(dict.fromkeys(NAMES, "1"))


@pytest.mark.parametrize("name", NAMES)
def test_a_misspelt_setting_is_refused_in_one_sentence(name):
    for wrong in set(misspelt(name)) - set(NAMES):
        with pytest.raises(ConfigError, match=f"the variable {wrong} is set") as caught:
            settings({**GOOD, wrong: "1"})
        assert str(caught.value).endswith("in its place, or unset it")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("FABRIC_DURABEL", "FABRIC_DURABLE"),
        ("FABRIC_DURABLE_EVRY", "FABRIC_DURABLE_EVERY"),
        ("FABRIC_DISABEL", "FABRIC_DISABLE"),
        ("FABRIC_LIGHTHOUSES", "FABRIC_LIGHTHOUSE"),
        ("FABRIC_SNAPSHOTS_EVERY", "FABRIC_SNAPSHOT_EVERY"),
        ("FABRIC_LAUNCH_MARKS", None),
        ("FABRIC_CFG_PATH", None),
    ],
)
def test_the_sentence_names_the_nearest_setting(wrong, meant):
    with pytest.raises(ConfigError, match=f"set {meant} in its place" if meant else ": unset it") as caught:
        settings({**GOOD, wrong: "1"})
    assert "MARK in its place" not in str(caught.value), "a variable that only fabric itself sets"


def test_an_empty_variable_counts_as_not_set():
    settings({**GOOD, "FABRIC_DURABEL": ""})


@pytest.mark.parametrize("service", ["FABRIC_LIGHTHOUSE", "FABRIC_ETCD", "FABRIC"])
def test_the_variables_of_a_kubernetes_service_are_let_through(service):
    of_service = {
        f"{service}_SERVICE_HOST": "10.0.0.1",
        f"{service}_SERVICE_PORT": "8600",
        f"{service}_SERVICE_PORT_HTTP": "8600",
        f"{service}_PORT": "tcp://10.0.0.1:8600",
        f"{service}_PORT_8600_TCP": "tcp://10.0.0.1:8600",
        f"{service}_PORT_8600_TCP_ADDR": "10.0.0.1",
    }
    settings({**GOOD, **of_service})
    del of_service[f"{service}_SERVICE_HOST"]
    with pytest.raises(ConfigError, match=f"the variable {service}_"):
        settings({**GOOD, **of_service})


@pytest.mark.parametrize("command", [["launch", __file__], ["launch", "--no-check", __file__], ["status"]])
def test_commands_refuse_an_unknown_variable(command):
    refused = CliRunner().invoke(cli, command, env={**GOOD, "FABRIC_DURABEL": "/ckpt"})
    assert isinstance(refused.exception, ConfigError)
    assert "FABRIC_DURABLE in its place" in str(refused.exception)


@pytest.mark.parametrize("replica", [True, False], ids=["replica", "lighthouse"])
def test_doctor_reports_an_unknown_variable(monkeypatch, replica):
    monkeypatch.setenv("FABRIC_DURABEL", "/ckpt")
    bad = [x.do for x in examine("", 0.0, replica=replica) if x.level == "bad"]
    assert any("FABRIC_DURABLE in its place" in x for x in bad), bad
