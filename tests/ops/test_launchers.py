"""The Slurm script, run with stand-ins for Slurm's programs, follows a replica's exit codes."""

import os
import re
import subprocess
from pathlib import Path

import pytest

OPS = Path(__file__).resolve().parents[2] / "ops"
SLURM = OPS / "slurm" / "train.sbatch"
DEADLINE_S = 120

# This script plays the launcher: each attempt ends with the next exit code of a list, and 75 restarts.
_FABRIC = """#!/bin/bash
[ "$1 ${*: -1}" = "launch train.py" ] || exit 99
case " $* " in
    *" --node spare "*)
        echo "$*" >> "$PLAY/spares"
        while kill -0 $PPID 2> /dev/null; do sleep 0.05; done
        exit
        ;;
esac
[ $# -gt 2 ] && echo "$FABRIC_REPLICA $2 $3 $4 $5" >> "$PLAY/hosts"
mine=$PLAY/$FABRIC_REPLICA
while :; do
    echo "$FABRIC_REPLICA" >> "$mine.starts"
    code=$(sed -n 1p "$mine")
    sed -i 1d "$mine"
    [ "$code" = 75 ] || exit "${code:-98}"
done
"""

# This script plays srun: it checks its options, and loses a node where the test says so.
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
printf '%s %s\\n' "$node" "${FABRIC_REPLICA-spare}" >> "$PLAY/steps"
env | grep ^FABRIC_ | sort > "$PLAY/${FABRIC_REPLICA-spare}.env"
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


class Play:
    """A folder of stand-ins for Slurm's programs, and the exit codes of each replica's trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "play"
        self.programs = folder / "bin"
        self.temporary = folder / "tmp"
        for path in (self.folder, self.programs, self.temporary):
            path.mkdir()
        for name, text in (
            ("fabric", _FABRIC),
            ("srun", _SRUN),
            ("scontrol", _SCONTROL),
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

    def submit(self, *words: str, **others: str) -> subprocess.CompletedProcess[str]:
        job = {
            "SLURM_JOB_NAME": "gpt",
            "SLURM_JOB_ID": "71",
            "SLURM_JOB_NUM_NODES": "3",
            "SLURM_JOB_NODELIST": "node[1-3]",
            "FABRIC_LIGHTHOUSE": "http://lh0:8600",
            "FABRIC_JOB": "gpt-7",
            "FABRIC_TOKEN_FILE": "/shared/gpt-7",
        }
        return subprocess.run(
            ["bash", str(SLURM), *words],
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


# --- Slurm ------------------------------------------------------------------------------------------------


def test_slurm_accepts_the_options_of_the_script():
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
    assert told["FABRIC_JOB"] == "gpt-7" and told["FABRIC_REPLICAS"] == "1:3"


def test_replicas_of_several_nodes_have_numbered_hosts_and_what_is_left_stands_by(play):
    play.ends_with("r0", "0", "0")
    done = play.submit("--nodes-per-replica", "2")
    assert done.returncode == 0, done.stderr
    steps = sorted((play.folder / "steps").read_text().splitlines())
    assert steps == ["node1 r0", "node2 r0", "node3 spare"]
    hosts = sorted((play.folder / "hosts").read_text().splitlines())
    assert hosts == ["r0 --nodes 2 --node 0", "r0 --nodes 2 --node 1"]
    assert (play.folder / "spares").read_text() == "launch --nodes 2 --node spare train.py\n"
    assert "FABRIC_REPLICAS=1:1" in (play.folder / "r0.env").read_text()
    assert "FABRIC_REPLICA=" not in (play.folder / "spare.env").read_text()
    assert "replica r0 on node1 has finished" in done.stderr
    assert "replica r0 on node2 has finished" in done.stderr


def test_a_replica_whose_other_node_was_lost_has_finished_with_a_spare_host(play):
    play.ends_with("r0", "0")
    (play.folder / "lost.node2").touch()
    done = play.submit("--nodes-per-replica", "2")
    assert done.returncode == 0, done.stderr
    assert "replica r0 on node2 was lost with its node" in done.stderr


@pytest.mark.parametrize("count", ["0", "4", "x", ""])
def test_a_number_of_nodes_that_does_not_fit_is_refused_before_anything_starts(play, count):
    done = play.submit("--nodes-per-replica", count)
    assert done.returncode == 1
    assert f"--nodes-per-replica {count} does not fit 3 nodes: give 1 to 3" in done.stderr
    assert not (play.folder / "steps").exists()


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


def test_a_replica_with_a_final_exit_code_leaves_the_other_replicas_running(play):
    play.ends_with("r0", "75", "75", "0")
    play.ends_with("r1", "1", "0")
    play.ends_with("r2", "0")
    done = play.submit()
    assert done.returncode == 0 and "replica r1 ended with 1" in done.stderr
    assert [play.starts(replica) for replica in ("r0", "r1", "r2")] == [3, 1, 1]


def test_the_run_folder_cannot_be_guessed_and_is_the_same_for_all_replicas(play):
    """Another user of the node could first make a folder with a predictable name."""
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
