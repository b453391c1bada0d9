"""``fabric lighthouse`` and ``fabric status`` as a person uses them: sentences, exit codes, no torch."""

import asyncio
import json
import signal
import socket
import subprocess
import sys

import etcd_process
import pytest
from lighthouse_support import (
    DEADLINE_S,
    ROOT,
    LighthouseProcess,
    WireMember,
    WireStatus,
    close_all,
    eventually,
    fabric,
    get,
    sentence_of,
    start_job,
    wait_for,
)

from fabric.cli.main import main
from fabric.cli.status import recoverable
from fabric.errors import Unreachable
from fabric.protocol.messages import network as m
from fabric.runtime.http.lighthouse_client import Lighthouses


def test_no_command_but_a_trainers_imports_torch():
    code = (
        "import sys, fabric.cli.main, fabric.cli.lighthouse, fabric.cli.status, fabric.cli.operate\n"
        "import fabric.cli.status, fabric.cli.ckpt_server\n"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=DEADLINE_S).returncode == 0


def test_help_and_version_import_no_command():
    code = (
        "import sys\n"
        "from fabric.cli.main import cli\n"
        "cli(['--help'], standalone_mode=False)\n"
        "cli(['commands'], standalone_mode=False)\n"
        "parts = {m for m in sys.modules if m.startswith('fabric.cli.')}\n"
        "sys.exit(bool(parts - {'fabric.cli.main', 'fabric.cli.lighthouse_options'}))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0
    for name in ("ckpt-server", "demo", "lighthouse", "status"):
        assert name in found.stdout
    assert "0.1.0" in fabric("--version").stdout


def test_every_command_can_be_invoked():
    for name in ("ckpt-server", "lighthouse", "status"):
        assert "sage:" in fabric(name, "--help").stdout
    assert fabric("nonsense").returncode == 2


def test_the_servers_own_arguments_are_passed_on():
    result = fabric("ckpt-server")
    assert result.returncode == 2 and "--job, --replica, --run-dir" in result.stderr


@pytest.fixture
def taken_port():
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


class TestLighthouseRefuses:
    """The refusals run in this process, because a process for each would take long."""

    @pytest.fixture(autouse=True)
    def command(self, monkeypatch, capsys, tmp_path):
        self.store = f"sqlite://{tmp_path}/store.db"

        def run(*arguments: object) -> str:
            monkeypatch.setattr(sys, "argv", ["fabric", "lighthouse", *map(str, arguments)])
            with pytest.raises(SystemExit) as ended:
                main()
            said = capsys.readouterr().err
            assert ended.value.code == 1 and said.startswith("error: ") and said.count("\n") == 1
            return said

        self.refusal = run

    def test_a_lighthouse_refuses_to_start_without_its_store(self, taken_port):
        free = taken_port + 1 if taken_port < 65535 else taken_port - 1
        said = self.refusal("--store", f"etcd://127.0.0.1:{free}", "--limit", "store-wait-s=0.2")
        assert "etcd" in said

    def test_an_impossible_store_url_is_refused(self):
        assert "not one we know" in self.refusal("--store", "redis://x")

    def test_a_file_that_is_not_a_store_is_refused(self, tmp_path):
        (tmp_path / "notes.txt").write_text("these are not tables, but words " * 100)
        assert "not an SQLite file" in self.refusal("--store", f"sqlite://{tmp_path}/notes.txt")

    def test_a_store_in_a_missing_directory_is_refused(self, tmp_path):
        assert "does not exist" in self.refusal("--store", f"sqlite://{tmp_path}/no/store.db")

    def test_a_taken_port_is_refused(self, taken_port):
        assert "taken by another process" in self.refusal(
            "--store", self.store, "--bind", f"127.0.0.1:{taken_port}"
        )

    def test_a_missing_or_empty_token_file_is_refused(self, tmp_path):
        empty = tmp_path / "empty"
        empty.touch(mode=0o600)
        assert "cannot be read" in self.refusal("--store", self.store, "--token-file", tmp_path / "none")
        assert "is empty" in self.refusal("--store", self.store, "--token-file", empty)

    def test_a_lighthouse_that_listens_for_other_hosts_needs_a_token(self):
        assert "without a token" in self.refusal("--store", self.store, "--bind", "0.0.0.0")

    def test_a_ready_file_that_cannot_be_written_is_refused(self, tmp_path):
        assert "ready file" in self.refusal("--store", self.store, "--ready-file", tmp_path / "no" / "ready")
        (tmp_path / "folder").mkdir()
        assert "ready file" in self.refusal("--store", self.store, "--ready-file", tmp_path / "folder")

    @pytest.mark.parametrize(
        "arguments",
        [
            ("--bind", "127.0.0.1:99999"),
            ("--bind", "127.0.0.1:9-8"),
            ("--bind", "no.such.host.invalid"),
            ("--limit", "lease-s=0"),
            ("--limit", "lease-s=nan"),
            ("--limit", "silence-s=0"),
            ("--limit", "autonomy-s=inf"),
            ("--limit", "start-wait-s=-1"),
            ("--limit", "lease-s=soon"),
            ("--limit", "patience-s=5"),
            ("--advertise", "somewhere:80"),
            ("--namespace", "a/b"),
        ],
        ids=" ".join,
    )
    def test_unusable_options_are_refused(self, arguments):
        assert self.refusal("--store", self.store, *arguments)


def test_a_lighthouse_waits_for_a_store_that_is_late(tmp_path, request):
    etcd_process.require_etcd()
    client, peer = etcd_process.free_ports(2)
    etcd = etcd_process.EtcdMember(tmp_path / "etcd", client, peer)
    lighthouse = LighthouseProcess(tmp_path, etcd.url, arguments=("--limit", "store-wait-s=30"))
    request.addfinalizer(etcd.stop)
    request.addfinalizer(lambda: lighthouse.__exit__())
    lighthouse.launch()
    etcd_process.wait_until(lambda: "waiting for the store" in lighthouse.log, "it to say that it waits")
    etcd.launch()
    lighthouse.wait_ready()
    assert lighthouse.end() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_and_sigint_end_it_cleanly(tmp_path, number):
    with LighthouseProcess(tmp_path, f"sqlite://{tmp_path}/store.db") as lighthouse:
        assert lighthouse.end(number) == 0
        assert "Traceback" not in lighthouse.log and "has ended" in lighthouse.log


def test_an_end_while_waiting_for_the_store_is_clean_too(tmp_path):
    lighthouse = LighthouseProcess(tmp_path, "etcd://127.0.0.1:1", arguments=("--limit", "store-wait-s=60"))
    lighthouse.launch()
    wait_for(lambda: "waiting for the store" in lighthouse.log, "it to say that it waits")
    assert lighthouse.end() == 0
    assert "Traceback" not in lighthouse.log


class TestStatus:
    def test_status_says_which_state_would_be_left_if_all_trainers_died(self):
        state = {"generation": 2, "step": 7, "digest": "d", "steps_behind": 3, "age_s": 90.04}
        assert recoverable(state) == "step 7 of generation 2, 90.0 s old, 3 steps behind"
        assert recoverable({**state, "steps_behind": None, "age_s": None}) == "step 7 of generation 2"
        assert recoverable({**state, "steps_behind": 1}).endswith(", 1 step behind")

    async def test_a_complete_job_is_shown_as_finished(self, lighthouse, http, job):
        members = await start_job(http, lighthouse.url, count=2, job=job)
        status = await WireStatus(http, lighthouse.url, "r1", job).open()
        for member in members:
            await member.say(m.Finished(member.newest.fence, 7))
        for member in members:
            await member.next(m.Complete)
        await status.beat("gone")
        await close_all(members)
        shown = fabric(
            *("status", "--lighthouse", lighthouse.url, "--token-file", lighthouse.token_file, "--job", job)
        )
        assert shown.returncode == 0, shown.stderr
        assert "complete: finished at step 7" in shown.stdout
        assert shown.stdout.count("│ finished ") == 2, "both members"
        for wrong in ("recoverable", "waiting for", " run ", "is gone", "newer process"):
            assert wrong not in shown.stdout

    async def test_status_shows_all_jobs_or_one_job(self, lighthouse, http, job):
        members = await start_job(http, lighthouse.url, count=2, job=job)
        joiner = await WireMember(http, lighthouse.url, "late", job=job, replicas="2").open()
        await joiner.epoch(1)
        common = ("--lighthouse", lighthouse.url, "--token-file", lighthouse.token_file)
        listed = fabric("status", *common)
        assert listed.returncode == 0 and job in listed.stdout
        shown = fabric("status", *common, "--job", job)
        assert shown.returncode == 0, shown.stderr
        for text in (
            f"job {job}: generation 1, epoch 1",
            "waiting for",
            "recoverable: nothing",
            "r0",
            "r1",
            "late",
            "outside",
            "alive",
        ):
            assert text in shown.stdout
        whole = json.loads(fabric("status", *common, "--job", job, "--json").stdout)
        assert whole["roster"] == ["r0", "r1"]
        await close_all([*members, joiner])

    async def test_commands_take_their_options_from_the_environment(self, lighthouse, http, job):
        members = await start_job(http, lighthouse.url, count=1, job=job)
        shown = fabric(
            "status",
            FABRIC_LIGHTHOUSE=f"http://127.0.0.1:1,{lighthouse.url}",
            FABRIC_JOB=job,
            FABRIC_TOKEN_FILE=str(lighthouse.token_file),
        )
        assert shown.returncode == 0 and "r0" in shown.stdout
        await close_all(members)

    def test_a_follower_leads_on_to_the_leader_with_the_token(self, tmp_path):
        store = f"sqlite://{tmp_path}/store.db"
        with LighthouseProcess(tmp_path, store) as first, LighthouseProcess(tmp_path, store, "two") as second:
            assert first.url != second.url
            shown = fabric("status", "--lighthouse", second.url, "--token-file", first.token_file)
            assert shown.returncode == 0 and "no job" in shown.stdout

    def test_a_wrong_lighthouse_address_is_reported(self):
        said = sentence_of(fabric("status", "--lighthouse", "http://127.0.0.1:1", "--job", "x"))
        assert "http://127.0.0.1:1: nobody listens there" in said
        assert "no lighthouse is named" in sentence_of(fabric("status"))
        assert "is no URL" in sentence_of(fabric("status", "--lighthouse", "127.0.0.1:1"))

    @pytest.mark.parametrize(
        ("said", "why"),
        [
            (b"Content-Length: 5\r\n\r\nhello", "not a lighthouse"),
            (b"Content-Type: application/json\r\nContent-Length: 50\r\n\r\n{", "broke off in the midst"),
            (b"Content-Type: application/json\r\nContent-Length: 1\r\n\r\n{", "broke off in the midst"),
            (
                b"Content-Type: application/json\r\nContent-Length: 99999\r\n\r\n" + b"[" * 99999,
                "broke off in the midst",
            ),
        ],
    )
    async def test_an_address_that_answers_nonsense_or_half_an_answer_is_reported(self, said, why):
        async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\n" + said)
            await writer.drain()
            writer.close()

        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            with pytest.raises(Unreachable, match=why):
                await Lighthouses((url,), "", "")._ask("/v1/jobs", None)

    def test_a_wrong_token_or_unknown_job_is_reported(self, lighthouse, tmp_path):
        wrong = tmp_path / "token"
        wrong.touch(mode=0o600)
        wrong.write_text("wrong\n")
        common = ("status", "--lighthouse", lighthouse.url)
        assert "refused the token" in sentence_of(fabric(*common, "--token-file", wrong))
        assert "refused the token" in sentence_of(fabric(*common))
        right = (*common, "--token-file", lighthouse.token_file)
        assert "no job nobody" in sentence_of(fabric(*right, "--job", "nobody"))
        assert "letters" in sentence_of(fabric(*right, "--job", "a b"))


async def test_brackets_in_text_of_other_processes_are_not_markup(lighthouse, http, job):
    members = await start_job(http, lighthouse.url, count=1, job=job)
    await members[0].say(m.Heartbeat(3, 1, 1, 0, phase="[red]run[/nothing]"))

    async def told() -> bool:
        _, body = await get(http, f"{lighthouse.url}/v1/jobs/{job}")
        return body["members"][0]["phase"].startswith("[red]")

    await eventually(told, "the beat to arrive")
    common = ("--lighthouse", lighthouse.url, "--token-file", lighthouse.token_file)
    shown = fabric("status", *common, "--job", job)
    assert shown.returncode == 0 and "[red]run[/nothing]" in shown.stdout
    await close_all(members)


def test_the_ready_file_ends_with_the_lighthouse(tmp_path):
    """A left ready file once named a lighthouse at an old address."""
    with LighthouseProcess(tmp_path, f"sqlite://{tmp_path}/store.db") as lighthouse:
        assert lighthouse.ready_file.exists()
        lighthouse.end()
        assert not lighthouse.ready_file.exists()
