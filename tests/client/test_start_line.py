"""What a trainer prints when it begins, and sentences that are cut after a whole word."""

import subprocess
import sys

from hypothesis import example, given
from hypothesis import strategies as st

from fabric.client.loop.local_state import LoopProgress
from fabric.client.loop.shutdown import start_line
from fabric.model import shortened


def test_a_trainer_says_where_it_begins_and_with_which_state():
    fresh, back = LoopProgress(), LoopProgress(source="http://10.0.0.2:7000")
    assert (
        start_line("a", True, 0, 1, fresh)
        == "begins job a at step 0, generation 1, with its own initial state"
    )
    assert start_line("a", False, 0, 1, fresh).endswith("so a loss of all replicas' memory loses the run")
    assert start_line("a", True, 74, 2, back) == (
        "goes on with job a at step 74, generation 2, with the state from http://10.0.0.2:7000"
    )
    assert "begins again with job a at step 0, generation 3" in start_line("a", True, 0, 3, fresh)


@example(";; aa;;;", 7)
@given(st.text(alphabet="ab ;,", max_size=60), st.integers(4, 40))
def test_a_long_sentence_ends_after_a_whole_word(text, most):
    short = shortened(text, most)
    assert len(short) <= most
    if short != text:
        kept = short.removesuffix("...")
        assert kept != short and text.startswith(kept)
        words = kept.rpartition(" ")[0]
        assert text[len(kept) : len(kept) + 1] in (*" ,;:(", "") or 2 * len(words) <= len(kept)


def test_an_interrupted_job_says_one_line():
    script = (
        "from fabric.client.process import excepthook\n"
        "excepthook.install_excepthook()\n"
        "excepthook.on_uncaught.append(lambda error: None)\n"
        "raise KeyboardInterrupt\n"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert ended.stderr == "fabric: interrupted: this process leaves its job, and other replicas go on\n"
    assert ended.returncode == -2, "as every interrupted program, 130 in a shell"
