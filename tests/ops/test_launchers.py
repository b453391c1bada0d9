"""The launchers of ops/ do what a trainer's exit code asks for, with programs that only play a part."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

OPS = Path(__file__).resolve().parents[2] / "ops"
REPLICA = OPS / "launch" / "replica.sh"
SLURM = OPS / "slurm" / "train.sbatch"
DEADLINE_S = 120

# Plays torchrun: it runs the ranks one after the other, and makes 1 of every code that is not 0.
_TORCHRUN = """#!/bin/sh
ranks=1
while [ "$1" != --no-python ]; do
    case $1 in --nproc-per-node=*) ranks=${1#*=} ;; --max-restarts=0 | --standalone) ;; *) exit 99 ;; esac
    shift
done
shift
failed=0
rank=0
while [ $rank -lt "$ranks" ]; do
    LOCAL_RANK=$rank "$@" || failed=1
    rank=$((rank + 1))
done
exit $failed
"""

# The same for one rank, which it ends when it is told to end, as torchrun does.
_TORCHRUN_THAT_HEARS = """#!/bin/sh
while [ "$1" != --no-python ]; do shift; done
shift
trap 'kill -TERM -$child; wait $child; exit 1' TERM
LOCAL_RANK=0 setsid "$@" &
child=$!
wait $child
exit 1
"""

# Plays the trainer: each start takes the next line of codes, a code per rank.
_FABRIC = """#!/bin/sh
[ "$1 $2" = "run train.py" ] || exit 99
mine=$PLAY/$FABRIC_REPLICA
echo "$FABRIC_REPLICA" >> "$mine.starts"
: "${LOCAL_RANK:?}"
[ "$LOCAL_RANK" -ne 0 ] || { sed -n 1p "$mine" > "$mine.now"; sed -i 1d "$mine"; }
code=$(cut -d' ' -f$((LOCAL_RANK + 1)) "$mine.now")
[ "$code" != killed ] || kill -9 $PPID $$
[ "$code" != waits ] || { echo $$ > "$PLAY/ready"; exec /bin/sleep 1000; }
exit "${code:-98}"
"""

# Plays Slurm's step: it checks what it is asked for, and loses a node where the play says so.
_SRUN = """#!/bin/sh
node=
while [ "$1" != bash ]; do
    case $1 in
        --no-kill | --nodes=1 | --ntasks=1) ;;
        --nodelist=*) node=${1#*=} ;;
        *) echo "srun: unrecognized option $1" >&2; exit 99 ;;
    esac
    shift
done
printf '%s %s\\n' "$node" "$FABRIC_REPLICA" >> "$PLAY/steps"
env | grep ^FABRIC_ | sort > "$PLAY/$FABRIC_REPLICA.env"
if [ -e "$PLAY/lost.$node" ]; then
    echo "srun: error: Node failure on $node" >&2
    exit 0  # as Slurm 22.05 does
fi
exec "$@"
"""

_SCONTROL = """#!/bin/sh
[ "$1 $2" = "show hostnames" ] || exit 99
[ "$3" = "node[1-3]" ] || exit 99
printf 'node1\\nnode2\\nnode3\\n'
"""

_SLEEP = """#!/bin/sh
echo "$1" >> "$PLAY/sleeps"
"""


class Play:
    """A folder of programs that play their parts, and what each replica's trainer ends with."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "play"
        self.programs = folder / "bin"
        self.temporary = folder / "tmp"
        for path in (self.folder, self.programs, self.temporary):
            path.mkdir()
        for name, text in (
            ("torchrun", _TORCHRUN),
            ("fabric", _FABRIC),
            ("srun", _SRUN),
            ("scontrol", _SCONTROL),
            ("sleep", _SLEEP),
        ):
            self.program(name, text)

    def program(self, name: str, text: str) -> None:
        path = self.programs / name
        path.write_text(text)
        path.chmod(0o755)

    def ends_with(self, replica: str, *codes: str) -> None:
        (self.folder / replica).write_text("".join(f"{code}\n" for code in codes))

    def starts(self, replica: str) -> int:
        path = self.folder / f"{replica}.starts"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def environment(self, **others: str) -> dict[str, str]:
        return {
            "PATH": f"{self.programs}:{os.environ['PATH']}",
            "PLAY": str(self.folder),
            "TMPDIR": str(self.temporary),
            "FABRIC_REPLICA": "r0",
            **others,
        }

    def launch(self, **others: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(REPLICA), "train.py"],
            env=self.environment(**others),
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )

    def submit(self, **others: str) -> subprocess.CompletedProcess[str]:
        job = {
            "SLURM_JOB_NAME": "gpt",
            "SLURM_JOB_ID": "71",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_JOB_NODELIST": "node[1-3]",
            "FABRIC_LIGHTHOUSE": "http://lh0:8600",
            "FABRIC_TOKEN_FILE": "/shared/token",
        }
        return subprocess.run(
            ["bash", str(SLURM)],
            env=self.environment(**{**job, **others}),
            cwd=OPS.parent,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )


@pytest.fixture
def play(tmp_path: Path) -> Play:
    return Play(tmp_path)


# --- one replica ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("codes", "ends", "starts"),
    [
        ("0", 0, 1),
        ("75 75 0", 0, 3),
        ("1", 1, 1),
        ("75 1 0", 1, 2),
        ("139 0", 0, 2),
        ("killed 0", 0, 2),
    ],
)
def test_75_and_deaths_are_restarts_and_1_is_the_end(play, codes, ends, starts):
    play.ends_with("r0", *codes.split())
    done = play.launch()
    assert done.returncode == ends, done.stderr
    assert play.starts("r0") == starts
    assert ("a restart does not help" in done.stderr) == (ends == 1)
    assert list(play.temporary.iterdir()) == []


def test_a_rank_that_exits_with_1_is_enough_and_one_that_was_killed_is_not(play):
    play.ends_with("r0", "143 75", "143 1", "0 0")
    done = play.launch(RANKS="2")
    assert done.returncode == 1 and play.starts("r0") == 4, done.stderr
    assert "ended with 143 75" in done.stderr


def test_quick_deaths_are_restarted_more_and_more_slowly(play):
    play.ends_with("r0", *["75"] * 8, "0")
    assert play.launch().returncode == 0
    assert (play.folder / "sleeps").read_text().split() == ["1", "2", "4", "8", "16", "30", "30", "30"]


def test_without_torchrun_it_ends_at_once(play):
    (play.programs / "torchrun").unlink()
    path = f"{play.programs}:/usr/bin:/bin"
    if shutil.which("torchrun", path=path) is None:
        done = play.launch(PATH=path)
        assert done.returncode == 127 and "cannot be started" in done.stderr


def test_a_drained_replica_asks_to_be_started_elsewhere(play, tmp_path):
    leaves = tmp_path / "leaves"
    play.ends_with("r0", "0", "0")
    assert play.launch(LEAVE_FILE=str(leaves)).returncode == 0
    leaves.touch()
    assert play.launch(LEAVE_FILE=str(leaves)).returncode == 75


def test_the_end_of_the_launcher_ends_its_trainer_and_starts_no_other(play):
    play.ends_with("r0", "waits", "0")
    os.mkfifo(play.folder / "ready")
    play.program("torchrun", _TORCHRUN_THAT_HEARS)
    process = subprocess.Popen([str(REPLICA), "train.py"], env=play.environment(), stderr=subprocess.DEVNULL)
    trainer = int((play.folder / "ready").read_text())
    process.send_signal(signal.SIGTERM)
    try:
        assert process.wait(DEADLINE_S) == 143
        deadline = time.monotonic() + DEADLINE_S
        while runs(trainer):
            assert time.monotonic() < deadline, "the trainer outlives its launcher"
            time.sleep(0.01)
    finally:
        process.kill()
        with suppress(ProcessLookupError):
            os.kill(trainer, signal.SIGKILL)
    assert play.starts("r0") == 1


def runs(pid: int) -> bool:
    """Whether the process is there, and no zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_real_torchrun_keeps_the_codes_of_its_ranks_apart(play):
    """torchrun itself ends with 1 for both of these."""
    (play.programs / "torchrun").unlink()
    (play.programs / "torchrun").symlink_to(Path(sys.executable).parent / "torchrun")
    play.ends_with("r0", "75", "1")
    done = play.launch(OMP_NUM_THREADS="1")
    assert done.returncode == 1 and play.starts("r0") == 2, done.stderr
    assert "ended with 75" in done.stderr


# --- Slurm ------------------------------------------------------------------------------------------------


def test_slurm_options_are_ones_that_it_takes():
    """``--no-kill`` takes no argument but ``set``, ``off`` and ``no``: sbatch ends on any other."""
    options = re.findall(r"^#SBATCH (\S+)$", SLURM.read_text(), flags=re.MULTILINE)
    assert "--no-kill" in options
    assert {option.partition("=")[0] for option in options} <= {
        "--job-name",
        "--ntasks-per-node",
        "--gpus-per-node",
        "--time",
        "--no-kill",
        "--open-mode",
    }


def test_each_node_has_a_step_of_its_own_with_one_replica(play):
    for replica in ("r0", "r1", "r2"):
        play.ends_with(replica, "75", "0")
    done = play.submit()
    assert done.returncode == 0, done.stderr
    steps = sorted((play.folder / "steps").read_text().splitlines())
    assert steps == ["node1 r0", "node2 r1", "node3 r2"]
    assert [play.starts(replica) for replica in ("r0", "r1", "r2")] == [2, 2, 2]
    told = dict(line.split("=", 1) for line in (play.folder / "r1.env").read_text().splitlines())
    assert told["FABRIC_JOB"] == "gpt-71" and told["FABRIC_REPLICAS"] == "1:3"


@pytest.mark.parametrize("node", ["node1", "node3"])
def test_a_lost_node_ends_its_own_replica_alone(play, node):
    for replica in ("r0", "r1", "r2"):
        play.ends_with(replica, "75", "0")
    (play.folder / f"lost.{node}").touch()
    done = play.submit()
    lost = "r0" if node == "node1" else "r2"
    assert done.returncode == 0, "the others have finished the job"
    assert f"replica {lost} was lost with its node" in done.stderr
    assert [play.starts(r) for r in ("r0", "r1", "r2") if r != lost] == [2, 2]


def test_a_job_of_which_every_node_was_lost_has_failed(play):
    for node in ("node1", "node2", "node3"):
        (play.folder / f"lost.{node}").touch()
    assert play.submit().returncode == 1


def test_a_mistake_ends_every_replica_after_one_start(play):
    for replica in ("r0", "r1", "r2"):
        play.ends_with(replica, *["1"] * 200)
    done = play.submit()
    assert done.returncode == 1
    assert [play.starts(replica) for replica in ("r0", "r1", "r2")] == [1, 1, 1]


def test_one_replica_that_must_not_come_back_leaves_the_others_alone(play):
    play.ends_with("r0", "75", "75", "0")
    play.ends_with("r1", "1", "0")
    play.ends_with("r2", "0")
    done = play.submit()
    assert done.returncode == 0 and "replica r1 ended with 1" in done.stderr
    assert [play.starts(replica) for replica in ("r0", "r1", "r2")] == [3, 1, 1]


def test_the_run_folder_cannot_be_guessed_and_is_one_for_the_job(play):
    """Another user of the node could make a folder with a name that is known first."""
    play.program(
        "fabric", _FABRIC.replace("exit 99\n", 'exit 99\necho "$FABRIC_RUN_DIR" >> "$PLAY/runs"\n', 1)
    )
    folders = set()
    for _ in range(2):
        for replica in ("r0", "r1", "r2"):
            play.ends_with(replica, "0")
        assert play.submit().returncode == 0
        (folder,) = set((play.folder / "runs").read_text().split())
        (play.folder / "runs").unlink()
        assert re.fullmatch(re.escape(str(play.temporary)) + r"/fabric-[0-9a-f]{24}", folder)
        folders.add(folder)
    assert len(folders) == 2


@pytest.mark.parametrize("missing", ["FABRIC_LIGHTHOUSE", "FABRIC_TOKEN_FILE"])
def test_a_missing_setting_is_named_before_anything_starts(play, missing):
    done = play.submit(**{missing: ""})
    assert done.returncode != 0 and missing in done.stderr
    assert not (play.folder / "steps").exists()
