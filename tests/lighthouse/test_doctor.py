"""``fabric doctor`` finds each mistake and says what to do, and finds nothing on a healthy host."""

import errno
import fcntl
import os
import socket

import pytest
from lighthouse_support import TOKEN, LighthouseProcess, fabric

from fabric.cli import doctor
from fabric.cli.doctor import examine
from fabric.runtime.config import Settings
from fabric.runtime.system_calls import NetworkInterface, network_interfaces


@pytest.fixture
def environment(lighthouse: LighthouseProcess, tmp_path, monkeypatch) -> None:
    """Correct settings of a replica."""
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text(f"{TOKEN}\n")
    for name, value in {
        "LIGHTHOUSE": lighthouse.url,
        "JOB": "test",
        "REPLICA": "r0",
        "TOKEN_FILE": str(token),
        "RUN_DIR": str(tmp_path / "run"),
    }.items():
        monkeypatch.setenv(f"FABRIC_{name}", value)


def refuse(*_) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


def findings(level: str, store: str = "", state_gb: float = 0.0) -> str:
    """Return the findings of one level as text."""
    return "\n".join(f"{f.what}: {f.do}" for f in examine(store, state_gb) if f.level == level)


def test_the_doctor_finds_no_fault_in_a_good_configuration(environment, lighthouse):
    assert findings("bad") == "" and findings("warn") == ""
    assert f"{lighthouse.url} leads" in findings("ok")


def test_the_doctor_command_prints_its_findings_and_sets_its_exit_code(lighthouse, tmp_path):
    settings = {"FABRIC_LIGHTHOUSE": lighthouse.url, "FABRIC_JOB": "test", "FABRIC_REPLICA": "r0"}
    fine = fabric("doctor", **settings, FABRIC_TOKEN_FILE=str(lighthouse.token_file))
    assert fine.returncode == 0 and f"{lighthouse.url} leads" in fine.stdout, fine.stdout + fine.stderr
    bare = fabric("doctor", **settings)
    assert bare.returncode == 1 and "warn no token file is set" in bare.stdout
    assert "does not let this job in" in bare.stdout and "this needs the job's token" in bare.stdout
    poor = fabric("doctor", **settings, FABRIC_REPLICAS="many")
    assert poor.returncode == 1 and "FABRIC_REPLICAS" in poor.stdout and "Traceback" not in poor.stderr


@pytest.mark.parametrize(
    "name, value, level, sentence",
    [
        ("LIGHTHOUSE", "http://127.0.0.1:1", "bad", "no lighthouse works"),
        ("LIGHTHOUSE", "", "bad", "no lighthouse is named"),
        ("TOKEN_FILE", "/nowhere/token", "bad", "cannot be used"),
        ("RUN_DIR", "/etc/passwd/here", "bad", "cannot be made here"),
        ("ADVERTISE", "no-such-host.invalid", "bad", "has no address"),
        ("BIND", "203.0.113.7", "bad", "cannot be bound"),
        ("DURABLE", "/proc/nope", "bad", "FABRIC_DURABLE to a folder"),
        ("DURABLE", "nosuchfs://x", "bad", "nosuchfs"),
        ("DISABLE", "maybe", "bad", 'FABRIC_DISABLE is "maybe"'),
        ("BIND", "127.0.0.1:abc", "bad", 'FABRIC_BIND is "127.0.0.1:abc"'),
    ],
)
def test_each_mistaken_setting_is_found(environment, monkeypatch, name, value, level, sentence):
    monkeypatch.setenv(f"FABRIC_{name}", value)
    assert sentence in findings(level)


def test_the_check_of_a_durable_folder_writes_to_it_and_leaves_it_empty(environment, monkeypatch, tmp_path):
    monkeypatch.setenv("FABRIC_DURABLE", str(tmp_path / "durable"))
    assert "can be written to" in findings("ok") and not findings("bad")
    assert list((tmp_path / "durable").iterdir()) == []


def test_a_run_folder_with_a_long_path_is_good(environment, monkeypatch, tmp_path):
    """Trainers reach the sockets in it by a short path."""
    monkeypatch.setenv("FABRIC_RUN_DIR", str(tmp_path / ("x" * 200)))
    assert "run folder " in findings("ok") and not findings("bad")


def test_a_loopback_address_that_peers_are_told_is_found(environment, monkeypatch):
    monkeypatch.setenv("FABRIC_BIND", "0.0.0.0")
    monkeypatch.setenv("FABRIC_ADVERTISE", "127.0.0.1")
    assert "own loopback" in findings("bad")


@pytest.mark.parametrize(
    ("advertised", "speeds", "level", "sentence"),
    [
        ("10.7.0.1", (1000, 25000), "warn", "on eth0 with 1000 Mbit/s), and eth1 at 10.8.0.1 has 25000"),
        ("10.7.0.1,10.8.0.1", (1000, 25000), "ok", "on eth0 with 1000 Mbit/s, eth1 with 25000 Mbit/s)"),
        ("10.8.0.1", (1000, 25000), "ok", "on eth1 with 25000 Mbit/s)"),
        ("10.7.0.1", (-1, 25000), "ok", "at 10.7.0.1 (10.7.0.1)"),
        ("10.9.0.1", (1000, 25000), "ok", "at 10.9.0.1 (10.9.0.1)"),
        ("10.7.0.1,127.0.0.1", (1000, 25000), "bad", "127.0.0.1 is this host's own loopback"),
    ],
)
def test_a_faster_interface_of_the_host_is_named(monkeypatch, advertised, speeds, level, sentence):
    interfaces = [NetworkInterface(f"eth{i}", f"10.{7 + i}.0.1", speeds[i]) for i in range(2)]
    monkeypatch.setattr(doctor, "network_interfaces", lambda: interfaces)
    finding = doctor._advertise(Settings(bind="0.0.0.0", advertise=advertised))
    assert finding.level == level and sentence in finding.what
    assert (finding.do == "if peers reach that too, set FABRIC_ADVERTISE=10.8.0.1") == (level == "warn")


def test_the_interfaces_of_this_host_have_addresses_and_maybe_speeds(tmp_path):
    (tmp_path / "lo").mkdir()
    (tmp_path / "lo" / "speed").write_text("40000\n")
    assert NetworkInterface("lo", "127.0.0.1", 40000) in network_interfaces(tmp_path)
    assert NetworkInterface("lo", "127.0.0.1", -1) in network_interfaces()


def test_a_token_that_the_lighthouse_refuses_is_found(environment, tmp_path):
    (tmp_path / "token").write_text("another-token\n")
    assert "does not let this job in: the token does not match" in findings("bad")


def test_on_a_lighthouses_host_the_doctor_needs_the_store_only(tmp_path):
    alone = fabric("doctor", "--store", f"sqlite://{tmp_path}/store.db")
    assert alone.returncode == 0 and "store " in alone.stdout and "bad" not in alone.stdout, alone.stdout
    both = fabric("doctor", "--store", f"sqlite://{tmp_path}/store.db", FABRIC_REPLICA="r0")
    assert both.returncode == 1 and "no lighthouse is named" in both.stdout


def test_the_doctor_checks_the_store_with_the_lighthouses_own_options(tmp_path):
    said = fabric("doctor", "--store", "etcds://127.0.0.1:1", "--store-tls", tmp_path / "none").stdout
    assert "certificates cannot be used" in said and "none/ca.crt" in said


def test_a_port_that_is_taken_is_found(environment, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        monkeypatch.setenv("FABRIC_BIND", f"127.0.0.1:{taken.getsockname()[1]}")
        assert "is taken" in findings("bad")


def test_the_doctor_finds_a_token_that_other_users_can_read(environment, monkeypatch, tmp_path):
    (tmp_path / "token").chmod(0o644)
    assert "chmod 600" in findings("warn")


@pytest.mark.parametrize(
    ("module", "name", "called"),
    [
        (os, "pidfd_open", "pidfd_open"),
        (os, "memfd_create", "memfd_create"),
        (os, "posix_fallocate", "fallocate"),
        (fcntl, "fcntl", "fcntl"),
        (fcntl, "flock", "flock"),
        (os, "eventfd", "eventfd"),
    ],
)
def test_a_system_call_that_a_container_forbids_is_found(environment, monkeypatch, module, name, called):
    assert "allows the system calls of a replica" in findings("ok")
    monkeypatch.setattr(module, name, refuse)
    assert f"let the container's seccomp profile allow {called}" in findings("bad")


def test_free_memory_is_compared_with_the_size_of_the_state(environment):
    assert "more memory" in findings("bad", state_gb=1e6)
    assert "GB need about" in findings("ok", state_gb=0.001)


def test_the_doctor_checks_the_store(environment, tmp_path):
    assert "store " in findings("ok", store=f"sqlite://{tmp_path}/store.db")
    assert "the store cannot be used" in findings("bad", store="etcd://127.0.0.1:1")
