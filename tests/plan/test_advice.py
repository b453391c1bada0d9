"""The comparison, the presets, the page and the command, as a user meets them."""

import json
from html.parser import HTMLParser

import numpy as np
import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from fabric.cli.main import cli
from fabric.plan.advice import Estimate, compare, options_for, recommendation, worthwhile_spares
from fabric.plan.cluster import PRESETS, Cluster, preset
from fabric.plan.report import page, sweeps

SMALL = Cluster(gpus=64, replica_gpus=8, mtbf_s=1800.0, steps=300)


def run(*arguments):
    return CliRunner().invoke(cli, ["plan", *arguments])


def test_a_job_of_the_environment_does_not_change_a_plan(monkeypatch):
    described = ("gpus=16", "replica_gpus=8", "mtbf_s=1800", "step_s=1")
    arguments = (*described, "steps=20", "--seeds", "1", "--json")
    monkeypatch.delenv("FABRIC_JOB", raising=False)
    without = run(*arguments)
    monkeypatch.setenv("FABRIC_JOB", "gpt")
    monkeypatch.setenv("FABRIC_LIGHTHOUSE", "http://127.0.0.1:9")
    assert (run(*arguments).output, without.exit_code) == (without.output, 0)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_compared(name):
    cluster = replace(preset(name), steps=20)
    outcomes = compare(cluster, seeds=1)
    assert {o.name for o in outcomes} >= {"checkpoint and restart", "FT-HSDP", "fabric"}
    for outcome in outcomes:
        assert sum(outcome.shares.values()) == pytest.approx(1.0)
    assert outcomes[0].name in recommendation(cluster, outcomes)


def test_parallel_processes_give_the_same_result_as_one_process():
    chosen = options_for(SMALL)[:2]
    alone = compare(SMALL, seeds=2, options=chosen)
    assert compare(SMALL, seeds=2, options=chosen, workers=2) == alone


def test_more_failures_cost_more_and_spares_help():
    calm = {o.name: o.effective.mean for o in compare(replace(SMALL, mtbf_s=36000.0), seeds=2)}
    rough = {o.name: o.effective.mean for o in compare(SMALL, seeds=2)}
    assert all(rough[name] < calm[name] for name in ("fabric", "checkpoint and restart", "FT-HSDP"))
    assert rough["fabric with spares"] > rough["fabric"]


def effective(cluster, name="fabric"):
    chosen = [o for o in options_for(cluster, spares=0) if o.name == name]
    (outcome,) = compare(cluster, seeds=4, options=chosen)
    return outcome.effective.mean


def test_failures_of_whole_racks_are_fewer_incidents_except_under_replication():
    """If a whole rack with half of the replicas dies at one instant, most policies stop once. Under
    replication a rack holds a whole block, so its death restarts all groups.
    """
    racks = replace(SMALL, arrivals="racks", rack_replicas=4, rack_share=0.9, mtbf_s=600.0, steps=600)
    alone = replace(racks, rack_share=0.0)
    next_s = racks.failures().clocks(racks.replicas, np.random.default_rng(0)).next_s
    assert len(set(next_s.tolist())) < racks.replicas
    gains = {name: effective(racks, name) - effective(alone, name) for name in ("FT-HSDP", "replication")}
    assert gains["FT-HSDP"] > 0.1 and gains["replication"] < 0.05
    assert effective(alone) == pytest.approx(effective(replace(SMALL, mtbf_s=600.0, steps=600)), abs=0.05)


def test_several_workers_compute_what_one_does():
    alone = compare(SMALL, seeds=2, options=options_for(SMALL)[:1])
    assert compare(SMALL, seeds=2, options=options_for(SMALL)[:1], workers=2) == alone


def test_the_command_takes_racks():
    described = ("gpus=64", "replica_gpus=8", "mtbf_s=1800", "steps=50", "--seeds", "1")
    racks = run(*described, "arrivals=racks", "rack_replicas=4", "rack_share=0.5", "--json")
    assert racks.exit_code == 0, racks.output
    assert json.loads(racks.output)["cluster"]["rack_share"] == 0.5


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("arrivals=racks",), "arrivals=racks needs rack_replicas from 1 to 8, not 0"),
        (("arrivals=racks", "rack_replicas=9"), "from 1 to 8, not 9"),
        (("rack_replicas=2",), "rack_replicas goes with arrivals=racks, not with poisson"),
        (("rack_share=1",), "rack_share must be 0 up to 1, not 1"),
    ],
)
def test_racks_that_cannot_be_are_refused(arguments, sentence):
    result = run("gpus=64", "replica_gpus=8", "mtbf_s=1800", *arguments)
    assert result.exit_code == 2 and sentence in result.output


def test_spares_follow_from_the_failures_within_a_repair():
    assert worthwhile_spares(SMALL) == 1
    assert worthwhile_spares(replace(SMALL, gpus=640, repair_median_s=7200.0, repair_sigma=0.0)) == 5


def test_the_confidence_interval_of_two_equal_values_is_empty():
    assert Estimate.of([2.0, 2.0]) == Estimate(2.0, 0.0)
    assert Estimate.of([1.0]).error == 0


def test_the_page_needs_no_network_and_escapes_its_words():
    cluster = replace(SMALL, source="<script>alert(1)</script>")
    outcomes = compare(cluster, seeds=1)
    text = page(cluster, outcomes, sweeps(replace(cluster, steps=20)))

    class Links(HTMLParser):
        found: tuple[str, ...] = ()

        def handle_starttag(self, tag, attrs):
            self.found += (tag,) if tag in ("script", "link", "img", "iframe") else ()

    parser = Links()
    parser.feed(text)
    assert parser.found == ()
    assert "http" not in text.replace("http-equiv", "")
    assert "prefers-color-scheme:dark" in text
    assert text.count("<svg") == 4


def test_the_command_prints_a_table_and_a_sentence():
    result = run("gpus=32", "replica_gpus=8", "mtbf_s=3600", "steps=50", "--seeds", "2")
    assert result.exit_code == 0, result.output
    assert "checkpoint and" in result.output
    assert "Run fabric" in result.output


def test_the_command_prints_json_and_writes_a_page(tmp_path):
    target = tmp_path / "plan.html"
    result = run("torchpass-64", "steps=30", "--seeds", "1", "--json", "--html", str(target))
    assert result.exit_code == 0, result.output
    body = json.loads(result.output)
    assert body["cluster"]["gpus"] == 64
    assert {"name", "effective", "shares"} <= body["policies"][0].keys()
    assert target.read_text().startswith("<!doctype html>")


def test_a_trace_sets_the_rate(tmp_path):
    trace = tmp_path / "trace.csv"
    trace.write_text("time_h,unit,event\n1,a,fail\n2,a,repair\n5,b,fail\n6,b,repair\n10,a,fail\n")
    result = run("gpus=32", "replica_gpus=8", "--trace", str(trace), "steps=50", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.output)["cluster"]["mtbf_s"] == pytest.approx(12000)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "gpus, replica_gpus, mtbf_s is missing"),
        (["moon"], "there is no preset 'moon': choose one of llama3-16k"),
        (["spare-200", "mtbf_s=-3"], "mtbf_s must be a positive number, not -3"),
        (["spare-200", "mtbf_s=0.01"], "check the units"),
        (["spare-200", "step_s=nan"], "step_s must be a positive number, not nan"),
        (["spare-200", "exchange_s=99"], "the exchange (99 s) must be shorter than the step"),
        (["spare-200", "arrivals=never"], "arrivals must be one of poisson"),
        (["spare-200", "--seeds", "0"], "--seeds must be 1 or more"),
        (["spare-200", "--spares", "-1"], "--spares must be zero or more"),
        (["gpus=8", "replica_gpus=8", "mtbf_s=60"], "fewer than 2 replicas"),
        (["gpus=16", "replica_gpus=8", "--trace", "/nonexistent.csv"], "No such file"),
        (["spare-200", "rsc-16k"], "are two presets"),
        (["spare-200", "mtbf=60"], "a cluster has no mtbf: give one of gpus"),
        (["spare-200", "mtbf_s=soon"], 'mtbf_s is "soon": give a number'),
        (["reproduce"], "run python benchmarks/reproduce.py in the source tree"),
    ],
)
def test_a_plan_that_cannot_be_made_is_one_sentence_and_exit_code_2(arguments, sentence):
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.output
    assert len(result.output.strip().splitlines()) == 1
