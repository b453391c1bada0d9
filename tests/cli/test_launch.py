"""``fabric launch`` with real processes as ranks, which play trainers: no torch, and no job."""

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
from forked_processes import run_python

from fabric.ckpt_server.server.debug_probe import catches

DEADLINE_S = 120

# This program plays a rank: a word of $PLAY gives its exit code in each attempt, such as "75 0" for two. The
# program records its arguments and environment, and makes a file when it is ready.
RANK = """
import os, signal, subprocess, sys, time
folder, rank = os.environ["NOTES"], os.environ["RANK"]
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
words = os.environ.get("PLAY_" + rank, os.environ.get("PLAY", "0")).split()
act = words[min(attempt, len(words) - 1)]
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
names = "LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT FABRIC_LAYOUT FABRIC_REPLICA"
note = " ".join(f"{name}={os.environ.get(name, '')}" for name in names.split())
def write(text, name="starts"):
    with open(f"{folder}/{name}", "a") as file:
        file.write(text + "\\n")
write(f"{attempt} {rank} {os.getpid()} {note}")
def leave_children():
    # One in the rank's session, one in a session of its own, and one whose environment has no mark.
    for own_session in (False, True):
        child = subprocess.Popen(sleep, start_new_session=own_session)
        write(str(child.pid), "children")
    child = subprocess.Popen(sleep, env={})
    write(str(child.pid), "children")
if act.startswith("orders/"):
    from fabric.runtime.rank_layout import read_offer, write_order
    memory = int(os.environ["FABRIC_LAYOUT_ORDERS"])
    if rank == "0":
        offer = read_offer(memory)
        write(f"{' '.join(offer.allowed)} / {' '.join(offer.refused)}", "offers")
        write_order(memory, act.removeprefix("orders/").replace("_", " "))
    act = "75"
if act.startswith("attaches"):
    from pathlib import Path
    from fabric.ckpt_server.attach import ServerHandle
    from fabric.ckpt_server.wire.server_settings import ServerSettings
    settings = ServerSettings(job="job", replica="r0", run_dir=Path(folder) / "run", rank=int(rank))
    handle = ServerHandle(settings, 1)
    write(str(handle.pid), "servers")
    act = act.removeprefix("attaches")
if act == "killed":
    os.kill(os.getpid(), signal.SIGKILL)
if act.startswith("leaves"):
    leave_children()
    act = act.removeprefix("leaves")
def end(number, _):
    write(f"{rank} got {signal.Signals(number).name}", "signals")
    if number not in (signal.SIGUSR1, signal.SIGUSR2) and act != "waits-on":
        os._exit(128 + number)
if act.startswith("waits"):
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, end)
    write(rank, "ready")
    while True:
        time.sleep(1000)
print(f"out {attempt}")
print(f"err {attempt}", file=sys.stderr)
sys.exit(int(act))
"""


def _hear_the_terminal() -> None:
    """Restore the signals that shells make background processes ignore, and the one that nohup does."""
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Play:
    """A folder with the script of the ranks and the files that the ranks write."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "rank.py"
        self.script.write_text(RANK)
        self.launchers: list[subprocess.Popen[str]] = []

    def command(self, *options: str) -> list[str]:
        own = [sys.executable, "-m", "fabric.cli.main", "launch", *options, "--no-python"]
        return [*own, sys.executable, str(self.script)]

    def environment(self, **play: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
        settings = {"FABRIC_DISABLE": "1", "FABRIC_REPLICA": "r0", "NOTES": str(self.folder)}
        return {**inherited, **settings, **play}

    def start(self, *options: str, **play: str) -> "subprocess.Popen[str]":
        pipe = subprocess.PIPE
        environment = self.environment(**play)
        process = subprocess.Popen(
            self.command(*options),
            env=environment,
            stdout=pipe,
            stderr=pipe,
            text=True,
            start_new_session=True,
            preexec_fn=_hear_the_terminal,
        )
        self.launchers.append(process)
        return process

    def run(self, *options: str, **play: str) -> "subprocess.CompletedProcess[str]":
        """Run a launcher in a forked process until it ends; ``start`` starts one by ``exec``."""
        return run_python(*self.command(*options)[1:], environment=self.environment(**play))

    def lines(self, name: str) -> list[str]:
        path = self.folder / name
        return path.read_text().splitlines() if path.exists() else []

    def starts(self) -> list[dict[str, str]]:
        """Return each rank's environment and arguments, with its attempt, rank and pid."""
        rows = []
        for line in self.lines("starts"):
            attempt, rank, pid, *words = line.split()
            rows.append(
                {"attempt": attempt, "rank": rank, "pid": pid, **dict(w.split("=", 1) for w in words)}
            )
        return rows

    def pids(self) -> list[int]:
        """Every process that a rank has started, the ranks included."""
        return [int(row["pid"]) for row in self.starts()] + [int(pid) for pid in self.lines("children")]

    def servers(self) -> set[int]:
        """Every checkpoint server to which a rank has attached."""
        return set(map(int, self.lines("servers")))

    def wait_for(self, condition, what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.01)

    def wait_ready(self, ranks: int) -> None:
        self.wait_for(lambda: len(self.lines("ready")) >= ranks, "the ranks to be ready")

    def wait_gone(self) -> None:
        self.wait_for(lambda: not any(map(runs, self.pids())), "every process of the ranks to end")


@pytest.fixture
def play(tmp_path):
    stage = Play(tmp_path)
    yield stage
    for process in stage.launchers:
        process.kill()
        process.communicate()
    for pid in [*stage.pids(), *stage.servers()]:
        with suppress(OSError):
            if str(stage.folder).encode() in Path(f"/proc/{pid}/environ").read_bytes():
                os.kill(pid, signal.SIGKILL)


def _of_the_rank(text: str) -> str:
    """Return the lines that the rank has written, without the launcher's log."""
    return "".join(x for x in text.splitlines(keepends=True) if "fabric.cli.launch." not in x)


def runs(pid: int) -> bool:
    """Return whether the process runs and is not a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


# --- what a rank gets -------------------------------------------------------------------------------------


def test_ranks_get_what_torchrun_gives_them(play):
    done = play.run("--ranks", "3")
    assert done.returncode == 0, done.stderr
    rows = sorted(play.starts(), key=lambda row: row["rank"])
    assert [row["rank"] for row in rows] == ["0", "1", "2"]
    assert len({row["MASTER_PORT"] for row in rows}) == 1
    for row in rows:
        assert row["LOCAL_RANK"] == row["rank"] and row["MASTER_ADDR"] == "127.0.0.1"
        assert (row["WORLD_SIZE"], row["LOCAL_WORLD_SIZE"], row["FABRIC_LAYOUT"]) == ("3", "3", "ranks=3")


def test_options_are_settings_of_the_ranks(play):
    done = play.run("--replica", "r7", "--nproc-per-node", "2", FABRIC_LAYOUT="tp=4 tp=2")
    assert done.returncode == 0, done.stderr
    rows = play.starts()
    assert len(rows) == 2
    assert {(row["FABRIC_REPLICA"], row["FABRIC_LAYOUT"]) for row in rows} == {("r7", "ranks=2,tp=2")}


def test_every_line_says_which_rank_wrote_it(play):
    done = play.run("--ranks", "2", "--log-dir", str(play.folder / "logs"), PLAY="75 0")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["[0] out 0", "[0] out 1", "[1] out 0", "[1] out 1"]
    assert {"[0] err 0", "[1] err 1"} <= set(done.stderr.splitlines())
    log = (play.folder / "logs" / "r0.1.log").read_text().splitlines()
    assert [line for line in log if line.startswith(("---", "out"))] == [
        "--- attempt 1: ranks=2",
        "out 0",
        "--- attempt 2: ranks=2",
        "out 1",
    ]


def test_the_output_of_a_single_rank_is_passed_on_unchanged(play):
    done = play.run()
    assert (done.returncode, done.stdout, _of_the_rank(done.stderr)) == (0, "out 0\n", "err 0\n")


# --- exit codes -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acts", "code", "attempts"),
    [("0", 0, 1), ("75 0", 0, 2), ("killed 0", 0, 2), ("1 0", 1, 1), ("75 1 0", 1, 2), ("2 0", 2, 1)],
)
def test_a_restart_follows_75_and_a_death_and_no_other_end(play, acts, code, attempts):
    done = play.run(PLAY=acts)
    assert done.returncode == code, done.stderr
    assert len(play.starts()) == attempts
    assert ("the replica is not started again" in done.stderr) == (code != 0)


def test_the_launcher_names_the_process_of_each_rank_of_each_attempt(play):
    done = play.run("--ranks", "2", PLAY="75 0")
    for start in play.starts():
        assert f"rank {start['rank']} is process {start['pid']}" in done.stderr


def test_one_ranks_death_restarts_all_ranks_with_a_fresh_rendezvous(play):
    """The launcher ends the other rank, which waits for a dead peer."""
    done = play.run("--ranks", "2", PLAY_0="waits 75 0", PLAY_1="killed 75 0")
    assert done.returncode == 0, done.stderr
    assert [(row["attempt"], row["rank"]) for row in sorted(play.starts(), key=str)] == [
        (str(attempt), str(rank)) for attempt in range(3) for rank in range(2)
    ]
    ports = [{row["MASTER_PORT"] for row in play.starts() if row["attempt"] == str(n)} for n in range(3)]
    assert all(len(port) == 1 for port in ports) and len(set.union(*ports)) == 3
    assert "rank 1 was killed by SIGKILL (ranks=2): attempt 2 begins at once" in done.stderr
    assert "attempt 3 begins in 1 s" in done.stderr


def test_no_other_process_gets_the_port_of_an_attempt(play):
    play.start("--ranks", "1", PLAY="waits")
    other = play.start("--ranks", "1", PLAY="waits")
    play.wait_ready(2)
    first, second = (int(row["MASTER_PORT"]) for row in play.starts())
    assert first != second
    for port in (first, second):
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind(("127.0.0.1", port))
        with socket.socket() as rank0:
            rank0.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            rank0.bind(("", port))
            rank0.listen(1)
    other.terminate()


def test_used_up_restarts_pass_the_code_on(play):
    assert play.run("--restarts", "0", PLAY="killed").returncode == 137
    assert play.run("--restarts", "0", PLAY="75").returncode == 75
    assert len(play.starts()) == 2


def test_a_drained_replica_asks_to_be_started_elsewhere(play):
    leave = play.folder / "leave"
    assert play.run("--leave-file", str(leave)).returncode == 0
    leave.touch()
    assert play.run("--leave-file", str(leave)).returncode == 75


# --- layouts ----------------------------------------------------------------------------------------------


def layouts(play: Play) -> list[str]:
    return [row["FABRIC_LAYOUT"] for row in play.starts() if row["rank"] == "0"]


def test_a_script_that_cannot_build_a_layout_gets_the_next_one(play):
    done = play.run(
        "--ranks", "1:4", "--layout", "tp=4", "--layout", "tp=2", "--layout", "1", PLAY="78 78 78 0"
    )
    assert done.returncode == 0, done.stderr
    assert layouts(play) == ["ranks=4,tp=4", "ranks=4,tp=2", "ranks=2,tp=2", "ranks=1"]


def test_the_ranks_come_back_at_once_in_the_layout_that_rank_0_orders(play):
    ended = play.run("--ranks", "1:2", PLAY="orders/ranks=1_without_0 orders/ranks=2 0")
    assert ended.returncode == 0, ended.stderr
    assert [row["FABRIC_LAYOUT"] for row in play.starts()] == ["ranks=2"] * 2 + ["ranks=1"] + ["ranks=2"] * 2
    assert "the lighthouse orders the layout ranks=1 without 0" in ended.stderr
    assert ended.stderr.count("begins at once") == 2
    assert play.lines("offers") == ["ranks=2 ranks=1 / "] * 2


def test_an_ordered_layout_that_the_script_refuses_is_offered_no_more(play):
    acts = "orders/ranks=2,layers=3+1 78 orders/ranks=2,layers=1+3 0"
    ended = play.run("--layout", "ranks=2,layers=2+2", PLAY=acts)
    assert ended.returncode == 0, ended.stderr
    layouts = [row["FABRIC_LAYOUT"].partition("layers=")[2] for row in play.starts() if row["rank"] == "0"]
    assert layouts == ["2+2", "3+1", "2+2", "1+3"]
    usual = "ranks=2,layers=2+2"
    assert play.lines("offers") == [f"{usual} / ", f"{usual} / ranks=2,layers=3+1"]


def test_a_script_that_cannot_build_any_layout_is_not_started_again(play):
    done = play.run("--ranks", "1:2", PLAY="78")
    assert done.returncode == 1 and layouts(play) == ["ranks=2", "ranks=1"]
    assert 'its script cannot build the layout "ranks=2" and "ranks=1"' in done.stderr


def test_a_device_that_fails_twice_is_left_out(play):
    """On the CPU a rank's number stands for its device."""
    done = play.run("--ranks", "1:3", PLAY_0="0", PLAY_1="76 76 0", PLAY_2="0")
    assert done.returncode == 0, done.stderr
    assert layouts(play) == ["ranks=3", "ranks=3", "ranks=2"]
    assert "device 1 has failed repeatedly" in done.stderr


def test_a_fixed_number_of_ranks_needs_all_devices(play):
    done = play.run("--ranks", "2", PLAY_0="0", PLAY_1="76")
    assert done.returncode == 1 and layouts(play) == ["ranks=2", "ranks=2"]
    assert "1 of its devices work, and 2 ranks are needed" in done.stderr


# --- ends and signals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129)]
)
def test_a_signal_ends_all_ranks_and_no_attempt_follows(play, number, code):
    launcher = play.start("--ranks", "2", PLAY="waits")
    play.wait_ready(2)
    launcher.send_signal(number)
    assert launcher.wait(DEADLINE_S) == code
    assert not any(map(runs, play.pids())) and len(play.starts()) == 2
    assert sorted(play.lines("signals")) == [f"{rank} got {number.name}" for rank in (0, 1)]


def test_other_signals_are_passed_on_and_end_nothing(play):
    launcher = play.start("--ranks", "2", PLAY="waits")
    play.wait_ready(2)
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        launcher.send_signal(number)
        play.wait_for(
            lambda n=number: sum(n.name in line for line in play.lines("signals")) == 2, f"{number.name}"
        )
    assert launcher.poll() is None
    launcher.terminate()
    assert launcher.wait(DEADLINE_S) == 143


def test_ranks_that_do_not_end_are_killed(play):
    launcher = play.start("--ranks", "2", "--stop-s", "0.1", PLAY="waits-on")
    play.wait_ready(2)
    launcher.terminate()
    assert launcher.wait(DEADLINE_S) == 143
    assert not any(map(runs, play.pids()))


def test_a_second_signal_kills_at_once(play):
    launcher = play.start("--ranks", "2", "--stop-s", "100000", PLAY="waits-on")
    play.wait_ready(2)
    launcher.send_signal(signal.SIGINT)
    play.wait_for(lambda: len(play.lines("signals")) == 2, "the first signal")
    launcher.send_signal(signal.SIGINT)
    assert launcher.wait(DEADLINE_S) == 130


def test_a_signal_ends_the_wait_for_the_next_attempt(play):
    launcher = play.start(PLAY="75")
    for line in launcher.stderr:
        if "attempt 6 begins in 8 s" in line:
            break
    launcher.terminate()
    assert launcher.wait(DEADLINE_S) == 143
    assert len(play.starts()) == 5


@pytest.mark.parametrize("acts", ["leaves0", "leaves75 0"])
def test_an_attempt_leaves_no_process_behind(play, acts):
    assert play.run("--ranks", "2", PLAY=acts).returncode == 0
    assert len(play.lines("children")) == 6
    assert not any(map(runs, play.pids()))


def test_a_killed_launcher_leaves_no_process_behind_but_the_checkpoint_server(play):
    launcher = play.start("--ranks", "2", PLAY="attachesleaveswaits")
    play.wait_ready(2)
    assert len(play.pids()) == 8 and all(map(runs, play.pids()))
    launcher.kill()
    launcher.wait(DEADLINE_S)
    play.wait_gone()
    (server,) = play.servers()
    assert runs(server)


def test_what_a_server_adopted_from_an_earlier_launcher_and_a_new_server_watch_is_the_living_launcher(play):
    """An attempt's processes end with their launcher, also before they have attached again."""
    earlier = play.start(PLAY="attacheswaits")
    play.wait_ready(1)
    earlier.kill()
    play.wait_gone()
    launcher = play.start(PLAY="attaches75 attacheswaits")
    play.wait_ready(2)
    (server,) = play.servers()
    os.kill(server, signal.SIGKILL)
    os.kill(int(play.starts()[-1]["pid"]), signal.SIGKILL)
    play.wait_for(lambda: len(play.servers()) == 2, "a new server")
    launcher.kill()
    play.wait_gone()


def test_a_launcher_that_is_killed_before_its_ranks_attach_leaves_no_rank_behind(play):
    launcher = play.start("--ranks", "2", PLAY="waits")
    play.wait_ready(2)
    launcher.kill()
    play.wait_gone()


def test_a_process_without_the_mark_outlives_the_attempt(play):
    """A checkpoint server is such a process: it starts without the mark, in its own session."""
    script = """
import subprocess, sys
from fabric.runtime.process_environment import outliving_environment
sleep = [sys.executable, "-c", "import time; time.sleep(1000)"]
environment, null = outliving_environment(), subprocess.DEVNULL
child = subprocess.Popen(sleep, start_new_session=True, env=environment, stdout=null, stderr=null)
print(child.pid, flush=True)
"""
    play.script.write_text(script)
    done = play.run("--log-dir", str(play.folder))
    assert done.returncode == 0, done.stderr
    pid = int(done.stdout)
    assert runs(pid)
    os.kill(pid, signal.SIGKILL)


# --- words to the lighthouse ------------------------------------------------------------------------------

# A host whose name server does not answer.
NO_NAMES = """
import socket, threading
def look_up(*_, **__):
    threading.Event().wait()
socket.getaddrinfo = look_up
"""


@pytest.fixture(params=["a name that nobody looks up", "a lighthouse that does not answer"])
def mute(request, tmp_path):
    """The environment of a launcher that nobody hears."""
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        if request.param.startswith("a name"):
            url = "http://lighthouse.example:29400"
            (stubs / "sitecustomize.py").write_text(NO_NAMES)
        yield {"FABRIC_DISABLE": "", "FABRIC_LIGHTHOUSE": url, "PYTHONPATH": str(stubs)}


def test_a_launcher_that_nobody_hears_starts_its_ranks_again_and_ends(play, mute):
    launcher = play.start("--ranks", "2", PLAY="75 0", **mute)
    out, _ = launcher.communicate(timeout=DEADLINE_S)
    assert launcher.returncode == 0 and len(play.starts()) == 4
    assert sorted(out.splitlines()) == ["[0] out 0", "[0] out 1", "[1] out 0", "[1] out 1"]


def test_a_launcher_that_nobody_hears_passes_signals_on_and_ends(play, mute):
    launcher = play.start("--ranks", "2", PLAY="75 waits", **mute)
    play.wait_ready(2)
    launcher.send_signal(signal.SIGUSR1)
    play.wait_for(lambda: len(play.lines("signals")) == 2, "the signal")
    launcher.terminate()
    play.wait_gone()
    launcher.terminate()  # it waits no longer for its report
    assert launcher.wait(DEADLINE_S) == 143


def test_a_host_that_cannot_meet_the_others_ends_at_a_signal(play, mute):
    options = ("--nodes", "2", "--node", "0")
    launcher = play.start(*options, **{**mute, "FABRIC_ADVERTISE": "127.0.0.1"})
    play.wait_for(lambda: catches(launcher.pid, signal.SIGTERM), "the launcher to catch signals")
    # A further signal ends the wait until the others know that this host leaves.
    play.wait_for(lambda: launcher.poll() is not None or launcher.terminate(), "the launcher to end")
    # The last signal may come when the launcher has let its handlers go.
    assert launcher.returncode in (143, -signal.SIGTERM) and not play.starts()


# --- mistakes ---------------------------------------------------------------------------------------------


def refused(*words: str, **environment: str) -> str:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("FABRIC_")}
    done = run_python("-m", "fabric.cli.main", "launch", *words, environment={**inherited, **environment})
    assert done.returncode == 1 and len(done.stderr.splitlines()) == 1, done.stderr
    return done.stderr


@pytest.mark.parametrize(
    ("words", "environment", "says"),
    [
        (["no-such.py"], {}, "there is no script no-such.py"),
        (["--no-python", "no-such-program"], {}, "there is no program no-such-program"),
        (["--no-python", "-m", "sh"], {}, "contradict each other"),
        (["-m", "this"], {}, "no lighthouse is named: set --lighthouse=http://"),
        (["--lighthouse", "http://h:1", "-m", "this"], {}, '--replica is ""'),
        (["--replicas", "3:2", "-m", "this"], {"FABRIC_REPLICAS": "3"}, '--replicas is "3:2"'),
        (["-m", "this"], {"FABRIC_REPLICAS": "3:2"}, 'FABRIC_REPLICAS is "3:2"'),
        (["--lighthouse", "h:1", "-m", "this"], {}, "give URLs such as"),
        (["--ranks", "4:1", "-m", "this"], {"FABRIC_DISABLE": "1"}, 'the number of ranks is "4:1"'),
        (["--ranks", "3", "--layout", "tp=2", "-m", "this"], {"FABRIC_DISABLE": "1"}, "no layout of"),
        (["--layout", "dp=2", "-m", "this"], {"FABRIC_DISABLE": "1"}, 'FABRIC_LAYOUT is "dp=2"'),
        (
            ["--log-dir", "/proc/no", "-m", "this"],
            {"FABRIC_DISABLE": "1"},
            "--log-dir /proc/no cannot be made",
        ),
    ],
)
def test_a_mistake_is_one_sentence_before_any_rank_starts(words, environment, says):
    assert says in refused(*words, **environment)


# Stands for torch and for the trainer's API, whose imports take seconds.
STUBS = """
import sys, types
for name in ("torch", "fabric.client"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["torch"].zeros = lambda *_, **__: 0
sys.modules["torch"].optim = types.SimpleNamespace(SGD=lambda *_, **__: None)
"""


def test_a_folder_of_fabrics_name_in_the_working_folder_is_not_imported(tmp_path):
    (tmp_path / "fabric").mkdir()
    (tmp_path / "stubs").mkdir()
    (tmp_path / "stubs" / "sitecustomize.py").write_text(STUBS)
    (tmp_path / "beside.py").write_text("told = 'ran'")
    (tmp_path / "train.py").write_text("import beside, fabric.errors; print(beside.told)")
    for words in (["train.py"], ["-m", "train"]):
        done = subprocess.run(
            [sys.executable, "-P", "-m", "fabric.cli.main", "launch", *words],
            cwd=tmp_path,
            env={**os.environ, "FABRIC_DISABLE": "1", "PYTHONPATH": str(tmp_path / "stubs")},
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, "ran\n"), done.stderr


def test_a_script_that_has_its_own_settings_is_not_checked(play):
    done = subprocess.run(
        play.command("--no-check"),
        env={k: v for k, v in play.environment().items() if not k.startswith("FABRIC_")},
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_the_launcher_imports_no_torch():
    code = (
        "import sys; import fabric.cli.launch.command; "
        "print(sorted(m for m in sys.modules if m.split('.')[0] in ('torch', 'numpy')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
