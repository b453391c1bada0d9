"""The hook for uncaught errors, beside the hooks of other libraries."""

import subprocess
import sys

from forked_processes import WITHOUT_TORCH, run_with_torch

SCRIPT = """
import sys
from fabric.client.process.excepthook import install_excepthook
from fabric.errors import FabricError

install_excepthook()
before = sys.excepthook
sys.excepthook = lambda *error: before(*error)  # as torch.distributed does
install_excepthook()
raise {error}
"""
ALONE = f"{WITHOUT_TORCH}from fabric.client.process import excepthook\n"


def ended(error: str) -> subprocess.CompletedProcess:
    return run_with_torch("-c", SCRIPT.format(error=error))


def test_a_hook_around_ours_shows_an_error_once():
    done = ended("ValueError('the cause')")
    assert done.returncode == 1
    assert done.stderr.count("ValueError: the cause") == 1 and "RecursionError" not in done.stderr


def test_a_mistake_is_one_sentence_with_a_hook_around_ours():
    done = ended("FabricError('say what to do')")
    assert (done.returncode, done.stderr) == (1, "fabric: say what to do\n")


def test_an_error_at_pythons_prompt_is_that_of_a_cell_because_the_process_goes_on():
    lines = [
        *ALONE.splitlines(),
        "excepthook.install_excepthook()",
        "excepthook.on_uncaught.append(lambda error: print('the job fails'))",
        "excepthook.on_cell_error.append(lambda error: print('the session ends', error))",
        "raise ValueError('a mistake')",
        "print('goes on')",
    ]
    command = [sys.executable, "-i", "-q"]
    done = subprocess.run(
        command, input="\n".join(lines), capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.splitlines() == ["the session ends a mistake", "goes on"]


def test_a_process_without_standard_streams_may_write_to_them_and_gives_their_numbers_to_no_file():
    script = (
        f"{ALONE}import os; excepthook.install_excepthook(); "
        "sys.stdout.write('a'); sys.stderr.write('b'); sys.exit(os.open('/', os.O_RDONLY))"
    )
    closed = 'exec "$@" <&- >&- 2>&-'
    done = subprocess.run(["sh", "-c", closed, "sh", sys.executable, "-c", script], timeout=60, check=False)
    assert done.returncode > 2
