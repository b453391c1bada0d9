"""Settings: every mistake is one sentence that names the variable."""

import socket

import pytest
from msgspec.structs import replace

from fabric.errors import ConfigError
from fabric.runtime import config
from fabric.runtime.config import (
    Settings,
    advertised_host,
    advertised_hosts,
    launched_ranks,
    parse_durable_every,
    parse_replicas,
    settings,
)

GOOD = {"FABRIC_REPLICA": "r0", "FABRIC_LIGHTHOUSE": "http://127.0.0.1:1/, http://127.0.0.1:2"}


def test_arguments_come_before_environment_before_defaults():
    found = settings({**GOOD, "FABRIC_JOB": "a", "FABRIC_EXCHANGE_S": "2.5"}, job="b", replica=None)
    assert (found.job, found.replica, found.exchange_s, found.digest_steps) == ("b", "r0", 2.5, 10)
    assert found.lighthouse == ("http://127.0.0.1:1", "http://127.0.0.1:2")


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"FABRIC_LIGHTHOUSE": ""}, "FABRIC_LIGHTHOUSE"),
        ({"FABRIC_LIGHTHOUSE": "127.0.0.1:1"}, "give URLs"),
        ({"FABRIC_REPLICA": ""}, "FABRIC_REPLICA"),
        ({"FABRIC_REPLICA": "a/../b"}, "FABRIC_REPLICA"),
        ({"FABRIC_JOB": "x" * 65}, "FABRIC_JOB"),
        ({"FABRIC_RACK": "row 7"}, "FABRIC_RACK"),
        ({"FABRIC_REPLICAS": "0"}, "FABRIC_REPLICAS"),
        ({"FABRIC_REPLICAS": "5:2"}, "must not exceed"),
        ({"FABRIC_REPLICAS": "two"}, "FABRIC_REPLICAS"),
        ({"FABRIC_EXCHANGE_S": "soon"}, "FABRIC_EXCHANGE_S"),
        ({"FABRIC_EXCHANGE_S": "0"}, "exchange_s"),
        ({"FABRIC_AUTONOMY_S": "1"}, "autonomy_s"),
        ({"FABRIC_EXCHANGE_S": "nan"}, "FABRIC_EXCHANGE_S"),
        ({"FABRIC_CONTACT_S": "9"}, "is gone: set FABRIC_AUTONOMY_S=1800 in its place"),
        ({"FABRIC_DIGEST_EVERY": "-2"}, "FABRIC_DIGEST_EVERY"),
        ({"FABRIC_DIGEST_EVERY": "sometimes"}, "FABRIC_DIGEST_EVERY"),
        ({"FABRIC_SNAPSHOT_SHARE": "0.1"}, 'is gone: set FABRIC_SNAPSHOT_EVERY="2% 10m" in its place'),
        ({"FABRIC_SNAPSHOT_EVERY": "inf%"}, "FABRIC_SNAPSHOT_EVERY"),
        ({"FABRIC_SNAPSHOT_EVERY": "2% 100"}, "give a time such as 10m after a share"),
        ({"FABRIC_SNAPSHOT_EVERY": "-1"}, "FABRIC_SNAPSHOT_EVERY"),
        ({"FABRIC_SNAPSHOT_EVERY": "often"}, "FABRIC_SNAPSHOT_EVERY"),
        ({"FABRIC_SNAPSHOT_EVERY": "0"}, "FABRIC_SNAPSHOT_EVERY"),
        ({"FABRIC_DURABLE_EVERY": "10 m"}, "steps such as 100, or a time such as 10m"),
        ({"FABRIC_DURABLE_EVERY": "9" * 5000}, "FABRIC_DURABLE_EVERY"),
        ({"FABRIC_DURABLE_EVERY": "10m keep 0"}, "FABRIC_DURABLE_EVERY"),
        ({"FABRIC_DURABLE_EVERY": "10m hold 3"}, 'and behind it, if wanted, "keep 3" and "required"'),
        ({"FABRIC_DURABLE_EVERY": "required"}, "FABRIC_DURABLE_EVERY"),
        ({"FABRIC_ON_ABORT": "retry 0"}, "FABRIC_ON_ABORT"),
        ({"FABRIC_DURABLE_EVERY_S": "600"}, "is gone: set FABRIC_DURABLE_EVERY=10m in its place"),
        ({"FABRIC_SNAPSHOT_MAX_AGE_S": "60"}, "is gone: set FABRIC_SNAPSHOT_EVERY=10m in its place"),
        ({"FABRIC_DISABLE": "maybe"}, "FABRIC_DISABLE"),
        ({"FABRIC_SPARE": "banana"}, "FABRIC_SPARE"),
        ({"FABRIC_REPRODUCIBLE": "0"}, "is gone: set FABRIC_DIGEST_EVERY=drift in its place"),
        ({"FABRIC_BIND": "h:abc"}, "FABRIC_BIND"),
        ({"FABRIC_BIND": "h:9-1"}, "FABRIC_BIND"),
        ({"FABRIC_PORTS": "9"}, "is gone: set FABRIC_BIND=0.0.0.0:29500-29510 in its place"),
        ({"FABRIC_TLS_KEY": "/k"}, "is gone: set FABRIC_TLS=FOLDER in its place"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it(more, words):
    with pytest.raises(ConfigError, match=words) as caught:
        settings({**GOOD, **more})
    assert "\n" not in str(caught.value)


def test_unknown_arguments_are_refused():
    with pytest.raises(ConfigError, match="durable_every_s is gone: give durable_every='10m' in its place"):
        settings(GOOD, durable_every_s=60)
    with pytest.raises(ConfigError, match="lighthose"):
        settings(GOOD, lighthose=("http://x",))


@pytest.mark.parametrize(
    ("text", "host", "ports"),
    [
        ("10.0.0.5", "10.0.0.5", "0"),
        ("0.0.0.0:29500-29510", "0.0.0.0", "29500-29510"),
        ("::", "::", "0"),
        ("fe80::1", "fe80::1", "0"),
        ("[::]:8600", "::", "8600"),
        ("[::1]", "::1", "0"),
        (":8600", "", "8600"),
    ],
)
def test_an_address_may_have_ports(text, host, ports):
    chosen = settings({**GOOD, "FABRIC_BIND": text})
    assert (chosen.host, chosen.ports) == (host, ports)


def test_settings_of_several_words():
    durable = parse_durable_every("100, keep 5, required")
    assert (durable.every.steps, durable.keep, durable.required) == (100, 5, True)
    assert parse_durable_every("10m").keep == 3 and not parse_durable_every("10m").required
    drifting = settings({**GOOD, "FABRIC_DIGEST_EVERY": "drift"})
    assert (drifting.reproducible, drifting.digest_steps) == (False, 0)
    assert settings({**GOOD, "FABRIC_DIGEST_EVERY": "0"}).reproducible, "no digests, and still replay"
    chosen = settings({**GOOD, "FABRIC_ON_ABORT": "recompute 4"})
    assert (chosen.retain_gradients, chosen.max_failed_rounds) == (False, 4)
    assert Settings().retain_gradients and Settings().max_failed_rounds == 0


def test_with_fabric_disabled_no_other_setting_is_needed():
    assert settings({"FABRIC_DISABLE": "1"}).disable
    assert not settings({**GOOD, "FABRIC_DISABLE": "0"}).disable


@pytest.mark.parametrize(("words", "meant"), [("1 true YES On", True), ("0 False no OFF", False)])
def test_yes_and_no_have_four_words_each(words, meant):
    for word in words.split():
        assert settings({**GOOD, "FABRIC_SPARE": word}).spare is meant
    assert not settings({**GOOD, "FABRIC_SPARE": ""}).spare, "empty: the default"


@pytest.mark.parametrize(
    ("text", "meant"), [("runs", "{cwd}/runs"), ("/a/b", "/a/b"), ("s3://a/b", "s3://a/b"), ("", "")]
)
def test_a_relative_durable_folder_is_one_of_the_trainers_working_folder(tmp_path, monkeypatch, text, meant):
    monkeypatch.chdir(tmp_path)
    assert settings({**GOOD, "FABRIC_DURABLE": text}).durable == meant.format(cwd=tmp_path)


def test_replica_ranges():
    assert parse_replicas("3") == (1, 3)
    assert parse_replicas("2:8") == (2, 8)
    for text in ("", "0", "8:2", "1:2:3", "two", "9" * 5000, f"1:{'9' * 5000}", "٣", "²"):
        with pytest.raises(ConfigError, match="FABRIC_REPLICAS") as caught:
            parse_replicas(text)
        assert len(str(caught.value)) < 300


def test_the_token_is_read_from_its_file(tmp_path):
    path = tmp_path / "token"
    with pytest.raises(ConfigError, match="cannot be read"):
        _ = Settings(token_file=path).token
    path.write_text("\n")
    with pytest.raises(ConfigError, match="empty"):
        _ = Settings(token_file=path).token
    path.write_text("secret\n")
    assert Settings(token_file=path).token == b"secret"
    assert Settings().token == b""


def test_peers_dial_the_advertised_address():
    assert advertised_host(Settings(bind="127.0.0.1")) == "127.0.0.1"
    assert advertised_host(Settings(bind="0.0.0.0", advertise="node7")) == "node7"
    assert advertised_host(Settings(bind="0.0.0.0")) != "0.0.0.0"
    local = Settings(bind="0.0.0.0", lighthouse=("http://127.0.0.1:80", "http://no.such.host.invalid:80"))
    assert advertised_host(local) == advertised_host(Settings(bind="0.0.0.0")), "others cannot dial 127.0.0.1"


def test_several_addresses_are_for_links_and_the_first_is_for_urls():
    chosen = Settings(bind="0.0.0.0", advertise="10.7.0.2, 10.8.0.2,")
    assert (advertised_host(chosen), advertised_hosts(chosen)) == ("10.7.0.2", ["10.7.0.2", "10.8.0.2"])
    assert advertised_hosts(Settings(bind="127.0.0.1")) == ["127.0.0.1"]


def test_peers_dial_an_address_and_a_url_under_tls_has_the_name(monkeypatch):
    """The name of a cloned host leads back to that host. Only a certificate needs the name."""
    asked = []
    monkeypatch.setattr(socket, "gethostname", lambda: "node")
    monkeypatch.setattr(config, "_source", lambda family, place: asked.append(place[0]) or "10.7.0.2")
    chosen = Settings(bind="0.0.0.0", lighthouse=("http://10.7.0.1:80",))
    assert (advertised_host(chosen), advertised_host(chosen, by_name=True)) == ("10.7.0.2", "node")
    assert asked == ["10.7.0.1"]


def test_a_host_with_the_lighthouse_on_its_loopback_gives_its_address_towards_other_networks(monkeypatch):
    routes = {"127.0.0.1": "127.0.0.1", "192.0.2.1": "10.7.0.1"}
    monkeypatch.setattr(config, "_source", lambda family, place: routes[place[0]])
    assert advertised_host(Settings(bind="0.0.0.0", lighthouse=("http://127.0.0.1:80",))) == "10.7.0.1"
    monkeypatch.setattr(config, "_source", lambda family, place: "")
    assert advertised_host(Settings(bind="0.0.0.0")) == socket.gethostname()


def test_a_host_that_binds_all_addresses_of_both_kinds_gives_one_of_either_kind(monkeypatch):
    monkeypatch.setattr(config, "_source", lambda family, place: {"fd00::1": "fd00::2"}.get(place[0], ""))
    both = Settings(bind="::", lighthouse=("http://[fd00::1]:80",))
    assert advertised_host(both) == "fd00::2"
    assert advertised_host(replace(both, bind="0.0.0.0")) == socket.gethostname()


def test_the_launcher_says_how_many_ranks_a_replica_has():
    assert launched_ranks({}) == 1
    assert launched_ranks({"WORLD_SIZE": "4"}) == 4
    for text in ("0", "two", "-1", "9" * 5000, "٣"):
        with pytest.raises(ConfigError, match="WORLD_SIZE"):
            launched_ranks({"WORLD_SIZE": text})


def test_ranks_of_a_replica_have_folders_and_journals_of_their_own(tmp_path):
    found = settings(
        {}, job="j", replica="r0", lighthouse=("http://h:1",), run_dir=tmp_path, journal=tmp_path / "r0.jsonl"
    )
    assert found.of_rank(0) is found
    other = found.of_rank(2)
    assert (other.home, other.journal) == (tmp_path / "rank2", tmp_path / "rank2" / "r0.jsonl")
