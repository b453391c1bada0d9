"""The processes of ``benchmarks/transfer.py``: every side brings a state, and wrong bytes end the run."""

import contextlib
import mmap
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks" / "gpu"))

import state
import transfer

from fabric.ckpt_server.format.safetensors_file import ELEMENT_BYTES


@pytest.mark.parametrize("nbytes", [1, 4096, (16 << 20) + 3, 300 << 20])
def test_the_mixed_state_has_the_size_that_was_asked_for(nbytes):
    entries = transfer.mixed(nbytes)
    assert sum(size for *_, size in entries) == nbytes
    assert len({name for name, *_ in entries}) == len(entries)
    for _, dtype, shape, size in entries:
        count = 1
        for n in shape:
            count *= n
        assert size == count * ELEMENT_BYTES[dtype]


def test_all_our_sides_and_raw_tcp_bring_the_state_and_wrong_bytes_are_noticed(tmp_path, capfd):
    made = transfer.StateFile(transfer.mixed(9 << 20), str(tmp_path))
    with contextlib.closing(made), contextlib.closing(transfer.TransferFleet(made, peer=False)) as fleet:
        sides = fleet.sides()
        assert set(sides) == {"one", "three", "same_host", "raw", "bare"}
        for do, giving in sides.values():
            before = sum(worker.processor_s for worker in giving)
            seconds, processor = do()
            assert seconds > 0 and processor > 0
            assert sum(worker.processor_s for worker in giving) > before
        assert fleet.receiver.rss_anon > 0
        with mmap.mmap(made.fd, made.nbytes) as memory:
            memory[5 << 20] ^= 1  # damage block 1 at every sender
        with pytest.raises(SystemExit, match="receiver ended early"):
            fleet.ours(3)
    assert "wrong bytes" in capfd.readouterr().err


def test_the_gpu_version_works_on_the_host():
    """The measures of ``benchmarks/gpu/run.py``, verified, with the host as the device."""
    found = state.state_transfer("cpu", 5 << 20, 1)
    assert set(found) == {"state_fetch_gb_s", "state_load_gb_s", "state_usable_gb_s"}
    assert found["state_usable_gb_s"] < min(found["state_fetch_gb_s"], found["state_load_gb_s"])


def test_the_worse_ratio_of_one_and_three_sources_counts():
    measures = transfer.Measures(seconds={"one": [1.0] * 3, "three": [2.0] * 3, "raw": [1.8] * 3})
    assert measures.ratio("raw", "one") == 1.8
    assert measures.worse("raw") == 0.9
