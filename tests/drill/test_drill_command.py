"""``fabric drill``: each mistake is one sentence, and the reports say what the judge says."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result
from drill.test_judge import FAULT, STEPS, record
from msgspec.structs import replace

import fabric.cli.drill as command
from fabric.cli.main import cli
from fabric.drill.judge.drill_record import DrillRecord
from fabric.drill.judge.drill_verdict import judge_drill
from fabric.drill.report.documents import as_json, as_junit, fault_table, kind_table, page_of
from fabric.drill.run import started_job
from fabric.errors import FabricError
from fabric.runtime.drill_orders import order_key

PROGRAM = ["--", sys.executable, "train.py"]


def run(*words: str) -> Result:
    return CliRunner().invoke(cli, ["drill", *words])


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--replicas", "1", *PROGRAM], "a job of one replica does not survive a drill"),
        (["--replicas", "0", *PROGRAM], "--replicas is out of range: give at most 64"),
        (["--lighthouses", "2", *PROGRAM], "two lighthouses need an etcd"),
        (["--", "no-such-program"], 'there is no program "no-such-program"'),
        ([], 'there is no program ""'),
        (["--fault", "kil r1", *PROGRAM], 'there is no fault "kil"'),
        (["--fault", "kill r7", *PROGRAM], 'kill names the replica "r7", which the job does not have'),
        (["--replicas", "2", "--fault", "kill-two r1", *PROGRAM], "kill-two is not possible here"),
        (["--fault", "kill-follower", *PROGRAM], "it needs two lighthouses"),
        (["--fault", "kill r1", "--random", "1", *PROGRAM], "contradict each other"),
        (["--random", "1 every often", *PROGRAM], 'every in --random is "often"'),
        (["--random", "1 for ever", *PROGRAM], 'for in --random is "ever"'),
        (["--random", "often", *PROGRAM], '--random is "often": give a seed'),
        (["--plan", "/no/plan.yaml", *PROGRAM], "the plan /no/plan.yaml cannot be read"),
        (["--expect", "speed<=1s", *PROGRAM], 'the expectation "speed<=1s" names no measure'),
        (["--expect", "stall", *PROGRAM], 'the expectation "stall" has no bound'),
        (["--print-key", "--job", "gpt"], "--print-key needs a job and the token for drills"),
    ],
)
def test_a_mistake_is_one_sentence(words, why, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(*words)
    assert result.exit_code == 1
    assert isinstance(result.exception, FabricError)
    assert why in str(result.exception) and "\n" not in str(result.exception)
    assert not (tmp_path / "drill-out").exists()


def test_the_printed_key_fits_its_job_alone_and_does_not_show_the_token(tmp_path):
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("the-token-for-drills")
    keys = [run("--print-key", "--job", job, "--token-file", str(token)).output for job in ("gpt", "bert")]
    assert keys[0] == f"{order_key('the-token-for-drills', 'gpt')}\n" != keys[1]
    assert "token" not in keys[0]


def test_a_running_job_is_drilled_without_showing_the_token(tmp_path):
    heard: list[tuple[str, str]] = []

    class Listener(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            heard.append((self.path, str(self.headers)))
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(b'{"injectors": [{"replica": "r1", "pid": 1, "host": "h"}]}')

        def log_message(self, *words: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Listener)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    token = tmp_path / "token"
    token.touch(mode=0o600)
    token.write_text("the-token-for-drills")
    where = ["--lighthouse", f"http://127.0.0.1:{server.server_port}", "--job", "gpt"]
    assert run(*where, "--token-file", str(token), "--list").exit_code == 0
    server.shutdown()
    server.server_close()
    assert {path for path, _ in heard} == {"/v1/jobs/gpt/drill"}
    assert all("Drill " in sent and "the-token-for-drills" not in sent for _, sent in heard)


def test_a_folder_with_other_files_is_left_alone(tmp_path, monkeypatch):
    (tmp_path / "mine.txt").write_text("mine")
    result = run("--out", str(tmp_path), *PROGRAM)
    assert "holds files and is not the folder of an earlier fabric drill" in str(result.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_two_drills_in_one_folder_are_one_sentence(tmp_path):
    out = tmp_path / "out"
    with command.claimed(out, "drill"):
        result = run("--out", str(out), *PROGRAM)
    assert f"Another fabric drill is running in {out}" in str(result.exception)


def test_the_list_says_what_is_possible_and_why_not(monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setattr(started_job, "may_mount", lambda: False)
    shown = run("--list", "--replicas", "2").output
    rows = {words[1]: line for line in shown.splitlines() if len(words := line.split()) > 1}
    assert "yes" in rows["kill"] and "yes" in rows["cut-peers"]
    assert "it needs a job of three replicas or more" in rows["kill-two"]
    assert "it needs the right to mount" in rows["disk-full"]
    assert "it needs three etcd members" in rows["kill-store"]
    assert "stall<=10s" in rows["stall"]


def test_a_log_has_the_tables_in_full_width(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    shown = run("--list").output
    assert max(map(len, shown.splitlines())) > 120


class RecordedDrill:
    """Stands for the drill of a job: it returns records that exist already."""

    records: DrillRecord = record()

    def __init__(self, options, schedule, say, follow=None):
        self.say = say

    def run(self) -> DrillRecord:
        self.say("[/not markup]")
        return self.records


@pytest.mark.parametrize(("expect", "code"), [("rejoined<=60s", 0), (f"steps>={STEPS + 1}", 1)])
def test_a_failed_expectation_is_exit_code_1(expect, code, tmp_path, monkeypatch):
    monkeypatch.setattr(command, "DrillRun", RecordedDrill)
    out = tmp_path / "out"
    result = run("--out", str(out), "--fault", "kill r1", "--expect", expect, *PROGRAM)
    assert result.exit_code == code, result.output
    line = f"fabric drill --replicas 3 --lighthouses 1 --fault 'kill r1' --expect '{expect}' -- "
    assert (line in result.output.replace("\n", " ")) is bool(code)
    document = json.loads((out / "report.json").read_text())
    assert document["holds"] is (code == 0) and document["command"].startswith(line)
    assert document["expectations"][0]["expectation"] == expect
    suite = ElementTree.fromstring((out / "junit.xml").read_bytes())
    assert (suite.get("tests"), suite.get("failures")) == ("2", str(code))
    assert (out / "report.html").read_text().count("<script") == 1


def test_a_plans_expectations_hold_for_its_drill(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "DrillRun", RecordedDrill)
    plan = tmp_path / "plan.json"
    plan.write_text(json.dumps({"faults": [{"fault": "kill", "target": "r1"}], "expect": ["steps>=99"]}))
    result = run("--out", str(tmp_path / "out"), "--plan", str(plan), *PROGRAM)
    assert result.exit_code == 1 and f"--plan {plan}" in result.output.replace("\n", "")


def test_the_page_escapes_what_others_wrote():
    fault = replace(FAULT, observed="<script>alert(1)</script>", about="<b>")
    page = page_of(judge_drill(record(faults=(fault,))), "fabric drill <x>", "held")
    assert "<script>alert" not in page and "&lt;script&gt;" in page and "fabric drill &lt;x&gt;" in page


def test_half_a_character_in_what_others_wrote_is_reported(tmp_path, monkeypatch):
    fault = replace(FAULT, observed="\ud800")
    monkeypatch.setattr(RecordedDrill, "records", record(faults=(fault,)))
    monkeypatch.setattr(command, "DrillRun", RecordedDrill)
    result = run("--out", str(tmp_path / "out"), "--fault", "kill r1", "--expect", "steps>=0", *PROGRAM)
    assert (result.exception is None or isinstance(result.exception, SystemExit)) and result.exit_code == 0
    assert "\\ud800" in (tmp_path / "out" / "report.html").read_text()


def test_the_page_shows_each_fault_and_each_commit():
    verdict = judge_drill(record())
    page = page_of(verdict, "fabric drill", "The job held.")
    commits = sum(len(lines) for lines in verdict.evidence.commits.values())
    assert page.count("<circle") == commits and page.count("(replayed)") == 2
    assert page.count('class="fault"') == 3 and "The job held." in page
    assert "http" not in page.split("</head>")[0]


def test_the_page_of_a_script_that_reports_no_loss_draws_no_curve():
    shown = record()
    for journal in shown.run.journals.values():
        for line in journal.lines:
            line.fields.get("metrics", {}).clear()
    page = page_of(judge_drill(shown), "fabric drill", "The job held.")
    assert "reports no loss" in page and "<circle" not in page


def test_documents_have_no_infinite_numbers():
    never = judge_drill(record(faults=(replace(FAULT, targets=("r9",), pids={}),)), ["rejoined<=1s"])
    document = as_json(never)
    assert json.loads(json.dumps(document, allow_nan=False))["faults"][0]["rejoined_s"] == {"r9": None}
    assert document["expectations"][0]["shown"] == "never"
    case = ElementTree.fromstring(as_junit(never)).find("testcase/failure")
    assert case is not None and case.get("message") == "r9 never returned after kill r9"
    assert fault_table(never).rows[0][4] == "never"


def test_kinds_are_counted_with_their_longest_stall():
    rows = kind_table(judge_drill(record(faults=(FAULT, replace(FAULT, began=FAULT.began + 1))))).rows
    assert [row[:2] for row in rows] == [("kill", "2")]


def test_junit_has_a_skipped_case_for_a_default_that_nothing_measures():
    silent = judge_drill(replace(record(), faults=(), recoveries=None, sightings=()))
    suite = ElementTree.fromstring(as_junit(silent))
    assert len(suite.findall("testcase/skipped")) == 3


def test_the_folder_of_an_earlier_drill_is_used_again(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "DrillRun", RecordedDrill)
    out = tmp_path / "out"
    for _ in range(2):
        assert run("--out", str(out), "--fault", "kill r1", *PROGRAM).exit_code == 0
    assert sorted(Path(p).name for p in out.iterdir()) == [
        ".fabric-drill",
        "junit.xml",
        "report.html",
        "report.json",
    ]
